from __future__ import annotations

import gzip
import random
import stat
import struct
import tarfile
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from adapters.tokenizer_files import TOKENIZER_FILES
from api.archives import unpack
from api.members import Members
from tests.api.archive_files import CONFIG, GOOD, WEIGHTS, tar_of, tar_special, zip_of

LIMIT = 4 << 20


def unpacked(
    tmp_path: Path, data: bytes, name: str, limit: int = LIMIT
) -> tuple[Members, dict[str, bytes]]:
    """What `unpack` found, and the files it wrote."""
    archive, folder = tmp_path / "archive", tmp_path / "folder"
    archive.write_bytes(data)
    folder.mkdir()
    members = Members()
    unpack(archive, name, folder, limit, members)
    members.finish()
    outside = {path.name for path in tmp_path.iterdir()} - {"archive", "folder"}
    assert not outside, f"written outside: {outside}"
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")}
    assert set(files) <= {CONFIG, WEIGHTS, *TOKENIZER_FILES}
    return members, files


def codes(members: Members) -> set[str]:
    return {violation.code for violation in members.violations}


@pytest.mark.parametrize("folder", ["", "./", "my-adapter/", "./my-adapter/"])
def test_adapter_files_are_read_from_either_kind(tmp_path: Path, folder: str) -> None:
    content = {folder + name: data for name, data in GOOD.items()}
    for name, data in (("a.zip", zip_of(content)), ("a.tgz", tar_of(content))):
        place = tmp_path / name
        place.mkdir()
        members, files = unpacked(place, data, name)
        assert files == GOOD
        assert not members.violations and not members.warnings


def test_tokenizer_files_of_the_adapters_folder_come_along(tmp_path: Path) -> None:
    """A zip is known as a whole; of a tar, what comes first is taken first."""
    tokenizer = {"x/tokenizer.json": b"{}", "x/chat_template.jinja": b"hi"}
    adapter = {"x/" + name: data for name, data in GOOD.items()}
    other = {"tokenizer.json": b"other", "x/y/added_tokens.json": b"other"}
    expected = GOOD | {"tokenizer.json": b"{}", "chat_template.jinja": b"hi"}
    for name, content in (
        ("first.zip", other | tokenizer | adapter),
        ("last.zip", adapter | tokenizer | other),
        ("last.tgz", adapter | tokenizer | other),
    ):
        place = tmp_path / name
        place.mkdir()
        data = zip_of(content) if name.endswith("zip") else tar_of(content)
        members, files = unpacked(place, data, name)
        assert files == expected
        assert not members.violations
        (warning,) = members.warnings
        assert warning.endswith(": tokenizer.json, x/y/added_tokens.json")


def test_a_tokenizer_file_taken_from_the_wrong_folder_does_not_stay(tmp_path: Path) -> None:
    adapter = {"x/" + name: data for name, data in GOOD.items()}
    content = {"tokenizer.json": b"other", "x/tokenizer.json": b"{}"} | adapter
    members, files = unpacked(tmp_path, tar_of(content), "a.tgz")
    assert files == GOOD
    assert members.misplaced == ("tokenizer.json",)
    assert "tokenizer.json, x/tokenizer.json" in members.warnings[0]


def test_folder_entries_and_harmless_files_are_passed_over(tmp_path: Path) -> None:
    extra = {"x/": b"", "x/README.md": b"hi", "x/training_args.bin": b"?", "__MACOSX/._x": b""}
    content = extra | {"x/" + name: data for name, data in GOOD.items()}
    members, files = unpacked(tmp_path, zip_of(content), "A.ZIP")
    assert files == GOOD and not members.violations
    assert members.warnings == (
        "ignored files that are not part of the adapter: x/README.md, x/training_args.bin",
    )


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("../adapter_config.json", "unsafe_name"),
        ("a/../../adapter_config.json", "unsafe_name"),
        ("/etc/adapter_config.json", "unsafe_name"),
        ("C:/adapter_config.json", "unsafe_name"),
        ("C:\\adapter_config.json", "unsafe_name"),
        ("..\\adapter_config.json", "unsafe_name"),
        ("a\nb", "unsafe_name"),
        ("a//adapter_config.json", "unsafe_name"),
        ("n" * 2000, "unsafe_name"),
        ("checkpoint-10/adapter_model.safetensors", "sub_folder"),
        ("deep/er/adapter_model.safetensors", "sub_folder"),
        ("adapter_model.bin", "unexpected_weights"),
        ("optimizer.pt", "unexpected_weights"),
        ("step-250.safetensors", "unexpected_weights"),
        ("Adapter_Model.safetensors", "unexpected_weights"),
        ("more.zip", "nested_archive"),
        ("more.tar.gz", "nested_archive"),
    ],
)
def test_names_that_are_refused_in_either_kind(tmp_path: Path, name: str, code: str) -> None:
    content = list((GOOD | {name: b"x"}).items())
    for kind, data in (("a.zip", zip_of(content)), ("a.tar.gz", tar_of(content))):
        place = tmp_path / kind
        place.mkdir()
        members, _ = unpacked(place, data, kind)
        assert codes(members) == {code}
        assert all(len(violation.subject) <= 100 for violation in members.violations)


