"""KV memory as blocks of `block_size` tokens, with reuse of equal prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class CachedPrefix(NamedTuple):
    """Blocks that already hold a prompt's first tokens, and the chain node they end in."""

    blocks: list[int]
    node: Hashable


class Branch(NamedTuple):
    """From block `first` on, the keys and values of a sequence depend on `label` too."""

    first: int
    label: Hashable


class BlockPool:
    """Hands out KV blocks, counts their users and finds blocks that hold a known prefix.

    A cached block is known by its parent node and its own tokens. The root node is a tuple of all
    else that the KV values depend on (tenant salt, adapters); deeper nodes are numbers that are
    never reused, so a match is exact: nothing is hashed down to a digest that could collide.
    Blocks below the root None are neither found nor kept.
    A block without users keeps its content until it is needed, least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token, got {num_blocks}×{block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._users = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[tuple[Hashable, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[Hashable, tuple[int, ...]]] = {}
        self._node_of: dict[int, int] = {}
        self._next_node = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def match(
        self, root: Hashable, tokens: Sequence[int], branch: Branch | None = None
    ) -> CachedPrefix:
        """The longest cached prefix of `tokens`, whole blocks only, not yet taken.

        At least the last token is left out, because its logits still have to be computed.
        """
        found = CachedPrefix([], root)
        if not self.prefix_cache or root is None:
            return found
        size = self.block_size
        for index in range((len(tokens) - 1) // size):
            node = _parent(found.node, index, branch)
            block = self._block_of.get((node, tuple(tokens[index * size : (index + 1) * size])))
            if block is None:
                break
            found = CachedPrefix([*found.blocks, block], self._node_of[block])
        return found

    def has_room(self, count: int, prefix: Sequence[int] = ()) -> bool:
        """Whether `allocate` would succeed."""
        idle = sum(1 for block in prefix if not self._users[block])
        return count + idle <= len(self._free)

    def allocate(self, count: int, prefix: Sequence[int] = ()) -> list[int] | None:
        """Take `prefix` (cached blocks) and `count` fresh blocks; None if there is no room."""
        if not self.has_room(count, prefix):
            return None
        for block in prefix:
            self._free.pop(block, None)
            self._users[block] += 1
        fresh = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            fresh.append(block)
        return fresh

    def record(
        self,
        node: Hashable,
        index: int,
        block: int,
        tokens: tuple[int, ...],
        branch: Branch | None = None,
    ) -> Hashable:
        """Make a full, computed `block`, the sequence's block `index`, findable below `node`.

        Returns the node it ends in.
        """
        if not self.prefix_cache or node is None:
            return node
        key = (_parent(node, index, branch), tokens)
        twin = self._block_of.get(key)
        if twin is not None:
            return self._node_of[twin]
        self._block_of[key] = block
        self._key_of[block] = key
        self._next_node += 1
        self._node_of[block] = self._next_node
        return self._next_node

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one use of each of a sequence's blocks (in sequence order)."""
        # Last block first: a prefix is only reachable through its parents, so leaves go first.
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] < 0:
                raise RuntimeError(f"block {block} released more often than taken")
            if self._users[block] == 0:
                self._free[block] = None
                if block not in self._key_of:
                    self._free.move_to_end(block, last=False)

    def check_integrity(self) -> None:
        """Raise RuntimeError if a count, the free list or the prefix index is inconsistent."""
        idle = {block for block, users in enumerate(self._users) if users == 0}
        if idle != set(self._free):
            raise RuntimeError(f"idle blocks {sorted(idle)} but free list {sorted(self._free)}")
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            raise RuntimeError("prefix index and block keys disagree")
        if self._node_of.keys() != self._key_of.keys():
            raise RuntimeError("a cached block lacks its node")

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            del self._node_of[block]


def _parent(node: Hashable, index: int, branch: Branch | None) -> Hashable:
    if branch is not None and branch.first == index:
        return (node, branch.label)
    return node
