"""From a staged upload to a published version: blob, record, note."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from adapters.manifest import AdapterManifest
from adapters.peft_files import content_digest
from api.services import Services
from registry.blobs import BlobStore, Staging
from registry.records import Version


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
