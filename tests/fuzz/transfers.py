"""Targets that take what comes in one piece: archives and forms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from api.archives import unpack
from api.errors import ApiError
from api.members import Members
from api.multipart import PartBegin, PartData, PartEnd, read_parts

#: Bytes that an archive may unpack to here.
ARCHIVE_LIMIT = 80 << 20


def take_archive(value: tuple[str, bytes], folder: Path) -> str:
    """(name, bytes) of an archive."""
    name, data = value
    (folder / "archive").write_bytes(data)
    inner = folder / "inner"
    inner.mkdir()
    members = Members()
    unpack(folder / "archive", name, inner, ARCHIVE_LIMIT, members)
    members.finish()
    assert {path.name for path in folder.iterdir()} == {"archive", "inner"}
    files = list(inner.iterdir())
    assert {path.name for path in files} <= members.wanted
    assert all(path.is_file() and not path.is_symlink() for path in files)
    assert sum(path.stat().st_size for path in files) <= ARCHIVE_LIMIT + (1 << 20)
    for text in (*members.warnings, *(v.subject for v in members.violations)):
        assert text.isprintable() and len(text) < 2000, text
    return members.violations[0].code if members.violations else "taken"


def take_form(value: tuple[str, list[bytes]], folder: Path) -> str:
    """(content type, chunks) of a multipart form."""
    content_type, chunks = value

    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def read() -> str:
        is_open, nbytes = False, 0
        async for event in read_parts(content_type, body()):
            match event:
                case PartBegin(name, filename):
                    assert not is_open
                    (name + (filename or "")).encode()
                    is_open = True
                case PartData(data):
                    assert is_open
                    nbytes += len(data)
                case PartEnd():
                    assert is_open
                    is_open = False
        assert not is_open and nbytes < sum(map(len, chunks))
        return "taken"

    try:
        return asyncio.run(read())
    except ApiError as error:
        return error.code or type(error).__name__
