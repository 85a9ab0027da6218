from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch

from adapters.errors import AdapterUnavailable
from adapters.manifest import AdapterRef
from adapters.pool import AdapterPool
from tests.adapters import pooled
from tests.adapters.pooled import Clock, Disk, MakePool, get, settle, use, wait_until
from tests.adapters.stored import (
    BASE,
    assert_exact,
    base_parameter,
    device_bytes,
    every_module,
    ranges,
    write_adapter,
)

clock = pooled.clock
disk = pooled.disk
make_pool = pooled.make_pool
same_size = pooled.same_size


def test_absent_then_loading_then_resident(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    pool, ref = make_pool(1 << 16), same_size[0]
    go = disk.hold(ref)
    assert pool.state(ref.digest) == "absent"
    started = time.monotonic()
    assert pool.acquire([ref]) is None
    assert pool.acquire([ref]) is None
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
    assert pool.acquire([same_size[0]]) is None
    assert pool.acquire([same_size[1]]) is None
    wait_until(lambda: pool.state(same_size[1].digest) == "resident")
    assert pool.acquire([same_size[1]]) is not None
    assert pool.state(same_size[0].digest) == "loading"
    go.set()
    use(pool, same_size[0])


def test_what_is_asked_for_overtakes_prefetches(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    pool = make_pool(1 << 20, loader_threads=1)
    go = disk.hold(same_size[0])
    pool.prefetch(same_size[0])
    assert pool.acquire([same_size[1]]) is None
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
        parameters=base_parameter,
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
    assert [pool.acquire([ref]) for _ in range(20)] == [None] * 20
    go.set()
    pins = [get(pool, ref) for _ in range(20)]
    assert len({id(pin) for pin in pins}) == 1
    stats = pool.stats()
    assert (stats.loads_total, stats.copies_total, stats.pinned) == (1, 1, 1)
    for pin in pins:
        pool.release(pin)
    assert pool.stats().pinned == 0
    assert len(changes) == 2 and threading.current_thread().name not in changes


def test_prefetches_run_side_by_side_and_leave_half_the_host_cache(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    size = device_bytes(same_size[0])
    pool = make_pool(size, 6 * size + 4, loader_threads=2)
    gates = [disk.hold(ref) for ref in same_size]
    for ref in same_size:
        pool.prefetch(ref)
    wait_until(lambda: sorted(disk.started) == ["s0", "s1"])
    assert pool.stats().loading == 3 and pool.stats().host_used == 3 * size
    for gate in gates:
        gate.set()
    settle(pool)
    assert sorted(disk.started) == ["s0", "s1", "s2"]
    assert [pool.state(ref.digest) for ref in same_size[2:4]] == ["waiting", "absent"]
    use(pool, same_size[0])
    assert pool.stats().loads_total == 3


def test_what_is_on_the_device_is_not_read_ahead_again(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    size = device_bytes(same_size[0])
    pool = make_pool(3 * size, 2 * size)
    for ref in same_size[:3]:
        use(pool, ref)
    pool.prefetch(same_size[0])
    settle(pool)
    assert pool.stats().loads_total == 3


def test_an_adapter_larger_than_the_device_is_refused_not_kept_waiting(
    make_pool: MakePool, tmp_path: Path
) -> None:
    big = write_adapter(tmp_path, "big", every_module(16))
    pool = make_pool(device_bytes(big) - 4)
    with pytest.raises(AdapterUnavailable, match=f"'big' takes {device_bytes(big)} bytes"):
        pool.acquire([big])


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
            BASE,
            device="cpu",
            dtype=torch.float32,
            on_change=lambda: None,
            parameters=base_parameter,
            clock=Clock(),
            **sizes,
        )


def test_a_closed_pool_takes_no_more(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    pool = make_pool(1 << 16, loader_threads=1)
    pin = get(pool, same_size[0])
    pool.close()
    pool.close()
    pool.prefetch(same_size[1])
    with pytest.raises(AdapterUnavailable, match="closed"):
        pool.acquire([same_size[1]])
    pool.release(pin)
    assert disk.started == ["s0"]
