from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters import pool as pool_module
from adapters.manifest import AdapterRef
from adapters.pool import FAILURE_SECONDS
from adapters.weights import AdapterWeights
from tests.adapters import pooled
from tests.adapters.pooled import Clock, Disk, MakePool, failure, flip, get, settle, use, wait_until
from tests.adapters.stored import (
    assert_exact,
    device_bytes,
    ranges,
)

clock = pooled.clock
disk = pooled.disk
make_pool = pooled.make_pool
same_size = pooled.same_size


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
        assert pool.acquire([ref]) is None
    wait_until(lambda: disk.started == ["s0"])
    pool.forget(ref.digest)
    assert pool.state(ref.digest) == "absent"
    pool.check_integrity()
    if again:
        assert pool.acquire([ref]) is None
    go.set()
    settle(pool)
    assert pool.stats().copies_total == again
    assert pool.stats().device_used == pool.stats().host_used == again * device_bytes(ref)
    if again:
        use(pool, ref)


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_failure_of_a_forgotten_load_is_not_remembered(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk, prefetch: bool
) -> None:
    pool, ref = make_pool(1 << 16), same_size[0]
    go = disk.hold(ref)
    flip(ref)
    if prefetch:
        pool.prefetch(ref)
    else:
        assert pool.acquire([ref]) is None
    wait_until(lambda: disk.started == ["s0"])
    pool.forget(ref.digest)
    go.set()
    settle(pool)
    flip(ref)
    use(pool, ref)
    assert pool.stats().failures_total == 0


def test_a_load_forgotten_before_it_began_reads_nothing(
    make_pool: MakePool, same_size: list[AdapterRef], disk: Disk
) -> None:
    pool = make_pool(1 << 16, loader_threads=1)
    go = disk.hold(same_size[0])
    for ref in same_size[:2]:
        assert pool.acquire([ref]) is None
    pool.forget(same_size[1].digest)
    go.set()
    settle(pool)
    assert disk.started == ["s0"]
    assert pool.stats().device_used == device_bytes(same_size[0])
