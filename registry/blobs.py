"""Content-addressed folders on the local disk. All calls block: run them in threads.

    root/blobs/<first 2 of digest>/<digest>/   the two adapter files and record.json
    root/staging/<random>/                     uploads in progress, and what is being removed
    root/lock                                  held around renames, between processes too

A blob is complete from the moment it is visible: files, then folder are fsynced before the rename.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from registry.errors import InvalidName, NotFound, StorageFull
from registry.records import Adapter, Version

log = logging.getLogger(__name__)

RECORD_FILE = "record.json"

_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Staging:
    """A private folder (0700) on the blobs' disk; removes itself on exit unless committed.

    As a context manager it turns a full disk within the block into StorageFull.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Held while the owner lives: how a sweep tells an upload in progress from a leftover.
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.discard()
        if isinstance(error, OSError):
            _raise_if_full(error)

    def discard(self) -> None:
        """Remove the folder, if it is still there. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class BlobStore:
    """The blobs under `root`, which is created. Processes may share a root."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._blobs = self._root / "blobs"
        self._staging = self._root / "staging"
        with _storage_errors():
            for folder in (self._blobs, self._staging):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def stage(self) -> Staging:
        """A fresh folder to write the adapter files into. Raises StorageFull."""
        with _storage_errors(), self._locked():
            return Staging(Path(tempfile.mkdtemp(dir=self._staging)))

    def commit(
        self, staging: Staging, digest: str, verify: Callable[[Path], bool] | None = None
    ) -> Path:
        """Make the staged files the blob `digest`, on disk when this returns.

        The staged folder holds exactly the two adapter files, whose digest the caller has
        checked. A blob that is there already is kept if `verify(its folder)` holds (default: its
        files equal the staged ones byte for byte), else its files are replaced one by one, each
        atomically. The staging is used up either way.
        Raises InvalidName (digest), ValueError (other files staged), StorageFull.
        """
        target = self._path(digest)
        staged = sorted(os.listdir(staging.path))
        if staged != sorted(_FILES) or any((staging.path / name).is_symlink() for name in staged):
            raise ValueError(f"a blob consists of {' and '.join(_FILES)}, not of {staged}")
        with _storage_errors():
            for name in _FILES:
                _fsync(staging.path / name)
            _fsync(staging.path)
            fits = not target.is_dir() or _holds(verify, target, staging.path)
            with self._locked():
                if not target.is_dir():
                    target.parent.mkdir(mode=0o700, exist_ok=True)
                    _fsync(self._blobs)
                    os.rename(staging.path, target)
                elif not fits:
                    for name in _FILES:
                        os.replace(staging.path / name, target / name)
                    _fsync(target)
                os.utime(target)  # young again: a sweep under way spares it
                _fsync(target.parent)
        staging.discard()
        return target

    def open(self, digest: str) -> Path:
        """The folder of a blob. Raises NotFound, InvalidName (not 64 lowercase hex digits)."""
        path = self._path(digest)
        if not path.is_dir():
            raise NotFound(f"The blob {digest} does not exist.")
        return path

    def write_record(self, digest: str, tenant: str, name: str, version: dict[str, Any]) -> None:
        """Note beside the blob which version it is (`Version.to_json`), on disk on return.

        Written again for the same version, it replaces the note. Raises NotFound, InvalidName,
        StorageFull.
        """
        new = {"tenant": tenant, "name": name, "version": version}
        with _storage_errors(), self._locked():
            path = self.open(digest)
            others = [r for r in _records(path) if _identity(r) != _identity(new)]
            _write_records(path, [*others, new])

    def remove_record(self, digest: str, tenant: str, name: str, number: int) -> None:
        """Forget a deleted version, so that a rebuild does not bring it back. Missing is fine."""
        with _storage_errors(), self._locked():
            path = self._path(digest)
            records = _records(path)
            gone = (tenant, name, number)
            kept = [r for r in records if (r["tenant"], r["name"], r["version"]["number"]) != gone]
            if kept != records:
                _write_records(path, kept)

    def recorded(self) -> list[Adapter]:
        """All adapters according to the records; blobs without both adapter files are left out."""
        found: dict[tuple[str, str], dict[int, Version]] = {}
        for path in self._all():
            if all((path / name).is_file() for name in _FILES):
                try:
                    for record in _records(path):
                        version = Version.from_json(record["version"])
                        versions = found.setdefault((record["tenant"], record["name"]), {})
                        versions[version.number] = version
                except (ValueError, KeyError, TypeError):
                    log.exception("the record of blob %s is damaged and left out", path.name)
        return [
            Adapter(tenant, name, versions[min(versions)].created, _in_order(versions))
            for (tenant, name), versions in sorted(found.items())
        ]

    def sweep(self, referenced: set[str], in_use: set[str], min_age_s: float) -> set[str]:
        """Remove leftover stagings, and blobs neither referenced nor in use; returns the latter.

        `min_age_s` spares blobs committed less than so many seconds ago: a blob precedes its
        record. `referenced` must be complete (`Snapshot.digests`).
        """
        with self._locked():
            leftovers = [path for path in self._staging.iterdir() if _abandoned(path)]
        for path in leftovers:
            shutil.rmtree(path, ignore_errors=True)
        removed = set()
        for path in self._all():
            if path.name in referenced or path.name in in_use:
                continue
            with self._locked():
                if time.time() - path.stat().st_mtime < min_age_s:
                    continue
                trash = Path(tempfile.mkdtemp(dir=self._staging))
                os.rename(path, trash / path.name)
            shutil.rmtree(trash, ignore_errors=True)
            removed.add(path.name)
        return removed

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise InvalidName(f"{digest[:200]!r} is not a digest: 64 of 0-9 and a-f.")
        return self._blobs / digest[:2] / digest

    def _all(self) -> list[Path]:
        return [path for path in sorted(self._blobs.glob("??/*")) if _DIGEST.fullmatch(path.name)]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # flock belongs to the open file, so it also excludes this process's other threads.
        lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _holds(verify: Callable[[Path], bool] | None, blob: Path, staged: Path) -> bool:
    if not all((blob / name).is_file() for name in _FILES):
        return False
    if verify is not None:
        return verify(blob)
    return all(filecmp.cmp(blob / name, staged / name, shallow=False) for name in _FILES)


def _records(blob: Path) -> list[dict[str, Any]]:
    try:
        records: list[dict[str, Any]] = json.loads((blob / RECORD_FILE).read_bytes())["records"]
    except FileNotFoundError:
        return []
    return records


def _write_records(blob: Path, records: list[dict[str, Any]]) -> None:
    before = os.stat(blob)
    temporary = blob / (RECORD_FILE + ".new")
    temporary.write_text(json.dumps({"records": records}, separators=(",", ":")))
    _fsync(temporary)
    os.replace(temporary, blob / RECORD_FILE)
    # A blob's age counts from its commit, not from its last note.
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    _fsync(blob)


def _identity(record: dict[str, Any]) -> tuple[str, str, int]:
    return record["tenant"], record["name"], record["version"]["number"]


def _in_order(versions: dict[int, Version]) -> tuple[Version, ...]:
    return tuple(versions[number] for number in sorted(versions))


def _abandoned(path: Path) -> bool:
    try:
        folder = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    return True


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _raise_if_full(error)
        raise


def _raise_if_full(error: OSError) -> None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise StorageFull(f"No room left to store the adapter: {error.strerror}.") from error
