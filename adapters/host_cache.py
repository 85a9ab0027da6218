"""Host copies of adapters under a byte budget, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from adapters.weights import AdapterWeights


@dataclass(eq=False)
class HostCopy:
    """One adapter's place in host memory. `weights` is None while it is being read.

    `holds` counts the readers and copies that use it now; a held copy is never dropped.
    """

    digest: str
    nbytes: int
    weights: AdapterWeights | None = None
    holds: int = 1
    forgotten: bool = False


class HostCache:
    """Digest -> HostCopy. Not thread-safe: the pool's lock guards it.

    `used` counts every byte from the moment it is reserved. It exceeds `budget` only while held
    copies alone do, so that an adapter larger than the budget can pass through.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._copies: OrderedDict[str, HostCopy] = OrderedDict()
        self._forgotten: set[HostCopy] = set()

    def get(self, digest: str) -> HostCopy | None:
        return self._copies.get(digest)

    def hold(self, digest: str) -> HostCopy | None:
        """The copy, marked as just used and kept until `release`."""
        copy = self._copies.get(digest)
        if copy is not None:
            self._copies.move_to_end(digest)
            copy.holds += 1
        return copy

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more may be read ahead of need: held copies take up to half the budget,
        so that the rest is left to reads that cannot wait."""
        held = sum(c.nbytes for c in self._copies.values() if c.holds)
        return held + sum(c.nbytes for c in self._forgotten) + nbytes <= self.budget // 2

    def reserve(self, digest: str, nbytes: int) -> HostCopy:
        """A held, empty copy to be read into, for which idle copies make room if they can."""
        assert digest not in self._copies
        self._trim(nbytes)
        copy = self._copies[digest] = HostCopy(digest, nbytes)
        self.used += nbytes
        return copy

    def release(self, copy: HostCopy) -> None:
        """End one hold. A copy that stayed empty or was forgotten goes with its last hold."""
        copy.holds -= 1
        if not copy.holds:
            if copy.forgotten:
                self._forgotten.remove(copy)
                self.used -= copy.nbytes
            elif copy.weights is None:
                self._drop(copy)
        self._trim(0)

    def forget(self, digest: str) -> None:
        """Drop the copy now, or with its last hold; a later `reserve` starts afresh."""
        copy = self._copies.get(digest)
        if copy is None:
            return
        self._drop(copy)
        if copy.holds:
            copy.forgotten = True
            self._forgotten.add(copy)
            self.used += copy.nbytes

    def check_integrity(self) -> None:
        """Raise AssertionError unless the byte count is right and only held copies exceed it."""
        everything = [*self._copies.values(), *self._forgotten]
        assert self.used == sum(c.nbytes for c in everything)
        assert self.used <= self.budget or all(c.holds for c in everything)
        for copy in everything:
            assert copy.holds or copy.weights is not None, f"{copy.digest} is empty and unheld"

    def _trim(self, incoming: int) -> None:
        for copy in list(self._copies.values()):
            if self.used + incoming <= self.budget:
                return
            if not copy.holds:
                self._drop(copy)

    def _drop(self, copy: HostCopy) -> None:
        del self._copies[copy.digest]
        self.used -= copy.nbytes
