from __future__ import annotations

from pathlib import Path

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

from adapters.errors import AdapterUnavailable
from adapters.manifest import AdapterRef
from adapters.pages import ResidentAdapter
from adapters.pool import AdapterPool
from tests.adapters.pooled import Clock, settle
from tests.adapters.stored import (
    BASE,
    EVERY_TERM,
    assert_exact,
    base_parameter,
    device_bytes,
    every_module,
    ranges,
    write_adapter,
)


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
            parameters=base_parameter,
            clock=self.clock,
        )
        self.pool.buffer.fill_(float("nan"))
        self.pins: list[tuple[ResidentAdapter, AdapterRef]] = []
        self.generation = 0

    @rule(
        chosen=st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), lapse=st.booleans()
    )
    def acquire(self, chosen: list[int], lapse: bool) -> None:
        refs = [self.refs[i] for i in chosen]
        before = [self.pool.state(ref.digest) == "resident" for ref in refs]
        if lapse:
            self.clock.now += 1
            self.pool._lapsed()
        copies = self.pool.stats().copies_total
        if sum(device_bytes(ref) for ref in refs) > self.pool.buffer.nbytes and not all(before):
            with pytest.raises(AdapterUnavailable, match="bytes on the device"):
                self.pool.acquire(refs)
            return
        adapters = self.pool.acquire(refs)
        assert (adapters is not None) == all(before)
        settle(self.pool)
        if adapters is not None:
            self.pins += zip(adapters, refs, strict=True)
            return
        loaded = self.pool.stats().copies_total - copies
        after = [self.pool.state(ref.digest) == "resident" for ref in refs]
        if loaded:
            assert all(after) and loaded >= before.count(False)
        else:
            assert after == before
            assert "waiting" in [self.pool.state(ref.digest) for ref in refs]
        if lapse and not self.pins:
            assert loaded, "everything could be evicted, yet there was no room"

    @precondition(lambda self: self.pins)
    @rule(n=st.integers(0))
    def release(self, n: int) -> None:
        adapter, _ = self.pins.pop(n % len(self.pins))
        self.pool.release(adapter)

    @rule(i=st.integers(0, 6))
    def prefetch(self, i: int) -> None:
        self.pool.prefetch(self.refs[i])
        settle(self.pool)

    @rule(i=st.integers(0, 6))
    def forget(self, i: int) -> None:
        digest = self.refs[i].digest
        self.pool.forget(digest)
        assert self.pool.state(digest) == "absent"

    @rule(i=st.integers(0, 6))
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
        write_adapter(tmp_path, "rare", every_module(3, "q_proj"), seed=7, terms=EVERY_TERM),
    ]
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=30, stateful_step_count=25, deadline=None, derandomize=True, database=None
        ),
    )
