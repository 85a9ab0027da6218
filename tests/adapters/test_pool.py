from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from adapters import pool as pool_module
from adapters.errors import AdapterUnavailable
from adapters.manifest import WEIGHTS_FILE, AdapterRef, BaseSpec
from adapters.pages import ResidentAdapter
from adapters.pool import FAILURE_SECONDS, RESERVED_SECONDS, AdapterPool
from adapters.weights import AdapterWeights, load_weights
from tests.adapters.stored import (
    BASE,
    assert_exact,
    device_bytes,
    every_module,
    ranges,
    write_adapter,
)

MakePool = Callable[..., AdapterPool]


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


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
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(pool_module, "load_weights", disk.read)
    return disk


@pytest.fixture
def same_size(tmp_path: Path) -> list[AdapterRef]:
    return [write_adapter(tmp_path, f"s{i}", every_module(4), seed=i) for i in range(6)]


# What is on the device is what is in the file.


def test_absent_then_loading_then_resident(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    pool, ref = make_pool(1 << 16), same_size[0]
    go = disk.hold(ref)
    assert pool.state(ref.digest) == "absent"
    started = time.monotonic()
    assert pool.acquire(ref) is None
    assert pool.acquire(ref) is None
    assert time.monotonic() - started < 5
    assert pool.state(ref.digest) == "loading"
    go.set()
    settle(pool)
    assert pool.state(ref.digest) == "resident"
    assert use(pool, ref).generation == 1
    assert disk.started == ["s0"]


def test_a_slow_disk_does_not_hold_back_other_adapters(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    pool = make_pool(1 << 20, loader_threads=2)
    go = disk.hold(same_size[0])
    assert pool.acquire(same_size[0]) is None
    assert pool.acquire(same_size[1]) is None
    wait_until(lambda: pool.state(same_size[1].digest) == "resident")
    assert pool.acquire(same_size[1]) is not None
    assert pool.state(same_size[0].digest) == "loading"
    go.set()
    use(pool, same_size[0])


def test_what_is_asked_for_overtakes_prefetches(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    pool = make_pool(1 << 20, loader_threads=1)
    go = disk.hold(same_size[0])
    pool.prefetch(same_size[0])
    assert pool.acquire(same_size[1]) is None
    wait_until(lambda: pool.state(same_size[1].digest) == "resident")
    go.set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_and_targets_mix(tmp_path: Path, dtype: torch.dtype) -> None:
    refs = [
        write_adapter(tmp_path, "all", every_module(12), dtype=torch.float16),
        write_adapter(tmp_path, "q", every_module(1, "q_proj")),
        write_adapter(tmp_path, "odd", {"layers.1.up_proj": 17, "layers.2.k_proj": 8}),
    ]
    size = sum(device_bytes(ref, dtype.itemsize) for ref in refs)
    pool = AdapterPool(
        BASE,
        device="cpu",
        dtype=dtype,
        device_bytes=size,
        host_bytes=1 << 20,
        loader_threads=1,
        on_change=lambda: None,
    )
    adapters = [get(pool, ref) for ref in refs]
    assert pool.stats().device_used == size
    covered = [cell for adapter in adapters for pages in ranges(adapter) for cell in pages]
    assert len(covered) == len(set(covered)) == size // dtype.itemsize
    for adapter, ref in zip(adapters, refs, strict=True):
        assert_exact(pool.buffer, adapter, ref)
    pool.close()


def test_nothing_of_a_large_adapter_is_left_under_a_small_one(
    make_pool: MakePool, tmp_path: Path
) -> None:
    big = write_adapter(tmp_path, "big", every_module(16))
    small = write_adapter(tmp_path, "small", every_module(2, "q_proj"))
    pool = make_pool(device_bytes(big))
    pool.buffer.fill_(float("nan"))
    before = ranges(use(pool, big))
    assert not pool.buffer.isnan().any()
    after = ranges(use(pool, small))
    assert {cell for pages in after for cell in pages} <= {c for pages in before for c in pages}
    use(pool, big)
    assert pool.stats().evictions_total == 2


def test_every_visit_gets_the_current_version_under_eviction(
    make_pool: MakePool, tmp_path: Path
) -> None:
    refs = {n: write_adapter(tmp_path, n, every_module(4), seed=i) for i, n in enumerate("ABC")}
    size = device_bytes(refs["A"])
    pool = make_pool(size, 2 * size)
    generations = []
    for visit in range(12):
        name = "ABC"[visit % 3]
        if visit == 5:
            old = refs["B"]
            refs["B"] = write_adapter(tmp_path, "B", every_module(4), seed=99)
            pool.forget(old.digest)
        generations.append(use(pool, refs[name]).generation)
        assert pool.stats().host_used <= 2 * size
    assert generations == list(range(1, 13))
    assert pool.state(old.digest) == "absent"


def test_a_full_pool_takes_every_further_adapter(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    size = device_bytes(same_size[0])
    pool = make_pool(size, 2 * size)
    visits = same_size * 2
    random.Random(1).shuffle(visits)
    for ref in visits:
        use(pool, ref)
        stats = pool.stats()
        assert stats.resident == 1 and stats.host_used <= stats.host_bytes
        assert stats.device_used == stats.device_bytes == size


# One load, however many ask.


def test_many_first_requests_make_one_load(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    changes: list[str] = []
    pool = make_pool(1 << 16, on_change=lambda: changes.append(threading.current_thread().name))
    ref = same_size[0]
    go = disk.hold(ref)
    together = threading.Barrier(20)

    def first_request() -> None:
        together.wait(20)
        pool.prefetch(ref)

    threads = [threading.Thread(target=first_request) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.state(ref.digest) == "loading"
    assert [pool.acquire(ref) for _ in range(20)] == [None] * 20
    go.set()
    pins = [get(pool, ref) for _ in range(20)]
    assert len({id(pin) for pin in pins}) == 1
    stats = pool.stats()
    assert (stats.loads_total, stats.copies_total, stats.pinned) == (1, 1, 1)
    for pin in pins:
        pool.release(pin)
    assert pool.stats().pinned == 0
    assert len(changes) == 2 and threading.current_thread().name not in changes


def test_prefetches_run_side_by_side_and_keep_within_the_host_budget(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    size = device_bytes(same_size[0])
    pool = make_pool(size, 3 * size, loader_threads=2)
    gates = [disk.hold(ref) for ref in same_size]
    for ref in same_size:
        pool.prefetch(ref)
    wait_until(lambda: disk.started == ["s0", "s1"])
    assert pool.stats().loading == 3 and pool.stats().host_used == 3 * size
    for gate in gates:
        gate.set()
    settle(pool)
    assert sorted(disk.started) == ["s0", "s1", "s2"]
    assert [pool.state(ref.digest) for ref in same_size[2:4]] == ["waiting", "absent"]
    use(pool, same_size[0])
    assert pool.stats().loads_total == 3


# Eviction.


def test_the_least_recently_used_go_first_and_only_as_far_as_needed(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    a, b, c, d, e, _ = same_size
    pool = make_pool(3 * device_bytes(a))
    for ref in (a, b, c, a):
        use(pool, ref)
    use(pool, d)
    assert [pool.state(ref.digest) for ref in (a, b, c)] == ["resident", "waiting", "resident"]
    use(pool, e)
    assert [pool.state(ref.digest) for ref in (a, c, d)] == ["resident", "waiting", "resident"]


def test_a_pinned_adapter_stays_until_its_last_release(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    pool = make_pool(device_bytes(same_size[0]))
    first, second = get(pool, same_size[0]), get(pool, same_size[0])
    for _ in range(3):
        assert pool.acquire(same_size[1]) is None
        assert pool.state(same_size[1].digest) == "waiting"
    pool.release(first)
    assert pool.acquire(same_size[1]) is None
    assert_exact(pool.buffer, second, same_size[0])
    pool.release(second)
    use(pool, same_size[1])


def test_nothing_is_evicted_for_an_adapter_that_would_not_fit_anyway(
    make_pool: MakePool, tmp_path: Path, same_size: list[AdapterRef]
) -> None:
    big = write_adapter(tmp_path, "big", every_module(24))
    pool = make_pool(device_bytes(big))
    pin = get(pool, same_size[0])
    use(pool, same_size[1])
    assert pool.acquire(big) is None
    assert pool.state(same_size[1].digest) == "resident"
    assert pool.stats().evictions_total == 0
    pool.release(pin)
    use(pool, big)
    assert pool.stats().evictions_total == 2


def test_waiting_for_room_reads_nothing_from_disk(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    size = device_bytes(same_size[0])
    pool = make_pool(size, size)
    pin = get(pool, same_size[0])
    for _ in range(20):
        assert [pool.acquire(ref) for ref in same_size[1:]] == [None] * 5
        settle(pool)
    assert pool.stats().loads_total == 1
    pool.release(pin)


def test_handles_are_released_once(make_pool: MakePool, same_size: list[AdapterRef]) -> None:
    pool = make_pool(device_bytes(same_size[0]))
    stale = use(pool, same_size[0])
    with pytest.raises(ValueError, match="not pinned"):
        pool.release(stale)
    use(pool, same_size[1])
    pin = get(pool, same_size[0])
    with pytest.raises(ValueError, match="not pinned"):
        pool.release(stale)
    assert pool.stats().pinned == 1
    pool.release(pin)


# Sizes at the edge.


def test_an_adapter_larger_than_the_device_is_refused_not_kept_waiting(
    make_pool: MakePool, tmp_path: Path
) -> None:
    big = write_adapter(tmp_path, "big", every_module(16))
    pool = make_pool(device_bytes(big) - 4)
    with pytest.raises(AdapterUnavailable, match=f"'big' takes {device_bytes(big)} bytes"):
        pool.acquire(big)


def test_an_adapter_larger_than_the_host_cache_passes_through(
    make_pool: MakePool, tmp_path: Path, same_size: list[AdapterRef]
) -> None:
    big = write_adapter(tmp_path, "big", every_module(16))
    pool = make_pool(device_bytes(big), device_bytes(same_size[0]))
    pool.prefetch(big)
    assert pool.stats().loading == 0
    use(pool, big)
    assert pool.stats().host_used == 0
    use(pool, same_size[0])
    use(pool, big)
    assert pool.stats().loads_total == 3


def test_an_adapter_without_modules_needs_no_room(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(4)
    assert use(pool, write_adapter(tmp_path, "empty", {})).targets == {}


@pytest.mark.parametrize("option", ["device_bytes", "host_bytes", "loader_threads"])
def test_sizes_that_cannot_work_are_named(option: str) -> None:
    sizes = {"device_bytes": 64, "host_bytes": 0, "loader_threads": 1} | {option: -1}
    with pytest.raises(ValueError, match=f"{option}.*-1"):
        AdapterPool(
            BASE, device="cpu", dtype=torch.float32, on_change=lambda: None, clock=Clock(), **sizes
        )


# Damage.


def flip(ref: AdapterRef) -> None:
    path = ref.folder / WEIGHTS_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, lambda ref: shutil.rmtree(ref.folder)])
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_damaged_adapter_fails_alone_fast_and_until_healed(
    make_pool: MakePool,
    same_size: list[AdapterRef],
    clock: Clock,
    tmp_path: Path,
    damage: Callable[[AdapterRef], None],
    prefetch: bool,
) -> None:
    bad, good = same_size[:2]
    pool = make_pool(2 * device_bytes(bad))
    shutil.copytree(bad.folder, tmp_path / "intact")
    damage(bad)
    if prefetch:
        pool.prefetch(bad)
    assert "'s0'" in failure(pool, bad)
    reads = pool.stats().loads_total
    use(pool, good)
    for _ in range(3):
        failure(pool, bad)
        pool.prefetch(bad)
    stats = pool.stats()
    assert (stats.loads_total, stats.failures_total) == (reads + 1, 1)
    assert stats.device_used == device_bytes(good)
    shutil.rmtree(bad.folder, ignore_errors=True)
    shutil.copytree(tmp_path / "intact", bad.folder)
    failure(pool, bad)
    clock.now += FAILURE_SECONDS
    use(pool, bad)


def test_forgetting_a_failure_heals_at_once(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    pool, bad = make_pool(1 << 16), same_size[0]
    flip(bad)
    failure(pool, bad)
    flip(bad)
    pool.forget(bad.digest)
    use(pool, bad)


def test_a_failure_nobody_foresaw_reaches_the_asker(
    make_pool: MakePool, same_size: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> AdapterWeights:
        raise MemoryError("no memory left")

    pool = make_pool(1 << 16)
    monkeypatch.setattr(pool_module, "load_weights", out_of_memory)
    assert (
        failure(pool, same_size[0]) == "adapter 's0': loading failed: MemoryError: no memory left"
    )
    assert pool.stats().device_used == pool.stats().host_used == 0


# Forgetting.


def test_forgetting_an_idle_adapter_frees_host_and_device(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    pool = make_pool(1 << 16)
    for ref in same_size[:2]:
        use(pool, ref)
    pool.forget(same_size[0].digest)
    pool.forget(same_size[0].digest)
    assert pool.state(same_size[0].digest) == "absent"
    size = device_bytes(same_size[0])
    assert (pool.stats().device_used, pool.stats().host_used) == (size, size)


def test_a_pinned_adapter_is_forgotten_with_its_last_release(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    pool, ref = make_pool(1 << 16), same_size[0]
    old = [get(pool, ref), get(pool, ref)]
    pool.forget(ref.digest)
    new = get(pool, ref)
    assert new.generation > old[0].generation
    assert not set(ranges(new)) & set(ranges(old[0]))
    pool.release(old[0])
    assert_exact(pool.buffer, old[1], ref)
    assert pool.stats().device_used == 2 * device_bytes(ref)
    pool.release(old[1])
    assert pool.stats().device_used == device_bytes(ref)
    pool.release(new)
    assert pool.state(ref.digest) == "resident"


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_load_forgotten_in_mid_read_is_discarded(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk, prefetch: bool, again: bool
) -> None:
    pool, ref = make_pool(1 << 16, loader_threads=2), same_size[0]
    go = disk.hold(ref)
    if prefetch:
        pool.prefetch(ref)
    else:
        assert pool.acquire(ref) is None
    wait_until(lambda: disk.started == ["s0"])
    pool.forget(ref.digest)
    assert pool.state(ref.digest) == "absent"
    pool.check_integrity()
    if again:
        assert pool.acquire(ref) is None
    go.set()
    settle(pool)
    assert pool.stats().copies_total == again
    assert pool.stats().device_used == pool.stats().host_used == again * device_bytes(ref)
    if again:
        use(pool, ref)


def test_a_load_forgotten_before_it_began_reads_nothing(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    pool = make_pool(1 << 16, loader_threads=1)
    go = disk.hold(same_size[0])
    for ref in same_size[:2]:
        assert pool.acquire(ref) is None
    pool.forget(same_size[1].digest)
    go.set()
    settle(pool)
    assert disk.started == ["s0"]
    assert pool.stats().device_used == device_bytes(same_size[0])


# Fairness.


def test_waiting_adapters_do_not_evict_each_other_before_use(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    a, b, _, _, _, _ = same_size
    pool = make_pool(device_bytes(a))
    for first, second in ((a, b), (b, a)):
        assert pool.acquire(first) is None
        settle(pool)
        for _ in range(3):
            assert pool.acquire(second) is None
            settle(pool)
        assert pool.state(first.digest) == "resident"
        use(pool, first)
    assert pool.stats().copies_total == 2


def test_a_withdrawn_reservation_makes_room_at_once(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    a, b = same_size[:2]
    pool = make_pool(device_bytes(a))
    go = disk.hold(a)
    assert pool.acquire(a) is None
    pool.withdraw(a.digest)
    assert pool.acquire(b) is None
    go.set()
    settle(pool)
    assert pool.acquire(b) is None
    settle(pool)
    pool.withdraw(b.digest)
    use(pool, a)
    pool.withdraw("0" * 64)


def test_an_unclaimed_reservation_lapses_and_says_so(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    changed = threading.Event()
    a, b = same_size[:2]
    pool = make_pool(device_bytes(a), on_change=changed.set, clock=time.monotonic)
    assert pool.acquire(a) is None
    settle(pool)
    wait_until(changed.is_set)
    changed.clear()
    assert pool.acquire(b) is None
    assert changed.wait(20 * RESERVED_SECONDS)
    use(pool, b)


def serve(
    pool: AdapterPool, requests: list[AdapterRef], *, patience: int, steps: int, running: int
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
                assert_exact(pool.buffer, request[0], request[1])
                pool.release(request[0])
                active.remove(request)
        for i, ref in enumerate(waiting[:]):
            if len(active) == running or (i and passed >= patience):
                break
            wake.clear()
            adapter = pool.acquire(ref)
            if adapter is None:
                continue
            passed = 0 if ref is waiting[0] else passed + 1
            waiting.remove(ref)
            active.append([adapter, ref, steps])
            admitted.append(ref.name)
        stats = pool.stats()
        assert stats.device_used <= stats.device_bytes
        assert stats.host_used <= stats.host_bytes
        pool.check_integrity()
        if not active and waiting:
            assert wake.wait(20), "nothing runs and nothing wakes the engine"
    return admitted


def test_a_large_adapter_gets_in_under_a_stream_of_small_ones(
    make_pool: MakePool, tmp_path: Path, same_size: list[AdapterRef]
) -> None:
    big = write_adapter(tmp_path, "big", every_module(24))
    pool = make_pool(device_bytes(big), clock=time.monotonic)
    small = [same_size[i % 6] for i in range(200)]
    order = serve(pool, [*small[:4], big, *small[4:]], patience=8, steps=5, running=4)
    assert len(order) == 201
    assert order.index("big") <= 4 + 5 * 8  # it and each of the four before it: passed 8 times


def test_far_more_adapters_than_room_are_all_served(make_pool: MakePool, tmp_path: Path) -> None:
    ranks = [(1, 4, 9, 17)[i % 4] for i in range(40)]
    refs = [write_adapter(tmp_path, f"a{i}", every_module(r), seed=i) for i, r in enumerate(ranks)]
    largest = max(device_bytes(ref) for ref in refs)
    pool = make_pool(2 * largest, 3 * largest, clock=time.monotonic)
    for ref in refs:
        pool.prefetch(ref)
    requests = refs * 3
    random.Random(2).shuffle(requests)
    order = serve(pool, requests, patience=16, steps=3, running=8)
    assert sorted(order) == sorted(ref.name for ref in requests)


# The end.


def test_a_closed_pool_takes_no_more(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    pool = make_pool(1 << 16, loader_threads=1)
    pin = get(pool, same_size[0])
    pool.close()
    pool.close()
    pool.prefetch(same_size[1])
    with pytest.raises(AdapterUnavailable, match="closed"):
        pool.acquire(same_size[1])
    pool.release(pin)
    assert disk.started == ["s0"]


# Anything in any order.


class AnyOrder(RuleBasedStateMachine):
    """The pool against a model that only knows what is pinned; loader work ends after each rule."""

    refs: list[AdapterRef]

    @initialize(room=st.integers(1, 3), host=st.integers(0, 3))
    def make(self, room: int, host: int) -> None:
        largest = max(device_bytes(ref) for ref in self.refs)
        self.clock = Clock()
        self.pool = AdapterPool(
            BASE,
            device="cpu",
            dtype=torch.float32,
            device_bytes=room * largest,
            host_bytes=host * largest // 2,
            loader_threads=2,
            on_change=lambda: None,
            clock=self.clock,
        )
        self.pool.buffer.fill_(float("nan"))
        self.pins: list[tuple[ResidentAdapter, AdapterRef]] = []
        self.generation = 0

    @rule(i=st.integers(0, 5), lapse=st.booleans())
    def acquire(self, i: int, lapse: bool) -> None:
        ref = self.refs[i]
        resident = self.pool.state(ref.digest) == "resident"
        if lapse:
            self.clock.now += 1
            self.pool._lapsed()
        copies = self.pool.stats().copies_total
        adapter = self.pool.acquire(ref)
        assert (adapter is not None) == resident
        settle(self.pool)
        if adapter is not None:
            self.pins.append((adapter, ref))
            return
        loaded = self.pool.state(ref.digest) == "resident"
        assert self.pool.stats().copies_total == copies + loaded
        if lapse and not self.pins:
            assert loaded, "everything could be evicted, yet there was no room"

    @precondition(lambda self: self.pins)
    @rule(n=st.integers(0))
    def release(self, n: int) -> None:
        adapter, _ = self.pins.pop(n % len(self.pins))
        self.pool.release(adapter)

    @rule(i=st.integers(0, 5))
    def prefetch(self, i: int) -> None:
        self.pool.prefetch(self.refs[i])
        settle(self.pool)

    @rule(i=st.integers(0, 5))
    def forget(self, i: int) -> None:
        digest = self.refs[i].digest
        self.pool.forget(digest)
        assert self.pool.state(digest) == "absent"

    @rule(i=st.integers(0, 5))
    def withdraw(self, i: int) -> None:
        self.pool.withdraw(self.refs[i].digest)

    @invariant()
    def everything_is_in_order(self) -> None:
        self.pool.check_integrity()
        by_digest = {ref.digest: ref for ref in self.refs}
        slots = list(self.pool._slots)
        cells = [cell for slot in slots for pages in ranges(slot.adapter) for cell in pages]
        assert len(cells) == len(set(cells))
        for slot in slots:
            assert_exact(self.pool.buffer, slot.adapter, by_digest[slot.adapter.digest])
        live = {id(slot.adapter): slot.pins for slot in slots}
        for adapter, _ in self.pins:
            assert live[id(adapter)] == sum(other is adapter for other, _ in self.pins)
        stats = self.pool.stats()
        assert stats.pinned == len({id(adapter) for adapter, _ in self.pins})
        assert stats.host_used <= stats.host_bytes
        newest = max((slot.adapter.generation for slot in slots), default=0)
        assert newest <= stats.copies_total

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


def test_any_order_of_calls_keeps_weights_and_books_right(tmp_path: Path) -> None:
    AnyOrder.refs = [
        write_adapter(tmp_path, "large", every_module(16), seed=1),
        write_adapter(tmp_path, "odd", {"layers.1.up_proj": 17, "layers.2.k_proj": 3}, seed=2),
        write_adapter(tmp_path, "q", every_module(2, "q_proj"), seed=3),
        write_adapter(tmp_path, "flat", every_module(8), seed=4),
        write_adapter(tmp_path, "down", every_module(9, "down_proj"), seed=5),
        write_adapter(tmp_path, "kq", every_module(1, "k_proj", "q_proj"), seed=6),
    ]
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=30, stateful_step_count=25, deadline=None, derandomize=True, database=None
        ),
    )
