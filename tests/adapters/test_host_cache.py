from __future__ import annotations

from adapters.host_cache import HostCache, HostCopy
from adapters.weights import AdapterWeights


def stored(cache: HostCache, digest: str, nbytes: int) -> HostCopy:
    """A copy that has been read and is idle."""
    copy = cache.reserve(digest, nbytes)
    copy.weights = AdapterWeights(digest, {}, nbytes)
    cache.release(copy)
    cache.check_integrity()
    return copy


def test_the_least_recently_used_goes_first() -> None:
    cache = HostCache(30)
    a, _ = stored(cache, "a", 10), stored(cache, "b", 10)
    stored(cache, "c", 10)
    assert cache.hold("a") is a
    cache.release(a)
    stored(cache, "d", 10)
    assert [digest for digest in "abcd" if cache.get(digest)] == ["a", "c", "d"]
    assert cache.used == 30


def test_a_held_copy_outlives_any_pressure_and_stays_counted() -> None:
    cache = HostCache(20)
    stored(cache, "a", 10)
    held = cache.hold("a")
    assert held is not None
    large = cache.reserve("large", 50)
    assert cache.get("a") is held and cache.used == 60
    cache.check_integrity()
    cache.release(large)
    assert (cache.get("large"), cache.used) == (None, 10)
    cache.release(held)
    assert cache.get("a") is held


def test_reading_ahead_leaves_half_the_budget() -> None:
    cache = HostCache(40)
    stored(cache, "idle", 40)
    assert cache.has_room(20) and not cache.has_room(21)
    reading = cache.reserve("a", 15)
    assert cache.has_room(5) and not cache.has_room(6)
    cache.forget("a")
    assert not cache.has_room(6)
    cache.release(reading)
    assert cache.has_room(20) and cache.used == 0


def test_a_forgotten_copy_is_counted_until_its_last_hold_ends() -> None:
    cache = HostCache(20)
    stored(cache, "a", 10)
    old = cache.hold("a")
    assert old is not None
    cache.forget("a")
    new = stored(cache, "a", 10)
    assert cache.get("a") is new and cache.used == 20
    cache.release(old)
    assert cache.get("a") is new and cache.used == 10
    cache.check_integrity()
