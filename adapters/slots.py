"""Which adapter has which pages of the device buffer. Bookkeeping only: it moves no weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, islice

from adapters.arena import Arena
from adapters.layout import Layout
from adapters.pages import PagedTarget, ResidentAdapter


@dataclass(eq=False)
class Slot:
    """One load's ranges of the buffer. Until `ready`, a loader thread owns their content.

    `offsets` are those of the layout's `allocations`: all pages, then all terms' tensors.
    `reserved_until` (on the pool's clock) keeps them for whoever asked for the load; `wanted` says
    whether somebody still does. A `forgotten` slot lives on only while pinned or loading.
    """

    adapter: ResidentAdapter
    offsets: tuple[int, ...]
    elements: int
    ready: bool = False
    pins: int = 0
    wanted: bool = True
    reserved_until: float = 0.0
    forgotten: bool = False

    def idle(self, now: float) -> bool:
        return self.ready and not self.pins and self.reserved_until <= now


class Slots:
    """Digest -> Slot over one arena of `capacity` elements. Not thread-safe: the pool's lock
    guards it.

    `changes` goes up whenever there may be more room than before.
    """

    def __init__(self, capacity: int) -> None:
        self.changes = 0
        self.evictions = 0
        self._arena = Arena(capacity)
        self._by_digest: OrderedDict[str, Slot] = OrderedDict()  # least recently used first
        self._by_generation: dict[int, Slot] = {}  # the forgotten too
        self._generations = count(1)

    @property
    def used(self) -> int:
        """Elements taken."""
        return self._arena.used

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._by_generation.values())

    def get(self, digest: str) -> Slot | None:
        return self._by_digest.get(digest)

    def take(self, members: Mapping[str, Layout], now: float) -> dict[str, Slot] | None:
        """Slots for those of `members` (by digest, asked for together) that have none.

        Idle slots are evicted until all of them fit at once: others' first, least recently used
        first, then those of members, which are taken anew with the rest; that is for a member that
        lies in the middle of the only room. None, and nothing evicted, when all that cannot make
        enough room.
        """
        missing = [digest for digest in members if digest not in self._by_digest]
        sizes = [size for digest in missing for size in members[digest].allocations]
        found = chain(
            (slot for digest, slot in self._by_digest.items() if digest not in members),
            (slot for digest, slot in self._by_digest.items() if digest in members),
        )
        idle = (slot for slot in found if slot.idle(now))
        victims: list[Slot] = []
        plan = self._arena.copy()
        while (offsets := plan.allocate_all(sizes)) is None:
            victim = next(idle, None)
            if victim is None:
                return None
            victims.append(victim)
            for offset in victim.offsets:
                plan.free(offset)
            if victim.adapter.digest in members:
                missing.append(victim.adapter.digest)
                sizes += members[victim.adapter.digest].allocations
        self._arena = plan
        for victim in victims:
            del self._by_digest[victim.adapter.digest]
            del self._by_generation[victim.adapter.generation]
        self.evictions += len(victims)
        ranges = iter(offsets)
        return {
            digest: self._add(
                digest, members[digest], tuple(islice(ranges, len(members[digest].allocations)))
            )
            for digest in missing
        }

    def pin(self, slot: Slot) -> None:
        slot.pins += 1
        slot.reserved_until = 0.0

    def unpin(self, adapter: ResidentAdapter) -> None:
        """ValueError when `adapter` is not pinned."""
        slot = self._by_generation.get(adapter.generation)
        if slot is None or not slot.pins:
            raise ValueError(f"adapter {adapter.digest} ({adapter.generation}) is not pinned")
        slot.pins -= 1
        if slot.pins:
            return
        if slot.forgotten:
            self.drop(slot)
        else:
            self._by_digest.move_to_end(adapter.digest)
            self.changes += 1

    def forget(self, digest: str) -> None:
        """Drop the slot now, or when its pins end or its load is dropped."""
        slot = self._by_digest.pop(digest, None)
        if slot is not None:
            slot.forgotten = True
            if slot.ready and not slot.pins:
                self.drop(slot)

    def drop(self, slot: Slot) -> None:
        """Free the pages of an unpinned slot."""
        for offset in slot.offsets:
            self._arena.free(offset)
        del self._by_generation[slot.adapter.generation]
        if not slot.forgotten:
            del self._by_digest[slot.adapter.digest]
        self.changes += 1

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not add up."""
        self._arena.check_integrity()
        assert sum(slot.elements for slot in self) == self._arena.used
        for digest, slot in self._by_digest.items():
            assert slot.adapter.digest == digest and not slot.forgotten
            assert self._by_generation[slot.adapter.generation] is slot
        for slot in self:
            assert slot.ready or not slot.pins, f"{slot.adapter.digest} is pinned but not ready"
            assert slot.forgotten != (self._by_digest.get(slot.adapter.digest) is slot)
            if slot.forgotten:
                assert slot.pins or not slot.ready, f"forgotten {slot.adapter.digest} lingers"

    def _add(self, digest: str, layout: Layout, offsets: tuple[int, ...]) -> Slot:
        pages = iter(offsets)
        targets = {
            t: PagedTarget(tuple(islice(pages, target.num_pages)), target.ranks, target.scales)
            for t, target in layout.targets.items()
        }
        adapter = ResidentAdapter(digest, next(self._generations), targets)
        slot = Slot(adapter, offsets, layout.elements)
        self._by_digest[digest] = self._by_generation[adapter.generation] = slot
        return slot
