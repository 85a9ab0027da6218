"""Uploads that must be refused for how their files are packed or called, made from a good adapter.

Each is a name, the code of a violation it must be answered with, and the files.
"""

from __future__ import annotations

import gzip
import stat
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Mapping

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.archive_files import tar_of, tar_special, zip_of

#: What the bombs unpack to, which must be more than the server takes.
BOMB_BYTES = 24 << 20

#: The files of one upload: name and content.
Files = list[tuple[str, bytes]]
Case = tuple[str, str, Files]


def hostile_members(good: Mapping[str, bytes]) -> Iterator[Case]:
    """Names that lead elsewhere or show otherwise, as files of a form and in archives."""
    for name in (
        f"../{CONFIG_FILE}",
        "../../x",
        "/etc/passwd",
        "C:\\x",
        "C:/x",
        "..\\x",
        "a/../../x",
        f"{CONFIG_FILE}\u202enosj",
        "\u2066x\u2069",
        "a\u200bb",
        "a\nb",
        "a\x7fb",
        "a//b",
        "n" * 3000,
    ):
        members = [*good.items(), (name, b"x")]
        if "\n" not in name and "C:\\" not in name:  # of which a form's reader takes the last part
            yield (f"a file called {name[:30]!r}", "unsafe_name", members)
        yield (f"{name[:30]!r} in a zip", "unsafe_name", [("a.zip", zip_of(members))])
        yield (f"{name[:30]!r} in a tar", "unsafe_name", [("a.tgz", tar_of(members))])
    nul = zip_of([*good.items(), (f"{CONFIG_FILE}X.bin", b"{}")])
    nul = nul.replace(b".jsonX.bin", b".json\0.bin")
    yield ("a NUL in a zip's name", "unsafe_name", [("a.zip", nul)])
    for inner in ("a.zip", "a.tar.gz", "a.7z"):
        nested = zip_of([*good.items(), (inner, zip_of(good))])
        yield (f"{inner} in a zip", "nested_archive", [("a.zip", nested)])
    for kind in (
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
    ):
        special = tar_special(CONFIG_FILE, kind, "/etc/passwd")
        packed = tar_of([(special, b""), (WEIGHTS_FILE, good[WEIGHTS_FILE])])
        yield (f"a tar's member of type {kind!r}", "archive_member", [("a.tgz", packed)])
    through = tar_of(
        [(tar_special("x", tarfile.SYMTYPE, "/tmp"), b""), ("x/evil", b"x"), *good.items()]
    )
    yield ("a file through a symlink", "archive_member", [("a.tgz", through)])
    sparse = tarfile.TarInfo(WEIGHTS_FILE)
    sparse.pax_headers = {"GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,0"}
    packed = tar_of([(sparse, b""), (CONFIG_FILE, good[CONFIG_FILE])])
    yield ("a sparse member of 1 TiB", "archive_refused", [("a.tgz", packed)])
    for mode in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO):
        info = zipfile.ZipInfo(CONFIG_FILE)
        info.external_attr = (mode | 0o777) << 16
        packed = zip_of([(info, b"/etc/passwd"), (WEIGHTS_FILE, good[WEIGHTS_FILE])])
        yield (f"a zip's member of mode {mode:o}", "archive_member", [("a.zip", packed)])


def hostile_archives(good: Mapping[str, bytes]) -> Iterator[Case]:
    """Bombs, lies about sizes, floods of members, damage."""
    bomb = dict(good) | {"README.md": bytes(BOMB_BYTES)}
    yield ("a zip bomb", "archive_member", [("a.zip", zip_of(bomb))])
    yield ("a gzip bomb", "archive_refused", [("a.tgz", tar_of(bomb))])
    yield ("a zip of 100,000 members", "archive_refused", [("a.zip", _flooding_zip())])
    headers = b"".join(tarfile.TarInfo(f"{i}").tobuf() for i in range(2000))
    flood = gzip.compress(headers * 50 + bytes(1024), 1)
    yield ("a tar of 100,000 members", "archive_refused", [("a.tgz", flood)])
    packed = zip_of(good)
    size = len(good[WEIGHTS_FILE])
    lying = packed.replace(struct.pack("<I", size), struct.pack("<I", 100))
    yield ("a zip that lies about sizes", "archive_unreadable", [("a.zip", lying)])
    yield ("overlapping members", "archive_unreadable", [("a.zip", _overlapping(good))])
    yield ("a cut zip", "archive_unreadable", [("a.zip", packed[: len(packed) // 2])])
    tar = tar_of(good)
    yield ("a cut tar", "archive_unreadable", [("a.tgz", tar[:-20])])
    yield ("garbage behind a gzip", "archive_unreadable", [("a.tgz", tar + b"garbage")])
    yield ("a gzip in a gzip", "archive_unreadable", [("a.tgz", gzip.compress(tar))])
    huge = tarfile.TarInfo(CONFIG_FILE)
    huge.pax_headers = {"comment": "x" * (3 << 20)}
    yield ("3 MiB of tar headers", "archive_refused", [("a.tgz", tar_of([(huge, b"{}")]))])
    yield ("an archive and files", "archive_and_files", [("a.zip", packed), *good.items()])
    yield ("two archives", "archive_and_files", [("a.zip", packed), ("b.zip", packed)])
    for name in ("a.7z", "a.rar", "a.tar", "a.tar.bz2", "a.tar.xz", "a.tar.zst"):
        yield (name, "archive_kind", [(name, packed)])
    encrypted = bytearray(packed)
    for start in (b"PK\1\2", b"PK\3\4"):
        encrypted[encrypted.index(start) + (8 if start == b"PK\1\2" else 6)] |= 1
    yield ("an encrypted member", "archive_member", [("a.zip", bytes(encrypted))])


def _flooding_zip() -> bytes:
    """A zip whose directory, of version 64, lists its one member 100,000 times."""
    data = zip_of({"x": b""})
    start, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    directory = data[start:end] * 100_000
    place = (100_000, 100_000, len(directory), start)
    tail = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *place)
    tail += struct.pack("<4sLQL", b"PK\6\7", 0, start + len(directory), 1)
    tail += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0)
    return data[:start] + directory + tail


def _overlapping(good: Mapping[str, bytes]) -> bytes:
    """A zip whose second member lies where the first one does."""
    data = bytearray(zip_of(good))
    first = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", first + 4)
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    return bytes(data)
