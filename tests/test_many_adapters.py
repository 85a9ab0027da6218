"""Far more adapters than the device holds, all wanted at once: all served, none wrong or late."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from adapters.manifest import PAGE_RANK
from base_engine.config import EngineConfig
from tests.process import ServerProcess, server_process, token_ids
from tests.tiny import BYTE0, VOCAB, signature_adapter

ADAPTERS = 200
#: Device memory is for this many adapters, host memory for three times as many.
RESIDENT = 8
CONCURRENT = 64
REQUESTS = 2 * ADAPTERS
TOKENS = 12

#: A signature adapter takes one page of the head: A [8, 64] and B [8, 320] in float32.
PAGE_BYTES = 4 * PAGE_RANK * (64 + VOCAB)
#: So many later requests may be chosen before one that waits for room; so many more, which run
#: beside it, may end before it; and all that are under way may go through while it is read.
PASSED = EngineConfig().patience + EngineConfig().max_running + CONCURRENT


@pytest.fixture(scope="module")
def crowded(
    scripted: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, dict[str, int]]]:
    """A server with all adapters uploaded, and the token that each says."""
    folder = tmp_path_factory.mktemp("many")
    tokens = {f"a{i}": BYTE0 + i for i in range(ADAPTERS)}
    memory = {
        "adapter_memory": RESIDENT * PAGE_BYTES,
        "host_adapter_memory": 3 * RESIDENT * PAGE_BYTES,
    }
    with server_process(scripted, folder / "data", **memory) as server:

        def upload(name: str) -> int:
            made = signature_adapter(scripted, folder / name, tokens[name])
            return server.upload(name, made).status_code

        with ThreadPoolExecutor(4) as executor:
            assert set(executor.map(upload, tokens)) == {201}
        yield server, tokens


async def ask_all(
    server: ServerProcess, order: list[str], tokens: dict[str, int]
) -> tuple[list[int], list[dict[str, float]]]:
    """Ask each of `order`, CONCURRENT at a time; every answer must be right.

    Returns the positions in the order in which they ended, and the metrics meanwhile.
    """
    ended: list[int] = []
    samples: list[dict[str, float]] = []
    waiting = iter(enumerate(order))

    async def worker(client: httpx.AsyncClient) -> None:
        for position, name in waiting:
            body = {"model": name, "prompt": "!", "max_tokens": TOKENS, "ignore_eos": True}
            headers = {"x-lorikeet-trace": "1"}
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200, response.text
            assert token_ids(response.json()) == [tokens[name]] * TOKENS, name
            ended.append(position)

    async def sample() -> None:
        while True:
            samples.append(await asyncio.to_thread(server.gauges))
            await asyncio.sleep(0.05)

    async with AsyncExitStack() as stack:
        # A client each: in one client's pool, later requests overtake others by seconds.
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=server.address, timeout=120, verify=False)
            )
            for _ in range(CONCURRENT)
        ]
        sampler = asyncio.create_task(sample())
        try:
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(worker(client))
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
    return ended, samples


def test_all_are_answered_rightly_in_turn_and_within_both_budgets(
    crowded: tuple[ServerProcess, dict[str, int]],
) -> None:
    server, tokens = crowded
    names = list(tokens)
    assert sorted(server.adapters()) == sorted(names)
    linux = sys.platform == "linux"
    asyncio.run(ask_all(server, names[:CONCURRENT], tokens))
    before = server.resident_bytes() if linux else 0

    order = random.Random(4).sample(names * (REQUESTS // ADAPTERS), REQUESTS)
    ended, samples = asyncio.run(ask_all(server, order, tokens))

    assert sorted(ended) == list(range(REQUESTS))
    for rank, position in enumerate(ended):
        overtaken = sum(other > position for other in ended[:rank])
        assert overtaken <= PASSED, f"{overtaken} requests that came later ended before {position}"
    assert len(samples) >= 5
    for gauges in samples:
        device, host = "adapter_device_bytes", "adapter_host_bytes"
        assert gauges[f"{device}_used"] <= gauges[f"{device}_total"] == RESIDENT * PAGE_BYTES
        assert gauges[f"{host}_used"] <= gauges[f"{host}_total"] == 3 * RESIDENT * PAGE_BYTES
        assert gauges["adapters_resident"] <= RESIDENT
    assert max(gauges["requests_waiting"] for gauges in samples) > RESIDENT
    assert server.gauges()["adapter_evictions_total"] > ADAPTERS - RESIDENT
    assert server.idle()
    if linux:
        assert server.resident_bytes() - before < 64 << 20
