"""One connection pool to Redis with explicit bounds, and its failures in the registry's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError

from registry.errors import RegistryUnavailable, StorageFull

#: Seconds to wait for a connection or for one reply. Blocking commands stay below it.
SOCKET_TIMEOUT = 2.0


def connect(url: str) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://`; nothing is sent yet.

    It never repeats a command by itself: a lost reply would run a mutation twice unseen.
    Raises ValueError for another scheme.
    """
    client: Redis = Redis.from_url(
        url,
        socket_timeout=SOCKET_TIMEOUT,
        socket_connect_timeout=SOCKET_TIMEOUT,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return client


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turn failures of Redis within the block into RegistryUnavailable or StorageFull."""
    try:
        yield
    except (RedisError, OSError) as error:
        if isinstance(error, OutOfMemoryError) or "No space left" in str(error):
            raise StorageFull(f"Redis has no room left: {error}") from error
        raise RegistryUnavailable(f"Redis does not answer as it should: {error}") from error


def shown(url: str) -> str:
    """`url` without user, password and query, for messages."""
    parts = urlsplit(url)
    host = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
    return f"{parts.scheme}://{host}{parts.path}"
