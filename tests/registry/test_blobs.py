"""Blobs: whole or absent, found by content only, swept with care."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from registry import blobs as module
from registry.blobs import RECORD_FILE, BlobStore, Staging
from registry.errors import InvalidName, NotFound, StorageFull
from registry.records import Version
from tests.registry.servers import manifest

A, B = "a" * 64, "b" * 64


def test_a_committed_blob_is_found_and_its_staging_is_gone(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    with blobs.stage() as staging:
        assert staging.path.stat().st_mode & 0o777 == 0o700
        _fill(staging)
        path = blobs.commit(staging, A)
    assert blobs.open(A) == path == BlobStore(tmp_path).open(A)
    assert _content(path) == {CONFIG_FILE: b"config", WEIGHTS_FILE: b"weights"}
    assert list((tmp_path / "staging").iterdir()) == []


def test_an_upload_given_up_leaves_nothing(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    with pytest.raises(ConnectionResetError), blobs.stage() as staging:
        _fill(staging)
        raise ConnectionResetError
    assert list((tmp_path / "staging").iterdir()) == []
    with pytest.raises(NotFound):
        blobs.open(A)


@pytest.mark.parametrize(
    "digest",
    ["", "..", "../" * 20 + "etc/passwd", "/etc/passwd", A[:-1], A + "0", A.upper(), A + "\n"]
    + ["file:///etc/passwd", "http://169.254.169.254/", "org/name", "a" * 62 + "/.", "\0" * 64],
)
def test_only_a_digest_ever_becomes_a_path(tmp_path: Path, digest: str) -> None:
    blobs = BlobStore(tmp_path / "root")
    before = _tree(tmp_path)
    with pytest.raises(InvalidName):
        blobs.open(digest)
    with pytest.raises(InvalidName):
        blobs.write_record(digest, "t", "a", {})
    with blobs.stage() as staging:
        _fill(staging)
        with pytest.raises(InvalidName):
            blobs.commit(staging, digest)
    assert _tree(tmp_path) - before <= {tmp_path / "root/lock"}


def test_only_the_two_adapter_files_become_a_blob(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    with blobs.stage() as staging:
        _fill(staging)
        (staging.path / "extra.bin").write_bytes(b"x")
        with pytest.raises(ValueError, match="extra.bin"):
            blobs.commit(staging, A)
    with blobs.stage() as staging:
        _fill(staging)
        (staging.path / WEIGHTS_FILE).unlink()
        (staging.path / WEIGHTS_FILE).symlink_to("/etc/passwd")
        with pytest.raises(ValueError):
            blobs.commit(staging, A)
    with pytest.raises(NotFound):
        blobs.open(A)


def test_a_blob_that_is_there_already_is_kept_with_its_records(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    path = _put(blobs, A)
    blobs.write_record(A, "t", "a", _version(1).to_json())
    inodes = {p.name: p.stat().st_ino for p in path.iterdir()}
    assert _put(blobs, A) == path
    assert {p.name: p.stat().st_ino for p in path.iterdir()} == inodes
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_a_damaged_blob_is_healed_by_the_next_upload_of_its_content(
    tmp_path: Path, damage: str
) -> None:
    blobs = BlobStore(tmp_path)
    path = _put(blobs, A)
    blobs.write_record(A, "t", "a", _version(1).to_json())
    weights = path / WEIGHTS_FILE
    reader = open(weights, "rb")
    if damage == "flipped":
        weights.write_bytes(b"Weights")
    elif damage == "cut":
        os.truncate(weights, 3)
    else:
        weights.unlink()
    _put(blobs, A)
    assert weights.read_bytes() == b"weights"
    assert [a.name for a in blobs.recorded()] == ["a"]
    reader.close()


def test_the_callers_own_check_decides_about_the_blob_that_is_there(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    _put(blobs, A)
    asked: list[Path] = []

    def intact(path: Path) -> bool:
        asked.append(path)
        return True

    with blobs.stage() as staging:
        _fill(staging, weights=b"other")
        blobs.commit(staging, A, verify=intact)
    assert asked == [blobs.open(A)]
    assert (blobs.open(A) / WEIGHTS_FILE).read_bytes() == b"weights"
    with blobs.stage() as staging:
        _fill(staging, weights=b"other")
        blobs.commit(staging, A, verify=lambda path: False)
    assert (blobs.open(A) / WEIGHTS_FILE).read_bytes() == b"other"


def test_parallel_commits_and_records_of_one_content_all_succeed(tmp_path: Path) -> None:
    stores = [BlobStore(tmp_path), BlobStore(tmp_path)]
    gate = threading.Barrier(10)

    def upload(i: int) -> Path:
        blobs = stores[i % 2]
        with blobs.stage() as staging:
            _fill(staging)
            gate.wait()
            path = blobs.commit(staging, A)
        blobs.write_record(A, "t", f"a{i}", _version(i).to_json())
        return path

    with ThreadPoolExecutor(10) as pool:
        assert len(set(pool.map(upload, range(10)))) == 1
    assert sorted(a.name for a in stores[0].recorded()) == [f"a{i}" for i in range(10)]
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_kill_at_any_step_of_a_commit_leaves_the_blob_whole_or_absent(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from registry import blobs as module
from registry.blobs import BlobStore
step = int(sys.argv[2])
def count(real):
    def call(*a, **k):
        global step
        step -= 1
        if step == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*a, **k)
    return call
store = BlobStore(Path(sys.argv[1]))
staging = store.stage()
(staging.path / "adapter_config.json").write_bytes(b"config")
for name in ("fsync", "rename", "replace", "utime"):
    setattr(os, name, count(getattr(os, name)))
(staging.path / "adapter_model.safetensors").write_bytes(b"weights")
store.commit(staging, "a" * 64)
"""
    ends = []
    for step in range(1, 20):
        root = tmp_path / str(step)
        end = subprocess.run([sys.executable, "-c", script, root, str(step)], check=False)
        assert end.returncode in (0, -signal.SIGKILL)
        blobs = BlobStore(root)
        blobs.sweep(set(), set(), min_age_s=3600)
        assert list((root / "staging").iterdir()) == []
        present = (root / "blobs" / "aa" / A).exists()
        if present:
            assert _content(blobs.open(A)) == {CONFIG_FILE: b"config", WEIGHTS_FILE: b"weights"}
        ends.append((end.returncode, present))
        _put(blobs, A)  # repeating the upload always works
        if end.returncode == 0:
            break
    assert (-signal.SIGKILL, False) in ends and (-signal.SIGKILL, True) in ends
    assert ends[-1] == (0, True)


