from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from adapters.manifest import AdapterRef
from adapters.pool import RESERVED_SECONDS
from tests.adapters import pooled
from tests.adapters.pooled import Disk, MakePool, get, serve, settle, use, wait_until
from tests.adapters.stored import (
    assert_exact,
    device_bytes,
    every_module,
    write_adapter,
)

clock = pooled.clock
disk = pooled.disk
make_pool = pooled.make_pool
same_size = pooled.same_size


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
        assert pool.acquire([same_size[1]]) is None
        assert pool.state(same_size[1].digest) == "waiting"
    pool.release(first)
    assert pool.acquire([same_size[1]]) is None
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
    assert pool.acquire([big]) is None
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
        assert [pool.acquire([ref]) for ref in same_size[1:]] == [None] * 5
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


def test_waiting_adapters_do_not_evict_each_other_before_use(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    a, b, _, _, _, _ = same_size
    pool = make_pool(device_bytes(a))
    for first, second in ((a, b), (b, a)):
        assert pool.acquire([first]) is None
        settle(pool)
        for _ in range(3):
            assert pool.acquire([second]) is None
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
    assert pool.acquire([a]) is None
    pool.withdraw(a.digest)
    assert pool.acquire([b]) is None
    go.set()
    settle(pool)
    assert pool.acquire([b]) is None
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
    assert pool.acquire([a]) is None
    settle(pool)
    wait_until(changed.is_set)
    changed.clear()
    assert pool.acquire([b]) is None
    assert changed.wait(20 * RESERVED_SECONDS)
    use(pool, b)


def test_a_large_adapter_gets_in_under_a_stream_of_small_ones(
    make_pool: MakePool, tmp_path: Path, same_size: list[AdapterRef]
) -> None:
    big = write_adapter(tmp_path, "big", every_module(24))
    pool = make_pool(device_bytes(big), clock=time.monotonic)
    small = [same_size[i % 6] for i in range(200)]
    requests = [[ref] for ref in (*small[:4], big, *small[4:])]
    order = serve(pool, requests, patience=8, steps=5, running=4)
    assert len(order) == 201
    assert order.index("big") <= 4 + 5 * 8  # it and each of the four before it: passed 8 times


def test_far_more_adapters_than_room_are_all_served(make_pool: MakePool, tmp_path: Path) -> None:
    ranks = [(1, 4, 9, 17)[i % 4] for i in range(40)]
    refs = [write_adapter(tmp_path, f"a{i}", every_module(r), seed=i) for i, r in enumerate(ranks)]
    largest = max(device_bytes(ref) for ref in refs)
    pool = make_pool(2 * largest, 4 * largest, clock=time.monotonic)
    for ref in refs:
        pool.prefetch(ref)
    requests = [[ref] for ref in refs * 3]
    random.Random(2).shuffle(requests)
    order = serve(pool, requests, patience=16, steps=3, running=8)
    assert sorted(order) == sorted(ref.name for ref in refs * 3)