def test_files_in_two_folders_are_refused(tmp_path: Path) -> None:
    data = zip_of({"a/" + CONFIG: b"{}", "b/" + WEIGHTS: b""})
    assert codes(unpacked(tmp_path, data, "a.zip")[0]) == {"several_folders"}


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_duplicates_are_refused(tmp_path: Path) -> None:
    pairs = [*GOOD.items(), (CONFIG, b"{other}")]
    for kind, data in (("a.zip", zip_of(pairs)), ("a.tgz", tar_of(pairs))):
        place = tmp_path / kind
        place.mkdir()
        assert "duplicate_file" in codes(unpacked(place, data, kind)[0])


def test_a_name_with_a_nul_is_not_cut(tmp_path: Path) -> None:
    data = zip_of({CONFIG + "X.bin": b"{}"}).replace(b".jsonX.bin", b".json\0.bin")
    members, files = unpacked(tmp_path, data, "a.zip")
    assert codes(members) == {"unsafe_name"} and not files


@pytest.mark.parametrize(
    "member",
    [
        tar_special(CONFIG, tarfile.SYMTYPE, "/etc/passwd"),
        tar_special(CONFIG, tarfile.LNKTYPE, "../../etc/passwd"),
        tar_special(CONFIG, tarfile.CHRTYPE),
        tar_special(CONFIG, tarfile.BLKTYPE),
        tar_special(CONFIG, tarfile.FIFOTYPE),
        tar_special(CONFIG, tarfile.CONTTYPE),
        tar_special("harmless", tarfile.SYMTYPE, "/"),
    ],
)
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    data = tar_of([(member, b""), (WEIGHTS, b"w")])
    members, files = unpacked(tmp_path, data, "a.tgz")
    assert "archive_member" in codes(members)
    assert CONFIG not in files


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_and_devices_in_a_zip_are_refused(tmp_path: Path, kind: int) -> None:
    info = zipfile.ZipInfo(CONFIG)
    info.external_attr = (kind | 0o777) << 16
    members, files = unpacked(tmp_path, zip_of([(info, b"/etc/passwd"), (WEIGHTS, b"")]), "a.zip")
    assert codes(members) == {"archive_member"} and CONFIG not in files


def test_more_unpacked_bytes_than_the_limit_are_refused(tmp_path: Path) -> None:
    content = GOOD | {WEIGHTS: bytes(2 * LIMIT)}
    for kind, data in (("a.zip", zip_of(content)), ("a.tgz", tar_of(content))):
        assert len(data) < 64 << 10
        place = tmp_path / kind
        place.mkdir()
        members, files = unpacked(place, data, kind)
        assert codes(members) & {"archive_refused", "archive_member"}
        assert len(files.get(WEIGHTS, b"")) <= LIMIT + (1 << 20)


def test_a_zip_that_lies_about_its_sizes_stops_at_them(tmp_path: Path) -> None:
    size = 2 * LIMIT
    data = zip_of({WEIGHTS: bytes(size), CONFIG: b"{}"})
    data = data.replace(struct.pack("<I", size), struct.pack("<I", 100))
    members, files = unpacked(tmp_path, data, "a.zip")
    assert codes(members) == {"archive_unreadable"}
    assert len(files[WEIGHTS]) <= 100


