"""The registry in memory: all reads of the request path, fed from Redis by the change stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from registry import keys, scripts
from registry.errors import NotFound, RegistryUnavailable
from registry.records import Adapter, Version

log = logging.getLogger(__name__)

#: Seconds between two looks at epoch, revision and run id.
POLL_S = 5.0
#: Seconds without word from Redis after which the snapshot counts as stale.
STALE_S = 2 * POLL_S

_BLOCK_MS = 1000  # below the socket timeout
_CHUNK = 64  # versions fetched and decoded in one go
_RETRY_S = (0.05, 1.0)  # first and longest pause after a failure

_Entry = tuple[bytes, Mapping[bytes, bytes]]


class Snapshot:
    """All adapters of all tenants as of `revision`. Reads never wait and never touch Redis.

    Followed by a task between `start` and `close`. Loaded anew when the stream has a gap, the
    revision went back, the registry's epoch or the server's run id changed.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._tenants: dict[str, dict[str, Adapter]] = {}
        self._revision = 0
        self._epoch = ""
        self._run_id = ""
        self._heard = float("-inf")
        self._emptied = False
        self._damaged = False
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def revision(self) -> int:
        """The number of the last mutation seen; 0 if the registry was never written."""
        return self._revision

    @property
    def age(self) -> float:
        """Seconds since Redis last confirmed this snapshot; infinite before the first load."""
        return time.monotonic() - self._heard

    @property
    def stale(self) -> bool:
        return self.age > STALE_S

    def get(self, tenant: str, name: str) -> Adapter:
        """Raises NotFound, with the same message if only another tenant has `name`."""
        adapter = self.find(tenant, name)
        if adapter is None:
            raise NotFound(f"The adapter {name!r} does not exist.")
        return adapter

    def find(self, tenant: str, name: str) -> Adapter | None:
        """As `get`, with None for an unknown adapter."""
        return self._tenants.get(tenant, {}).get(name)

    def list(self, tenant: str) -> list[Adapter]:
        """The tenant's adapters by name."""
        return sorted(self._tenants.get(tenant, {}).values(), key=lambda adapter: adapter.name)

    def digests(self) -> set[str]:
        """The digests of all versions of all tenants: what a sweep of the blobs must spare.

        Raises RegistryUnavailable when this is not known for sure: the snapshot is stale, a record
        cannot be read, or the registry was emptied while this process ran (the blobs can still
        restore it).
        """
        if self.stale:
            raise RegistryUnavailable(f"The registry was last heard of {self.age:.0f} s ago.")
        if self._emptied:
            raise RegistryUnavailable("The registry was emptied; restore it from the blobs first.")
        if self._damaged:
            raise RegistryUnavailable("Some records of the registry cannot be read; see the log.")
        return {
            version.digest
            for adapters in self._tenants.values()
            for adapter in adapters.values()
            for version in adapter.versions
        }

    async def start(self) -> None:
        """Load and follow. Raises RedisError or OSError if Redis does not answer."""
        await self._check()
        self._task = asyncio.create_task(self._follow(), name="registry-snapshot")

    async def close(self) -> None:
        task, self._task = self._task, None
        while task is not None and not task.done():
            # Again if need be: the client sends through wait_for, which on Python 3.11 loses a
            # cancellation that arrives just as it finishes.
            task.cancel()
            await asyncio.wait([task], timeout=0.1)

    async def catch_up(self, epoch: str, revision: int) -> None:
        """Return once `revision` of `epoch` is visible here. Raises RedisError or OSError."""
        async with self._lock:
            if self._epoch == epoch and self._revision >= revision:
                return
            entries: Any = await self._redis.xrange(keys.CHANGES, f"({self._revision}-0", "+")
            if self._epoch != epoch or not self._apply(entries) or self._revision < revision:
                await self._load()

    async def reload(self, *, restored: bool) -> None:
        """Load everything anew; `restored`: what an emptied registry had lost is back.

        Raises RedisError or OSError.
        """
        async with self._lock:
            await self._load()
            if restored:
                self._emptied = False

    async def _follow(self) -> None:
        pause = _RETRY_S[0]
        while True:
            try:
                await self._check()
                pause = _RETRY_S[0]
                until = time.monotonic() + POLL_S
                while time.monotonic() < until:
                    await self._read()
            except (RedisError, OSError) as error:
                if pause == _RETRY_S[0]:
                    log.warning(
                        "registry unreachable, serving revision %d: %s", self._revision, error
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_S[1])
            except Exception:
                log.exception("registry snapshot cannot follow; trying again")
                await asyncio.sleep(_RETRY_S[1])

    async def _check(self) -> None:
        async with self._lock:
            run_id = (await self._redis.info("server"))["run_id"]
            epoch, revision, _ = await self._state(heads=False)
            known = (self._run_id, self._epoch) == (run_id, epoch) and self._revision <= revision
            if not known:
                await self._load()
                self._run_id = run_id
            self._heard = time.monotonic()

    async def _read(self) -> None:
        after = f"{self._revision}-0"
        streams: Any = await self._redis.xread({keys.CHANGES: after}, block=_BLOCK_MS)
        async with self._lock:
            for _, entries in streams:
                if not self._apply(entries):
                    await self._load()
            self._heard = time.monotonic()

    def _apply(self, entries: Iterable[_Entry]) -> bool:
        """Apply entries in order, passing over those already seen.

        False on a gap, and if the registry began anew.
        """
        for entry_id, fields in entries:
            revision = int(entry_id.partition(b"-")[0])
            if revision <= self._revision:
                continue
            follows = revision == self._revision + 1 and fields[b"epoch"].decode() == self._epoch
            if not follows or fields[b"op"] not in (b"add", b"delete"):
                return False
            tenant, name = keys.split_field(fields[b"adapter"].decode())
            adapters = self._tenants.setdefault(tenant, {})
            if fields[b"op"] == b"add":
                version = self._unpack(tenant, name, int(fields[b"number"]), fields[b"version"])
                if version is not None:
                    adapters[name] = _extended(adapters.get(name), tenant, name, version)
            else:
                adapters.pop(name, None)
            self._revision = revision
        return True

    async def _load(self) -> None:
        """Replace everything. The versions are fetched after the list of adapters, in chunks: what
        changes in between is in the stream after the revision of that list."""
        epoch, revision, heads = await self._state(heads=True)
        wanted: list[tuple[str, int, int]] = []
        for field, head in heads.items():
            born, first, last, _ = head.split()
            wanted += [(field, int(born), number) for number in range(int(first), int(last) + 1)]
        tenants: dict[str, dict[str, Adapter]] = {}
        self._damaged = False
        for start in range(0, len(wanted), _CHUNK):
            chunk = wanted[start : start + _CHUNK]
            packed: Any = await self._redis.hmget(
                keys.VERSIONS, [f"{field}/{number}" for field, _, number in chunk]
            )
            for (field, created, number), value in zip(chunk, packed, strict=True):
                tenant, name = keys.split_field(field)
                if value is None:
                    continue
                version = self._unpack(tenant, name, number, value)
                if version is not None:
                    adapters = tenants.setdefault(tenant, {})
                    adapters[name] = _extended(adapters.get(name), tenant, name, version, created)
            await asyncio.sleep(0)
        if self._tenants and self._epoch and epoch != self._epoch:
            log.error("the registry was emptied: revision %d now, was %d", revision, self._revision)
            self._emptied = True
        self._tenants, self._revision, self._epoch = tenants, revision, epoch

    def _unpack(self, tenant: str, name: str, number: int, packed: bytes) -> Version | None:
        try:
            return Version.unpack(number, packed)
        except ValueError:
            # One damaged record must not take the others down: this version is not found.
            log.exception("adapter %r of tenant %r", name, tenant)
            self._damaged = True
            return None

    async def _state(self, *, heads: bool) -> tuple[str, int, dict[str, str]]:
        reply: Any = await self._redis.eval(
            scripts.STATE, 3, keys.EPOCH, keys.REVISION, keys.ADAPTERS, "1" if heads else "0"
        )
        flat = [item.decode() for item in reply[2]]
        return reply[0].decode(), int(reply[1]), dict(zip(flat[::2], flat[1::2], strict=True))


def _extended(
    adapter: Adapter | None, tenant: str, name: str, version: Version, created: int | None = None
) -> Adapter:
    if adapter is None:
        return Adapter(tenant, name, version.created if created is None else created, (version,))
    return Adapter(tenant, name, adapter.created, (*adapter.versions, version))
