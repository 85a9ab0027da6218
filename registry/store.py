"""The record store: mutations in Redis, each one atomic, idempotent and durable."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
import uuid
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from adapters.manifest import AdapterManifest
from registry import keys, scripts
from registry.connection import connect, redis_errors, shown
from registry.errors import Conflict, InvalidName, NotFound, RegistryUnavailable
from registry.records import Adapter, Version
from registry.snapshot import Snapshot

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_WAITAOF_MS = 1500  # below the socket timeout
_KEYS = (keys.EPOCH, keys.REVISION, keys.ADAPTERS, keys.VERSIONS, keys.NUMBERS, keys.CHANGES)


class RegistryStore:
    """Adapters and versions in Redis. `snapshot` answers all reads, own writes included."""

    def __init__(self, redis: Redis, *, durable: bool = True) -> None:
        self._redis = redis
        self._durable = durable
        self.snapshot = Snapshot(redis)

    @classmethod
    async def open(cls, url: str, *, durable: bool = True, wait_s: float = 10.0) -> RegistryStore:
        """Connect, load the snapshot and follow it.

        `durable`: a mutation returns only when it is on disk; where the server has no WAITAOF or
        keeps no append-only file, this ends with one warning.
        Raises RegistryUnavailable if Redis does not answer within `wait_s` seconds, ValueError
        for a URL with another scheme than redis, rediss or unix.
        """
        store = cls(connect(url), durable=durable)
        until = time.monotonic() + wait_s
        while True:
            try:
                await store.snapshot.start()
                return store
            except (RedisError, OSError) as error:
                if time.monotonic() >= until:
                    await store.close()
                    raise RegistryUnavailable(
                        f"Redis at {shown(url)} did not answer within {wait_s:g} s: {error}"
                    ) from error
                await asyncio.sleep(0.1)
            except BaseException:
                await store.close()
                raise

    async def close(self) -> None:
        await self.snapshot.close()
        await self._redis.aclose()

    async def add_version(
        self, tenant: str, name: str, manifest: AdapterManifest, *, request_id: str
    ) -> Version:
        """Make `manifest` the latest version of the adapter, which is created if it is new.

        The same request id returns the same version again. Content equal to the latest version's,
        for the same base, returns that version (its `request_id` tells). Numbers are never reused,
        not even after a deletion. Visible in `snapshot` on return.
        Raises Conflict if the request id was used for something else, RegistryUnavailable (the
        outcome is unknown; repeat with the same request id), StorageFull.
        """
        created = int(time.time())
        packed = Version(0, manifest.digest, created, manifest, request_id).pack()
        reply = await self._mutate(
            scripts.ADD_VERSION,
            tenant,
            name,
            request_id,
            f"add {name} {_content(manifest)}",
            (_content(manifest), created, packed),
        )
        return Version.unpack(int(reply[3]), reply[4])

    async def delete_adapter(self, tenant: str, name: str, *, request_id: str) -> list[Version]:
        """Delete the adapter with all its versions, and return these.

        The same request id succeeds again and returns none. Raises NotFound if there is no such
        adapter, and as `add_version` does.
        """
        reply = await self._mutate(
            scripts.DELETE_ADAPTER, tenant, name, request_id, f"delete {name}", ()
        )
        numbers_and_versions = iter(reply[3])
        return [
            Version.unpack(int(number), packed)
            for number, packed in zip(numbers_and_versions, numbers_and_versions, strict=True)
        ]

    async def restore(self, adapters: list[Adapter]) -> bool:
        """Fill an empty registry in one go, keeping numbers; False if it is not empty.

        Raises RegistryUnavailable, StorageFull.
        """
        arguments: list[Any] = []
        for adapter in adapters:
            field = keys.adapter_field(adapter.tenant, adapter.name)
            for v in adapter.versions:
                arguments += [field, v.number, _content(v.manifest), v.created, v.pack()]
        reply = await self._run(scripts.RESTORE, _KEYS, [uuid.uuid4().hex, *arguments])
        restored = bool(reply[0] == b"ok")
        with redis_errors():
            await self.snapshot.reload(restored=restored)
        return restored

    async def _mutate(
        self,
        script: str,
        tenant: str,
        name: str,
        request_id: str,
        fingerprint: str,
        arguments: tuple[Any, ...],
    ) -> list[Any]:
        if not _REQUEST_ID.fullmatch(request_id):
            raise InvalidName(
                f"The request id {request_id[:200]!r} is not allowed: 1 to 128 of letters, digits, "
                "'.', '_', ':' and '-'."
            )
        field = keys.adapter_field(tenant, name)
        request = keys.request_key(tenant, request_id)
        common = [uuid.uuid4().hex, fingerprint, keys.REQUEST_TTL, keys.CHANGES_KEPT, field]
        reply = await self._run(script, (*_KEYS, request), [*common, *arguments])
        if reply[0] == b"conflict":
            raise Conflict(f"The request id {request_id!r} was used for another request.")
        if reply[0] == b"missing":
            raise NotFound(f"The adapter {name!r} does not exist.")
        with redis_errors():
            await self.snapshot.catch_up(reply[1].decode(), int(reply[2]))
        return reply

    async def _run(self, script: str, names: tuple[str, ...], arguments: list[Any]) -> list[Any]:
        """Run a mutation and wait until it is on disk."""
        # One pipeline, since WAITAOF looks at the writes of its own connection only.
        pipe = self._redis.pipeline(transaction=False)
        pipe.eval(script, len(names), *names, *arguments)
        if self._durable:
            pipe.execute_command("WAITAOF", 1, 0, _WAITAOF_MS)
        with redis_errors():
            reply, *synced = await pipe.execute(raise_on_error=False)
            if isinstance(reply, Exception):
                raise reply
            if synced and isinstance(synced[0], ResponseError):
                log.warning("mutations are not confirmed to be on disk: %s", synced[0])
                self._durable = False
            elif synced and isinstance(synced[0], Exception):
                raise synced[0]
            elif synced and synced[0][0] < 1:
                raise RegistryUnavailable(
                    f"Redis did not bring the change to disk within {_WAITAOF_MS} ms."
                )
        result: list[Any] = reply
        return result


def _content(manifest: AdapterManifest) -> str:
    """What makes two uploads the same version: equal files, for the same base, spoken to alike."""
    content = manifest.digest + manifest.base_digest
    if manifest.speaks:
        content += hashlib.sha256(repr(manifest.speech).encode()).hexdigest()
    return content