def test_a_bomb_in_an_ignored_member_of_a_tar_is_refused(tmp_path: Path) -> None:
    data = tar_of({"README.md": bytes(3 * LIMIT)} | GOOD)
    assert codes(unpacked(tmp_path, data, "a.tgz")[0]) == {"archive_refused"}


def test_tight_packing_beyond_64_mib_is_refused(tmp_path: Path) -> None:
    data = zip_of({CONFIG: b"{}", WEIGHTS: bytes(65 << 20)})
    members, files = unpacked(tmp_path, data, "a.zip", limit=1 << 30)
    assert codes(members) == {"archive_member"} and WEIGHTS not in files
    place = tmp_path / "tar"
    place.mkdir()
    data = tar_of({CONFIG: b"{}", WEIGHTS: bytes(70 << 20)})
    assert codes(unpacked(place, data, "a.tgz", limit=1 << 30)[0]) == {"archive_refused"}


def test_too_many_members_are_refused(tmp_path: Path) -> None:
    content = {f"{i}.txt": b"" for i in range(10_000)} | GOOD
    for kind, data in (("a.zip", zip_of(content)), ("a.tgz", tar_of(content))):
        place = tmp_path / kind
        place.mkdir()
        members, _ = unpacked(place, data, kind)
        assert "archive_refused" in codes(members)
        assert len(members.violations) < 5


def test_headers_that_ask_for_much_memory_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo(CONFIG)
    info.pax_headers = {"comment": "x" * (2 << 20)}
    members, _ = unpacked(tmp_path, tar_of([(info, b"{}")]), "a.tgz")
    assert codes(members) == {"archive_refused"}
    place = tmp_path / "zip"
    place.mkdir()
    data = zip_of({f"{i:05}" + "n" * 1000: b"" for i in range(2000)})
    assert codes(unpacked(place, data, "a.zip")[0]) == {"archive_refused"}


def test_encrypted_and_strangely_packed_members_are_refused(tmp_path: Path) -> None:
    data = bytearray(zip_of({CONFIG: b"{}"}))
    data[data.index(b"PK\1\2") + 8] |= 1
    members, files = unpacked(tmp_path, bytes(data), "a.zip")
    assert codes(members) == {"archive_member"} and not files
    place = tmp_path / "bzip2"
    place.mkdir()
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr(CONFIG, b"{}")
    packed = (tmp_path / "b.zip").read_bytes()
    assert codes(unpacked(place, packed, "a.zip")[0]) == {"archive_member"}


@pytest.mark.parametrize("data", [b"", b"PK", b"\x1f\x8b", b"<html>", bytes(1000)])
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    for kind in ("a.zip", "a.tar.gz"):
        place = tmp_path / kind
        place.mkdir()
        members, files = unpacked(place, data, kind)
        # Zeros and nothing are an empty tar: no files, which validation reports.
        assert "archive_unreadable" in codes(members) or (kind == "a.tar.gz" and not files)


def test_cut_archives_are_refused(tmp_path: Path) -> None:
    content = GOOD | {WEIGHTS: random.Random(0).randbytes(100_000)}
    for kind, data in (("a.zip", zip_of(content)), ("a.tgz", tar_of(content))):
        for share in (0.1, 0.5, 0.99, 1.0):
            place = tmp_path / f"{kind}{share}"
            place.mkdir()
            cut = data[: int(len(data) * share) - 1]
            members, _ = unpacked(place, cut, kind)
            assert codes(members) == {"archive_unreadable"}, (kind, share)


def test_damaged_archives_never_do_more_than_be_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    content = GOOD | {WEIGHTS: rng.randbytes(300)}
    tar = gzip.decompress(tar_of(content))
    for i in range(300):
        kind = ("a.zip", "a.tgz")[i % 2]
        data = bytearray(zip_of(content) if kind == "a.zip" else tar)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        packed = bytes(data) if kind == "a.zip" else gzip.compress(data, 1)
        place = tmp_path / str(i)
        place.mkdir()
        unpacked(place, packed, kind)


def test_a_tar_is_unpacked_once_from_front_to_back(tmp_path: Path) -> None:
    content = {f"{i}.txt": bytes(512 * i) for i in range(20)} | GOOD
    with mock.patch("gzip._GzipReader._rewind", side_effect=AssertionError("started over")):
        _, files = unpacked(tmp_path, tar_of(content), "a.tgz")
    assert files == GOOD
