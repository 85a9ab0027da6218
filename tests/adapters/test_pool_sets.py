from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from adapters.errors import AdapterUnavailable
from adapters.manifest import AdapterRef
from adapters.pages import ResidentAdapter
from adapters.pool import RESERVED_SECONDS, AdapterPool
from tests.adapters import pooled
from tests.adapters.pooled import Clock, Disk, MakePool, flip, get, serve, settle, use, wait_until
from tests.adapters.stored import (
    EVERY_TERM,
    assert_exact,
    device_bytes,
    every_module,
    write_adapter,
)

clock = pooled.clock
disk = pooled.disk
make_pool = pooled.make_pool
same_size = pooled.same_size


def test_several_are_pinned_together_in_the_order_asked_for(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    a, b, c = same_size[:3]
    pool = make_pool(3 * device_bytes(a))
    use(pool, b)
    assert pool.acquire([c, b, a]) is None
    settle(pool)
    found = pool.acquire([c, b, a])
    assert found is not None
    for adapter, ref in zip(found, (c, b, a), strict=True):
        assert_exact(pool.buffer, adapter, ref)
    assert pool.stats().pinned == 3
    again = pool.acquire([b])
    assert again == (found[1],)
    for adapter in found:
        pool.release(adapter)
    assert pool.stats().pinned == 1
    pool.release(found[1])
    assert pool.stats().pinned == 0
    assert pool.acquire([]) == ()


def test_either_all_that_are_missing_are_loaded_or_none(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    a, b, c, d = same_size[:4]
    pool = make_pool(3 * device_bytes(a))
    use(pool, d)
    pins = [get(pool, ref) for ref in (a, b)]
    assert pool.acquire([c, d]) is None
    settle(pool)
    assert [pool.state(ref.digest) for ref in (c, d)] == ["waiting", "resident"]
    assert pool.stats().evictions_total == 0
    pool.release(pins[0])
    assert pool.acquire([c, d]) is None
    settle(pool)
    assert [pool.state(ref.digest) for ref in (a, c, d)] == ["waiting", "resident", "resident"]
    assert pool.acquire([c, d]) is not None


def test_no_room_for_several_does_not_hold_back_one_of_them(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    a, b, c = same_size[:3]
    pool = make_pool(2 * device_bytes(a))
    get(pool, a)
    assert pool.acquire([b, c]) is None
    assert pool.state(b.digest) == pool.state(c.digest) == "waiting"
    use(pool, b)
    assert pool.acquire([b, c]) is None
    assert pool.state(c.digest) == "waiting"
    pool.withdraw(c.digest)
    assert pool.state(c.digest) == "absent"


def test_what_is_ready_stays_until_the_rest_is(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk, clock: Clock
) -> None:
    a, b, c = same_size[:3]
    pool = make_pool(2 * device_bytes(a))
    use(pool, b)
    go = disk.hold(a)
    for _ in range(20):
        assert pool.acquire([a, b]) is None
        clock.now += 0.9 * RESERVED_SECONDS
        assert pool.acquire([c]) is None
        assert pool.state(b.digest) == "resident"
    other = get_at_once(pool, b)
    assert pool.acquire([a, b]) is None
    pool.release(other)
    assert pool.acquire([a, b]) is None
    assert pool.acquire([c]) is None
    go.set()
    settle(pool)
    assert pool.acquire([a, b]) is not None
    assert pool.stats().evictions_total == 0


def get_at_once(pool: AdapterPool, ref: AdapterRef) -> ResidentAdapter:
    found = pool.acquire([ref])
    assert found is not None
    return found[0]


def test_a_wait_for_room_keeps_nothing_from_others(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    a, b, c, d = same_size[:4]
    pool = make_pool(2 * device_bytes(a))
    use(pool, a)
    get(pool, d)
    assert pool.acquire([a, b]) is None
    use(pool, c)
    assert pool.state(a.digest) == "waiting"


def test_a_member_in_the_middle_of_the_only_room_makes_way(
    make_pool: MakePool, tmp_path: Path
) -> None:
    size = device_bytes(write_adapter(tmp_path, "size", every_module(8, "k_proj")))
    small = [write_adapter(tmp_path, f"k{i}", every_module(8, "k_proj"), seed=i) for i in range(3)]
    wide = write_adapter(tmp_path, "wide", every_module(8, "up_proj"))
    assert size < device_bytes(wide) < 3 * size
    pool = make_pool(size + device_bytes(wide))
    first, middle, _ = (get(pool, ref) for ref in small[:2] + small[:1])
    assert middle.targets[1].pages[0] > 0
    assert pool.acquire([small[1], wide]) is None
    assert pool.state(wide.digest) == "waiting"
    pool.release(middle)
    assert pool.acquire([small[1], wide]) is None
    pool.release(first)
    pool.release(first)
    assert pool.acquire([small[1], wide]) is None
    settle(pool)
    found = pool.acquire([small[1], wide])
    assert found is not None
    for adapter, ref in zip(found, (small[1], wide), strict=True):
        assert_exact(pool.buffer, adapter, ref)


def test_one_that_fails_fails_all_with_its_message(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    good, bad = same_size[:2]
    pool = make_pool(4 * device_bytes(good))
    flip(bad)
    assert pool.acquire([good, bad]) is None
    settle(pool)
    with pytest.raises(AdapterUnavailable, match="'s1': stored files are damaged"):
        pool.acquire([good, bad])
    use(pool, good)
    assert pool.stats().device_used == device_bytes(good)


def test_sets_that_make_no_sense_are_refused(
    make_pool: MakePool, same_size: list[AdapterRef]
) -> None:
    a, b, _ = same_size[:3]
    size = device_bytes(a)
    pool = make_pool(2 * size - 4)
    with pytest.raises(ValueError, match="twice.*'s0', 's0'"):
        pool.acquire([a, a])
    use(pool, a)
    message = f"'s0' takes {size} bytes and adapter 's1' takes {size} bytes.*{2 * size - 4}"
    with pytest.raises(AdapterUnavailable, match=message):
        pool.acquire([a, b])


def test_a_set_waits_for_what_is_being_read_ahead(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    a, b = same_size[:2]
    pool = make_pool(2 * device_bytes(a), 8 * device_bytes(a))
    go = disk.hold(b)
    pool.prefetch(b)
    wait_until(lambda: disk.started == ["s1"])
    assert pool.acquire([a, b]) is None
    assert pool.state(b.digest) == "loading"
    go.set()
    settle(pool)
    assert pool.acquire([a, b]) is None
    settle(pool)
    assert pool.acquire([a, b]) is not None
    assert sorted(disk.started) == ["s0", "s1"]


def test_overlapping_sets_are_all_served(make_pool: MakePool, tmp_path: Path) -> None:
    ranks = [(1, 4, 9, 17)[i % 4] for i in range(12)]
    refs = [write_adapter(tmp_path, f"a{i}", every_module(r), seed=i) for i, r in enumerate(ranks)]
    refs += [
        write_adapter(tmp_path, f"t{i}", every_module(3, "q_proj"), seed=i, terms=EVERY_TERM)
        for i in range(3)
    ]
    largest = max(device_bytes(ref) for ref in refs)
    pool = make_pool(3 * largest + 4, 4 * largest, clock=time.monotonic, loader_threads=3)
    draw = random.Random(3)
    requests = [draw.sample(refs, draw.randint(1, 3)) for _ in range(50)]
    order = serve(pool, requests, patience=4, steps=3, running=8)
    assert sorted(order) == sorted("+".join(ref.name for ref in refs) for refs in requests)
