"""The registry from the blobs: the way back when Redis has lost everything."""

from __future__ import annotations

import asyncio
import logging

from registry.blobs import BlobStore
from registry.store import RegistryStore

log = logging.getLogger(__name__)


async def rebuild(store: RegistryStore, blobs: BlobStore) -> int:
    """Re-add all versions recorded beside the blobs, under their numbers, in one atomic step.

    Only into a registry that was never written; returns the number of versions added, 0 if there
    was nothing to do. Raises RegistryUnavailable, StorageFull.
    """
    if store.snapshot.revision > 0:
        return 0
    adapters = await asyncio.to_thread(blobs.recorded)
    if not adapters or not await store.restore(adapters):
        return 0
    count = sum(len(adapter.versions) for adapter in adapters)
    log.warning("registry rebuilt from blobs: %d adapters, %d versions", len(adapters), count)
    return count
