"""A real server and a proxy before it, for the tests of the registry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from adapters.manifest import AdapterManifest, ModuleLora
from registry.embedded import EmbeddedServer
from registry.store import RegistryStore


def manifest(seed: int, modules: int = 2) -> AdapterManifest:
    """A manifest whose digest is made from `seed`."""
    return AdapterManifest(
        digest=f"{seed:064x}",
        modules=tuple(
            ModuleLora(f"layers.{i}.q_proj", 8, 0.1 + 0.2, f"l{i}.lora_A.weight", f"l{i}.lora_B")
            for i in range(modules)
        ),
        parameters=1000,
        weights_bytes=4000,
        dtypes=("float32",),
        max_rank=8,
        base_model=None,
        warnings=(),
    )


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


@asynccontextmanager
async def server(data: Path) -> AsyncIterator[tuple[EmbeddedServer, str]]:
    embedded = EmbeddedServer(data)
    url = await embedded.start()
    try:
        yield embedded, url
    finally:
        await embedded.stop()


@asynccontextmanager
async def store(url: str, **options: Any) -> AsyncIterator[RegistryStore]:
    opened = await RegistryStore.open(url, **options)
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def running(data: Path) -> AsyncIterator[RegistryStore]:
    """A store on a server of its own."""
    async with server(data) as (_, url), store(url) as opened:
        yield opened


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return once `condition` holds; TimeoutError if it does not within `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Proxy:
    """Between clients and a server's socket; `drop_replies` loses that many replies to mutations,
    closing the connection instead, after the server has carried out the command."""

    def __init__(self, target: str, path: Path) -> None:
        self.drop_replies = 0
        self.dropped = 0
        self.url = f"unix://{path}"
        self._target = target.removeprefix("unix://")
        self._path = path
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*self._tasks)  # they end with their clients

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        up_reader, up_writer = await asyncio.open_unix_connection(self._target)
        mutating = False

        async def upward() -> None:
            nonlocal mutating
            while data := await reader.read(1 << 16):
                mutating = b"WAITAOF" in data
                up_writer.write(data)

        async def downward() -> None:
            while data := await up_reader.read(1 << 16):
                if mutating and self.drop_replies > 0:
                    self.drop_replies -= 1
                    self.dropped += 1
                    return
                writer.write(data)

        both = [asyncio.create_task(upward()), asyncio.create_task(downward())]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        for end in (writer, up_writer):
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()
        self._tasks.discard(task)
