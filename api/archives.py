"""The files of an adapter out of a .zip or .tar.gz, without trusting a byte of it.

Members are picked by name and copied to files of our own naming; nothing is extracted to a path
from the archive. Every size is counted while it is read, so that a bomb stops at the limit.
"""

from __future__ import annotations

import gzip
import stat
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from adapters.tokenizer_files import TOKENIZER_FILES
from api.members import MAX_MEMBERS, Members

#: Endings of the archives that are read.
ARCHIVE_SUFFIXES = (".zip", ".tar.gz", ".tgz")

#: The largest single read that an archive's own headers may ask for, and our copying step.
_MAX_READ = 1 << 20
#: A member that unpacks to more than `_FREE` bytes may not be packed tighter than this.
_MAX_RATIO = 200
_FREE = 64 << 20


class _Refused(Exception):
    """The archive cannot be read any further; the text is for the client."""


def unpack(archive: Path, name: str, folder: Path, limit: int, members: Members) -> None:
    """Copy the adapter files in `archive` into `folder`; what is wrong goes to `members`.

    `name` is the client's name of the archive and tells its kind. `limit` bounds the bytes that
    are unpacked in all, those of ignored members too. Blocks: call it in a thread.
    """
    try:
        if name.lower().endswith(".zip"):
            _unpack_zip(archive, folder, limit, members)
        else:
            _unpack_tar(archive, folder, limit, members)
    except _Refused as error:
        members.refuse("archive_refused", name, str(error))
    except (
        zipfile.BadZipFile,
        tarfile.TarError,
        gzip.BadGzipFile,
        zlib.error,
        struct.error,
        EOFError,
        NotImplementedError,
        RecursionError,
        LookupError,
        OverflowError,
        ValueError,
    ):
        members.refuse("archive_unreadable", name, "is damaged or not an archive of this kind")
    for misplaced in members.misplaced:
        (folder / misplaced).unlink(missing_ok=True)


def _unpack_zip(archive: Path, folder: Path, limit: int, members: Members) -> None:
    with archive.open("rb") as raw, zipfile.ZipFile(_Guarded(raw)) as opened:
        entries = opened.infolist()
        if len(entries) > MAX_MEMBERS:
            raise _Refused(f"holds {len(entries)} members; at most {MAX_MEMBERS} are taken")
        left = limit
        # The adapter's files first: they tell from which folder tokenizer files are taken.
        for entry in sorted(entries, key=lambda entry: _base(entry) in TOKENIZER_FILES):
            if entry.orig_filename.endswith("/"):
                continue
            # zipfile cuts `filename` at a NUL; the original shows what was really meant.
            wanted = members.select(entry.orig_filename)
            problem = _zip_problem(entry, left)
            if problem is not None:
                members.refuse("archive_member", entry.orig_filename, problem)
            elif wanted is not None:
                with opened.open(entry) as source:
                    left -= _copy(source, folder / wanted, left)


def _base(entry: zipfile.ZipInfo) -> str:
    return entry.orig_filename.rpartition("/")[2]


def _zip_problem(entry: zipfile.ZipInfo, left: int) -> str | None:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        return "is a link or a device; only plain files are taken"
    if entry.flag_bits & 0x1:
        return "is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is packed with a method other than stored or deflate"
    if entry.file_size > left:
        return f"unpacks to {entry.file_size} bytes, over the limit"
    if entry.file_size > _FREE and entry.file_size > _MAX_RATIO * max(entry.compress_size, 1):
        return f"is packed tighter than {_MAX_RATIO} to 1"
    return None


def _unpack_tar(archive: Path, folder: Path, limit: int, members: Members) -> None:
    packed = archive.stat().st_size
    # Headers, padding and ignored files count too: all of it has to be unpacked to get past it.
    limit = limit + (_MAX_READ if packed else 0)
    if limit > _FREE:
        limit = min(limit, max(_FREE, _MAX_RATIO * packed))
    with gzip.open(archive, "rb") as raw:
        guarded: Any = _Forward(raw, limit)
        with tarfile.open(fileobj=guarded, mode="r:") as opened:
            for count, entry in enumerate(opened):
                if count >= MAX_MEMBERS:
                    raise _Refused(f"holds more than {MAX_MEMBERS} members")
                if entry.isdir():
                    continue
                wanted = members.select(entry.name)
                if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    problem = "is a link, a device or sparse; only plain files are taken"
                    members.refuse("archive_member", entry.name, problem)
                elif wanted is not None:
                    source = opened.extractfile(entry)
                    assert source is not None
                    _copy(source, folder / wanted, limit)
        guarded.drain()


def _copy(source: IO[bytes], target: Path, limit: int) -> int:
    """Copy all of `source` to the new file `target`; returns the bytes. Refuses above `limit`."""
    copied = 0
    with target.open("xb") as out:
        while chunk := source.read(_MAX_READ):
            copied += len(chunk)
            if copied > limit:
                raise _Refused("unpacks to more than the limit")
            out.write(chunk)
    return copied


class _Guarded:
    """A file whose single reads are bounded: a directory of a million entries is never loaded."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.tell = raw.tell
        self.seekable = raw.seekable

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and offset < 0:
            raise _Refused("has a member before its own beginning")
        return self._raw.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(min(size if size >= 0 else _MAX_READ + 1, _MAX_READ + 1))
        if len(data) > _MAX_READ:
            raise _Refused("has headers larger than 1 MiB")
        return data


class _Forward:
    """A gzip stream that tarfile may only walk forward, up to `limit` bytes.

    tarfile steps back one byte to see whether the end of a member is there; that byte is kept,
    since gzip itself would start over.
    """

    def __init__(self, raw: gzip.GzipFile, limit: int) -> None:
        self._raw = raw
        self._limit = limit
        self._read = 0
        self._last = b""
        self._wanted = 0

    def tell(self) -> int:
        return self._wanted

    def seek(self, offset: int) -> int:
        self._wanted = offset
        return offset

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_READ:
            raise _Refused("has headers larger than 1 MiB")
        if size == 1 and self._wanted == self._read - 1:
            self._wanted += 1
            return self._last
        if self._wanted < self._read:
            raise _Refused("has members that overlap")
        while self._read < self._wanted:
            if not self._take(min(_MAX_READ, self._wanted - self._read)):
                return b""
        data = self._take(size)
        self._wanted = self._read
        return data

    def drain(self) -> None:
        """Read to the end, so that gzip checks its sum: a cut file often ends between members."""
        while self._take(_MAX_READ):
            pass

    def _take(self, size: int) -> bytes:
        data = self._raw.read(size)
        self._read += len(data)
        if self._read > self._limit:
            raise _Refused("unpacks to more than the limit")
        self._last = data[-1:] or self._last
        return data
