"""Where a resident adapter's weights sit on the device.

The device pool is one flat buffer. A page holds PAGE_RANK rank rows of A and the matching rows of
Bᵀ for one target across all its layers, laid out as A [layers, PAGE_RANK, in_features] followed by
Bᵀ [layers, PAGE_RANK, out_features]; rows past a layer's rank are zero. An adapter takes
ceil(rank / PAGE_RANK) pages for each target it adapts and none for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from adapters.manifest import PAGE_RANK, TargetSpec
from adapters.terms import Term


def page_elements(target: TargetSpec) -> int:
    """Elements of one page of `target`."""
    return len(target.modules) * PAGE_RANK * (target.in_features + target.out_features)


@dataclass(frozen=True)
class PagedTarget:
    """One adapter's pages for one target.

    `pages` are element offsets into the pool's buffer, in rank order. `ranks` and `scales` have
    one entry per layer of the target; rank 0 means that layer is not adapted.
    """

    pages: tuple[int, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class ResidentAdapter:
    """A pinned adapter on the device; `targets` maps a target's index in the base to its pages.

    `generation` counts up with every load, so that a stale handle can be told from a live one.
    `terms` are by module path, in the order in which they apply; their tensors are views of the
    pool's buffer. `vocab_size` is its own number of token ids (0: the base's).
    """

    digest: str
    generation: int
    targets: Mapping[int, PagedTarget]
    terms: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)
    vocab_size: int = 0
