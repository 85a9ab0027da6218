"""POST /v1/adapters: a form streamed to disk, checked, and published as a new version."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import IO

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.errors import AdapterRejected
from adapters.manifest import CONFIG_FILE, AdapterManifest
from adapters.peft_files import content_digest
from adapters.validation import Limits, validate
from api.archives import ARCHIVE_SUFFIXES, unpack
from api.body import body_chunks
from api.errors import BadRequest, BodyTooLarge
from api.members import Members, is_archive
from api.multipart import PartBegin, PartData, PartEnd, read_parts
from api.records import version_record
from api.services import Services, services_of, tenant_of
from registry.blobs import BlobStore, Staging
from registry.records import Version
from registry.routing import check_name

#: Bytes gathered before they are written in a thread.
_BATCH = 1 << 20
#: Longest text field.
_MAX_TEXT = 4096
#: What a form may hold beside its files: boundaries, part headers, text fields.
_FORM_OVERHEAD = 1 << 20

_ARCHIVE_FILE = "upload.archive"
_FILE_FIELDS = ("file", "files")


async def create_adapter(request: Request) -> Response:
    """POST /v1/adapters"""
    services = services_of(request)
    request_id = request.headers.get("idempotency-key") or uuid.uuid4().hex
    async with staged(services.blobs) as staging:
        form = _Form(staging.path, services.settings.max_upload, services.engine.base.name)
        await form.receive(request)
        manifest = await asyncio.to_thread(
            inspect, services, staging.path, form.archive, form.members
        )
        version = await publish(
            services, staging, tenant_of(request), form.name, manifest, request_id
        )
    services.metrics.uploads.inc()
    # Content equal to the latest version's makes no new one.
    status = 201 if version.request_id == request_id else 200
    record = version_record(form.name, version)
    return Response(msgspec.json.encode(record), status, media_type="application/json")


@asynccontextmanager
async def staged(blobs: BlobStore) -> AsyncIterator[Staging]:
    """A staging folder that is gone afterwards unless committed, whatever happens within."""
    staging = await asyncio.to_thread(blobs.stage)
    try:
        yield staging
    except BaseException as error:
        leave = asyncio.to_thread(staging.__exit__, type(error), error, error.__traceback__)
        await asyncio.shield(leave)
        raise
    await asyncio.to_thread(staging.discard)


def inspect(
    services: Services, folder: Path, archive: str | None, members: Members
) -> AdapterManifest:
    """Unpack what is packed and check everything. Blocks: call it in a thread.

    `archive` is the client's name of the archive staged as `upload.archive`, None if there is
    none. Afterwards `folder` holds the two adapter files alone. Raises AdapterRejected with all
    violations.
    """
    if archive is not None:
        packed = folder / _ARCHIVE_FILE
        unpack(packed, archive, folder, services.settings.max_upload, members)
        packed.unlink()
    members.finish()
    violations = list(members.violations)
    if not any(violation.code.startswith("archive_") for violation in violations):
        try:
            manifest = validate(folder, services.engine.base, _limits(services), members.warnings)
        except AdapterRejected as error:
            violations += [members.explained(violation) for violation in error.violations]
    if violations:
        raise AdapterRejected(violations)
    return manifest


async def publish(
    services: Services,
    staging: Staging,
    tenant: str,
    name: str,
    manifest: AdapterManifest,
    request_id: str,
) -> Version:
    """Blob first, then the record, then the note beside the blob; all on disk when it returns."""
    digest = manifest.digest

    def same(folder: Path) -> bool:
        try:
            return content_digest(folder) == digest
        except OSError:  # unreadable: replaced, as damaged files are
            return False

    await asyncio.to_thread(services.blobs.commit, staging, digest, same)
    # If a damaged blob was just replaced, its failed load must not be remembered.
    services.engine.forget(digest)
    version = await services.store.add_version(tenant, name, manifest, request_id=request_id)
    await asyncio.to_thread(services.blobs.write_record, digest, tenant, name, version.to_json())
    # Deleted in the meantime: then the deletion may have come too early to remove the note.
    adapter = services.store.snapshot.find(tenant, name)
    if adapter is None or all(v.number != version.number for v in adapter.versions):
        await asyncio.to_thread(services.blobs.remove_record, digest, tenant, name, version.number)
    return version


def _limits(services: Services) -> Limits:
    settings = services.settings
    return Limits(
        max_rank=settings.max_rank,
        max_pages_bytes=settings.adapter_memory,
        element_bytes=4 if settings.dtype == "float32" else 2,
        dtype=settings.dtype,
    )


class _Form:
    """Receives the parts of one upload: files to `folder`, the name to `name`."""

    def __init__(self, folder: Path, limit: int, base_name: str) -> None:
        self.name = ""
        self.archive: str | None = None
        self.members = Members()
        self._folder = folder
        self._limit = limit
        self._base_name = base_name
        self._received = 0
        self._buffer = bytearray()
        self._text: bytearray | None = None
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
            if part.name != "name":
                message = f"{part.name[:100]}: unknown field; name and files are taken."
                raise BadRequest(message, part.name[:100], "unknown_parameter")
            if self.name:
                raise BadRequest("name: comes twice.", "name")
            self._text = bytearray()
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
            return _ARCHIVE_FILE
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
        if self._text is not None:
            self._text += data
            if len(self._text) > _MAX_TEXT:
                raise BadRequest(f"name: longer than {_MAX_TEXT} bytes.", "name")
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
        if self._text is not None:
            self._take_name(self._text)
            self._text = None
        elif self._file is not None:
            await self._flush()
            self._file.close()
            self._file = None

    async def _flush(self) -> None:
        assert self._file is not None
        batch, self._buffer = self._buffer, bytearray()
        await asyncio.to_thread(self._file.write, batch)

    def _take_name(self, text: bytearray) -> None:
        try:
            name = text.decode()
        except UnicodeDecodeError:
            raise BadRequest("name: is not UTF-8.", "name") from None
        if not name:
            raise BadRequest("name: must not be empty.", "name")
        check_name(name, self._base_name)
        self.name = name


_SUFFIXES = ", ".join(ARCHIVE_SUFFIXES)