def test_everything_is_on_disk_before_the_blob_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = BlobStore(tmp_path)
    calls: list[str] = []
    fsync, rename = module._fsync, os.rename

    def noting_fsync(path: Path) -> None:
        calls.append(path.name)
        fsync(path)

    def noting_rename(source: Path, target: Path) -> None:
        calls.append("rename")
        rename(source, target)

    monkeypatch.setattr(module, "_fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    with blobs.stage() as staging:
        _fill(staging)
        blobs.commit(staging, A)
        staged = staging.path.name
    assert calls == [CONFIG_FILE, WEIGHTS_FILE, staged, "blobs", "rename", "aa"]


def test_a_sweep_removes_what_nobody_needs_and_nothing_else(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    digests = [f"{i:064x}" for i in range(4)]
    referenced, used, old, young = digests
    for digest in digests:
        _age(_put(blobs, digest))
    os.utime(blobs.open(young))
    assert blobs.sweep({referenced}, {used}, min_age_s=600) == {old}
    for digest in (referenced, used, young):
        assert blobs.open(digest)
    with pytest.raises(NotFound):
        blobs.open(old)
    assert list((tmp_path / "staging").iterdir()) == []


def test_content_uploaded_again_counts_as_young_but_a_new_record_does_not(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    for digest in (A, B):
        _age(_put(blobs, digest))
    _put(blobs, A)
    blobs.write_record(B, "t", "b", _version(1).to_json())
    assert blobs.sweep(set(), set(), min_age_s=600) == {B}


def test_a_sweep_spares_uploads_in_progress_also_of_other_processes(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    script = (
        "import sys\nfrom pathlib import Path\nfrom registry.blobs import BlobStore\n"
        "s = BlobStore(Path(sys.argv[1])).stage()\nprint(s.path, flush=True)\nsys.stdin.read()\n"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", script, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other,
        blobs.stage() as mine,
    ):
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        blobs.sweep(set(), set(), min_age_s=0)
        assert theirs.is_dir() and mine.path.is_dir()
        other.kill()
        other.wait()
        blobs.sweep(set(), set(), min_age_s=0)
        assert not theirs.exists() and mine.path.is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_storage_full_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    blobs = BlobStore(tmp_path)
    full = OSError(number, os.strerror(number))

    def fail(_: int) -> None:
        raise full

    with pytest.raises(StorageFull), blobs.stage():
        raise full
    with monkeypatch.context() as patch, pytest.raises(StorageFull), blobs.stage() as staging:
        _fill(staging)
        patch.setattr(os, "fsync", fail)
        blobs.commit(staging, A)
    assert list((tmp_path / "staging").iterdir()) == []
    with pytest.raises(NotFound):
        blobs.open(A)
    _put(blobs, A)  # room again


def test_records_are_kept_and_forgotten_per_version(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    for digest in (A, B):
        _put(blobs, digest)
    for digest, name, number in ((A, "a", 1), (A, "a", 3), (B, "a", 2), (A, "b", 1), (A, "a", 1)):
        blobs.write_record(digest, "t", name, _version(number).to_json())
    assert [(a.name, [v.number for v in a.versions]) for a in blobs.recorded()] == [
        ("a", [1, 2, 3]),
        ("b", [1]),
    ]
    blobs.remove_record(A, "t", "a", 1)
    blobs.remove_record(A, "u", "b", 1)  # another tenant's of the same name
    blobs.remove_record(A, "t", "a", 2)  # not this blob's
    blobs.remove_record("c" * 64, "t", "a", 1)
    assert [(a.name, [v.number for v in a.versions]) for a in blobs.recorded()] == [
        ("a", [2, 3]),
        ("b", [1]),
    ]
    assert set(os.listdir(blobs.open(A))) == {CONFIG_FILE, WEIGHTS_FILE, RECORD_FILE}
    with pytest.raises(NotFound):
        blobs.write_record("c" * 64, "t", "a", _version(1).to_json())


def _version(number: int) -> Version:
    return Version(number, manifest(number).digest, 1_700_000_000 + number, manifest(number), "r")


def _fill(staging: Staging, weights: bytes = b"weights") -> None:
    (staging.path / CONFIG_FILE).write_bytes(b"config")
    (staging.path / WEIGHTS_FILE).write_bytes(weights)


def _put(blobs: BlobStore, digest: str) -> Path:
    with blobs.stage() as staging:
        _fill(staging)
        return blobs.commit(staging, digest)


def _age(path: Path) -> None:
    os.utime(path, (1_600_000_000, 1_600_000_000))


def _content(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def _tree(path: Path) -> set[Path]:
    return set(path.rglob("*"))
