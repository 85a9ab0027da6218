"""A pool that tests can look into: loads that end on command, adapters checked on arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
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
from adapters.weights import AdapterWeights, load_weights
from tests.adapters.stored import BASE, assert_exact, every_module, write_adapter

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
        if (adapter := pool.acquire(ref)) is not None:
            assert_exact(pool.buffer, adapter, ref)
            return adapter
        settle(pool)
    adapter = pool.acquire(ref)
    assert adapter is not None, f"{ref.name} is {pool.state(ref.digest)}"
    assert_exact(pool.buffer, adapter, ref)
    return adapter


def use(pool: AdapterPool, ref: AdapterRef) -> ResidentAdapter:
    adapter = get(pool, ref)
    pool.release(adapter)
    return adapter


def failure(pool: AdapterPool, ref: AdapterRef) -> str:
    """What `acquire` raises, at once or after its load."""
    with suppress(AdapterUnavailable):
        assert pool.acquire(ref) is None
    settle(pool)
    with pytest.raises(AdapterUnavailable) as raised:
        pool.acquire(ref)
    return str(raised.value)


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

    def read(self, ref: AdapterRef, base: BaseSpec, dtype: torch.dtype) -> AdapterWeights:
        self.started.append(ref.name)
        if ref.digest in self.held:
            assert self.held[ref.digest].wait(20)
        return load_weights(ref, base, dtype)


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
