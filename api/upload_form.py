"""The form of an upload, streamed to disk while it comes."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from pathlib import Path
from typing import IO

from starlette.requests import Request

from adapters.manifest import CONFIG_FILE
from api.archives import ARCHIVE_SUFFIXES
from api.body import body_chunks
from api.errors import BadRequest, BodyTooLarge
from api.members import Members, is_archive
from api.multipart import PartBegin, PartData, PartEnd, read_parts
from registry.routing import check_name

#: The name under which an archive is staged.
ARCHIVE_FILE = "upload.archive"

#: Bytes gathered before they are written in a thread.
_BATCH = 1 << 20
#: Longest text field.
_MAX_TEXT = 4096
#: What a form may hold beside its files: boundaries, part headers, text fields.
_FORM_OVERHEAD = 1 << 20

_TEXT_FIELDS = ("name", "allow_noop", "digest")
_FILE_FIELDS = ("file", "files")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UploadForm:
    """Receives the parts of one upload: files go to `folder`, text fields to the attributes.

    `archive` is the client's name of the archive staged as ARCHIVE_FILE, None if there is none.
    `allow_noop` accepts an adapter without effect; `digest` is the content digest that the client
    expects, "" if it gave none.
    """

    def __init__(self, folder: Path, limit: int, base_name: str) -> None:
        self.name = ""
        self.allow_noop = False
        self.digest = ""
        self.archive: str | None = None
        self.members = Members()
        self._folder = folder
        self._limit = limit
        self._base_name = base_name
        self._received = 0
        self._buffer = bytearray()
        self._field = ""
        self._fields: set[str] = set()
        self._text = bytearray()
        self._file: IO[bytes] | None = None

    async def receive(self, request: Request) -> None:
        """Read the whole form.

        Raises BodyTooLarge as soon as the limit is passed, BadRequest for a malformed form,
        Conflict or InvalidName for the adapter's name, ClientDisconnect.
        """
        content_type = request.headers.get("content-type", "")
        chunks = body_chunks(request, self._limit + _FORM_OVERHEAD, "--max-upload")
        try:
            async with aclosing(read_parts(content_type, chunks)) as events:
                async for event in events:
                    match event:
                        case PartBegin():
                            self._begin(event)
                        case PartData():
                            await self._data(event.data)
                        case PartEnd():
                            await self._end()
        finally:
            if self._file is not None:
                self._file.close()
        if not self.name:
            raise BadRequest("name: required, but missing.", "name", "missing_parameter")

    def _begin(self, part: PartBegin) -> None:
        if part.filename is None:
            if part.name in _FILE_FIELDS:
                message = f"{part.name}: has no file; with curl, write {part.name}=@{CONFIG_FILE}"
                raise BadRequest(message, part.name, "missing_file")
            if part.name not in _TEXT_FIELDS:
                known = ", ".join(_TEXT_FIELDS)
                message = f"{part.name[:100]}: unknown field; {known} and files are taken."
                raise BadRequest(message, part.name[:100], "unknown_parameter")
            if part.name in self._fields:
                raise BadRequest(f"{part.name}: comes twice.", part.name)
            self._fields.add(part.name)
            self._field, self._text = part.name, bytearray()
            return
        if part.name not in _FILE_FIELDS:
            message = f"{part.name[:100]}: files come in fields called file or files."
            raise BadRequest(message, part.name[:100], "unknown_parameter")
        target = self._target(part.filename)
        if target is not None:
            self._file = (self._folder / target).open("xb")

    def _target(self, filename: str) -> str | None:
        """The name under which a file is staged, None if it is not kept."""
        packed = filename.lower().endswith(ARCHIVE_SUFFIXES)
        if packed and self.archive is None and not self.members.wanted:
            self.archive = filename
            return ARCHIVE_FILE
        if packed or (self.archive is not None and not is_archive(filename)):
            message = "comes beside an archive; send one archive or the adapter's files"
            self.members.refuse("archive_and_files", filename, message)
            return None
        if is_archive(filename):
            message = f"is an archive of a kind that is not read; {_SUFFIXES} are"
            self.members.refuse("archive_kind", filename, message)
            return None
        return self.members.select(filename)

    async def _data(self, data: bytes) -> None:
        if self._field:
            self._text += data
            if len(self._text) > _MAX_TEXT:
                raise BadRequest(f"{self._field}: longer than {_MAX_TEXT} bytes.", self._field)
            return
        self._received += len(data)
        if self._received > self._limit:
            raise BodyTooLarge(
                f"The files are larger than {self._limit} bytes, the most that is taken (set by "
                "--max-upload)."
            )
        if self._file is not None:
            self._buffer += data
            if len(self._buffer) >= _BATCH:
                await self._flush()

    async def _end(self) -> None:
        if self._field:
            self._take_text()
            self._field = ""
        elif self._file is not None:
            await self._flush()
            self._file.close()
            self._file = None

    async def _flush(self) -> None:
        assert self._file is not None
        batch, self._buffer = self._buffer, bytearray()
        await asyncio.to_thread(self._file.write, batch)

    def _take_text(self) -> None:
        field = self._field
        try:
            text = self._text.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"{field}: is not UTF-8.", field) from None
        if not text:
            raise BadRequest(f"{field}: must not be empty.", field)
        if field == "name":
            check_name(text, self._base_name)
            self.name = text
        elif field == "digest":
            self.digest = text.lower().removeprefix("sha256:")
            if not _DIGEST.fullmatch(self.digest):
                raise BadRequest("digest: is not 64 hexadecimal digits.", field)
        else:
            self.allow_noop = flag(field, text)


def flag(field: str, text: str) -> bool:
    """The truth of a text field or query parameter. Raises BadRequest."""
    if text not in ("true", "false", "1", "0"):
        raise BadRequest(f"{field}: {text[:50]!r} is not true or false.", field)
    return text in ("true", "1")


_SUFFIXES = ", ".join(ARCHIVE_SUFFIXES)
