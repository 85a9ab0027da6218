"""A pool that tests can look into: loads that end on command, adapters checked on arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import pool as pool_module
from adapters.errors import AdapterUnavailable
from adapters.manifest import WEIGHTS_FILE, AdapterRef, BaseSpec
from adapters.pages import ResidentAdapter
from adapters.pool import AdapterPool
from adapters.terms import BaseParameters
from adapters.weights import AdapterWeights, load_weights
from tests.adapters.stored import BASE, assert_exact, base_parameter, every_module, write_adapter

MakePool = Callable[..., AdapterPool]


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def settle(pool: AdapterPool) -> None:
    """Until no loader thread has work left."""
    wait_until(lambda: not pool.stats().loading)
    pool.check_integrity()


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline, "still waiting after 20 s"
        time.sleep(0.0005)


def get(pool: AdapterPool, ref: AdapterRef) -> ResidentAdapter:
    """`ref`, pinned, its content checked."""
    for _ in range(2):
        if (found := pool.acquire([ref])) is not None:
            break
        settle(pool)
    else:
        found = pool.acquire([ref])
    assert found is not None, f"{ref.name} is {pool.state(ref.digest)}"
    (adapter,) = found
    assert_exact(pool.buffer, adapter, ref)
    return adapter


def use(pool: AdapterPool, ref: AdapterRef) -> ResidentAdapter:
    adapter = get(pool, ref)
    pool.release(adapter)
    return adapter


def failure(pool: AdapterPool, ref: AdapterRef) -> str:
    """What `acquire` raises, at once or after its load."""
    with suppress(AdapterUnavailable):
        assert pool.acquire([ref]) is None
    settle(pool)
    with pytest.raises(AdapterUnavailable) as raised:
        pool.acquire([ref])
    return str(raised.value)


def serve(
    pool: AdapterPool,
    requests: Sequence[Sequence[AdapterRef]],
    *,
    patience: int,
    steps: int,
    running: int,
) -> list[str]:
    """A scheduler in small: one pass over the queue per step, `patience` requests may pass the
    first, each runs `steps` steps. Returns names in the order of admission."""
    waiting = list(requests)
    active: list[list[Any]] = []
    admitted: list[str] = []
    passed = 0
    wake = threading.Event()
    pool._on_change = wake.set
    while waiting or active:
        for request in active[:]:
            request[2] -= 1
            if not request[2]:
                for adapter, ref in zip(request[0], request[1], strict=True):
                    assert_exact(pool.buffer, adapter, ref)
                    pool.release(adapter)
                active.remove(request)
        for i, refs in enumerate(waiting[:]):
            if len(active) == running or (i and passed >= patience):
                break
            wake.clear()
            adapters = pool.acquire(refs)
            if adapters is None:
                continue
            passed = 0 if refs is waiting[0] else passed + 1
            waiting.remove(refs)
            active.append([adapters, refs, steps])
            admitted.append("+".join(ref.name for ref in refs))
        stats = pool.stats()
        assert stats.device_used <= stats.device_bytes
        assert stats.host_used <= stats.host_bytes
        pool.check_integrity()
        if not active and waiting:
            assert wake.wait(20), "nothing runs and nothing wakes the engine"
    return admitted


def flip(ref: AdapterRef) -> None:
    path = ref.folder / WEIGHTS_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@dataclass
class Disk:
    """Holds reads of chosen adapters until told to go on; the reads themselves are real."""

    held: dict[str, threading.Event] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)

    def hold(self, ref: AdapterRef) -> threading.Event:
        return self.held.setdefault(ref.digest, threading.Event())

    def read(
        self, ref: AdapterRef, base: BaseSpec, dtype: torch.dtype, parameters: BaseParameters
    ) -> AdapterWeights:
        self.started.append(ref.name)
        if ref.digest in self.held:
            assert self.held[ref.digest].wait(20)
        return load_weights(ref, base, dtype, parameters)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_pool(clock: Clock) -> Iterator[MakePool]:
    pools = []

    def make(device: int, host: int = 1 << 20, **options: Any) -> AdapterPool:
        defaults: dict[str, Any] = {
            "loader_threads": 2,
            "on_change": lambda: None,
            "parameters": base_parameter,
            "clock": clock,
        }
        pool = AdapterPool(
            BASE,
            device="cpu",
            dtype=torch.float32,
            device_bytes=device,
            host_bytes=host,
            **(defaults | options),
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()
        pool.check_integrity()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(pool_module, "load_weights", disk.read)
    return disk


@pytest.fixture
def same_size(tmp_path: Path) -> list[AdapterRef]:
    return [write_adapter(tmp_path, f"s{i}", every_module(4), seed=i) for i in range(6)]
