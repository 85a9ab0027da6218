"""Which elements of one flat buffer are taken. Plain bookkeeping: it never touches the buffer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Arena:
    """A first-fit allocator of ranges in `[0, capacity)`; neighbouring holes are merged on free.

    Holes are kept sorted by offset. Not thread-safe.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"arena capacity must be at least 1 element, not {capacity}")
        self.capacity = capacity
        self.used = 0
        self._taken: dict[int, int] = {}
        self._offsets = [0]
        self._sizes = [capacity]

    @property
    def largest_hole(self) -> int:
        return max(self._sizes, default=0)

    def copy(self) -> Arena:
        """An independent arena in the same state, to try a plan on."""
        twin = Arena(self.capacity)
        twin.used = self.used
        twin._taken = self._taken.copy()
        twin._offsets = self._offsets.copy()
        twin._sizes = self._sizes.copy()
        return twin

    def allocate(self, size: int) -> int | None:
        """Take the lowest hole of at least `size` elements; None when there is none."""
        if size < 1:
            raise ValueError(f"an allocation must be at least 1 element, not {size}")
        i = next((i for i, hole in enumerate(self._sizes) if hole >= size), None)
        if i is None:
            return None
        offset = self._offsets[i]
        if self._sizes[i] == size:
            del self._offsets[i], self._sizes[i]
        else:
            self._offsets[i] += size
            self._sizes[i] -= size
        self._taken[offset] = size
        self.used += size
        return offset

    def allocate_all(self, sizes: Sequence[int]) -> list[int] | None:
        """Take a range for each of `sizes`, or none at all and None."""
        if sum(sizes) > self.capacity - self.used:
            return None
        offsets: list[int] = []
        for size in sizes:
            offset = self.allocate(size)
            if offset is None:
                for taken in offsets:
                    self.free(taken)
                return None
            offsets.append(offset)
        return offsets

    def free(self, offset: int) -> None:
        """Give back what `allocate` returned; ValueError when nothing is allocated at `offset`."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise ValueError(f"nothing is allocated at offset {offset}")
        self.used -= size
        i = bisect_left(self._offsets, offset)
        if i < len(self._offsets) and offset + size == self._offsets[i]:
            size += self._sizes[i]
            del self._offsets[i], self._sizes[i]
        if i > 0 and self._offsets[i - 1] + self._sizes[i - 1] == offset:
            self._sizes[i - 1] += size
        else:
            self._offsets.insert(i, offset)
            self._sizes.insert(i, size)

    def check_integrity(self) -> None:
        """Raise AssertionError unless holes and allocations tile the buffer exactly once."""
        holes = list(zip(self._offsets, self._sizes, strict=True))
        end = 0
        for offset, size in sorted([*holes, *self._taken.items()]):
            assert offset == end and size > 0, f"gap or overlap at element {end} (next {offset})"
            end = offset + size
        assert end == self.capacity, f"{end} elements accounted for, not {self.capacity}"
        assert self.used == sum(self._taken.values())
        for (offset, size), (following, _) in zip(holes, holes[1:], strict=False):
            assert offset + size < following, f"holes at {offset} and {following} not merged"
