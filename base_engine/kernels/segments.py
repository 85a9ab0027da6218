"""Which rows of a step use which adapter: built once per step, read by every adapted linear.

A step flattens all its tokens into rows. A segment is a range of adjacent rows with one adapter;
rows in no segment belong to the base and are never touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from adapters.manifest import PAGE_RANK, BaseSpec, TargetSpec
from adapters.pages import PagedTarget, ResidentAdapter

#: Most elements of A, or of B, in one batch of segments: they are gathered into scratch memory,
#: which should stay in the processor's cache.
BATCH_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Run:
    """Token rows [start, end) of the step's flattened batch, and their adapters with weights.

    No adapters means the base.
    """

    start: int
    end: int
    adapters: tuple[tuple[ResidentAdapter, float], ...]


class Segment(NamedTuple):
    """Token rows [start, end) that go through one adapter's pages for one target."""

    start: int
    end: int
    pages: PagedTarget


@dataclass(frozen=True)
class SegmentBatch:
    """Segments of equal shape, to be multiplied as one batch: `rows` token rows each, at one rank.

    `tokens` are the rows of all segments in order, a slice where they are adjacent, else int64
    [segments * rows]. `pages` is int64 [segments * ceil(rank / PAGE_RANK)]: element offsets into
    the buffer. `scales` is float32 [segments, 1, 1].
    """

    segments: tuple[Segment, ...]
    rows: int
    rank: int
    tokens: slice | Tensor
    pages: Tensor
    scales: Tensor


@dataclass(frozen=True)
class DeviceTables:
    """The same segments as tensors on the device, for kernels that look them up by number.

    S segments, L layers: `pages` int64 [S, most pages of a segment], padded with -1 ·
    `tiles` int32 [tiles, 3]: segment, first row, end of the segment; a tile is `tile_rows` rows ·
    `ranks` int32 [S, L] · `scales` float32 [S, L].
    """

    pages: Tensor
    tiles: Tensor
    ranks: Tensor
    scales: Tensor
    tile_rows: int


class TargetSegments:
    """Segments of a step that adapt one target, in row order; there is at least one.

    No two share a row.
    """

    def __init__(self, spec: TargetSpec, segments: list[Segment], device: torch.device) -> None:
        self.spec = spec
        self.segments = segments
        self.end = segments[-1].end
        self._device = device
        self._batches: dict[tuple[tuple[int, float], ...], list[SegmentBatch]] = {}

    def a_offset(self, layer: int) -> int:
        """Elements from the start of a page to the layer's A [PAGE_RANK, in_features]."""
        return layer * PAGE_RANK * self.spec.in_features

    def b_offset(self, layer: int) -> int:
        """Elements from the start of a page to the layer's Bᵀ [PAGE_RANK, out_features]."""
        spec = self.spec
        a_elements = len(spec.modules) * PAGE_RANK * spec.in_features
        return a_elements + layer * PAGE_RANK * spec.out_features

    def batches(self, layer: int) -> list[SegmentBatch]:
        """The layer's segments grouped by shape; those of rank 0 in this layer are left out."""
        # Ranks and scales seldom differ between layers, so most layers share one entry.
        key = tuple((s.pages.ranks[layer], s.pages.scales[layer]) for s in self.segments)
        found = self._batches.get(key)
        if found is None:
            found = self._batches[key] = _group(self, layer, self._device)
        return found

    @cached_property
    def tables(self) -> DeviceTables:
        """Built and copied to the device at first use in a step, in one transfer."""
        segments = self.segments
        longest = max(s.end - s.start for s in segments)
        tile_rows = 16 if longest <= 16 else 64
        width = max(len(s.pages.pages) for s in segments)
        pages = [s.pages.pages + (-1,) * (width - len(s.pages.pages)) for s in segments]
        tiles = [
            (number, row, segment.end)
            for number, segment in enumerate(segments)
            for row in range(segment.start, segment.end, tile_rows)
        ]
        # int64 goes first: views into the shared bytes must stay aligned.
        page_table, tile_map, ranks, scales = _to_device(
            [
                torch.tensor(pages, dtype=torch.int64),
                torch.tensor(tiles, dtype=torch.int32),
                torch.tensor([s.pages.ranks for s in segments], dtype=torch.int32),
                torch.tensor([s.pages.scales for s in segments], dtype=torch.float32),
            ],
            self._device,
        )
        return DeviceTables(page_table, tile_map, ranks, scales, tile_rows)


@dataclass(frozen=True)
class Segments:
    """All segments of a step; `targets` holds only the targets that some row adapts.

    A target has as many rounds, to be added one after the other, as one row has adapters for it.
    """

    targets: dict[int, tuple[TargetSegments, ...]]

    @classmethod
    def build(cls, runs: Iterable[Run], base: BaseSpec, device: torch.device | str) -> Segments:
        """Segments of a step's runs, given in any order. Empty runs are ignored.

        Raises ValueError if two runs share a row or a run ends before it starts.
        """
        device = torch.device(device)
        by_target: dict[int, list[list[Segment]]] = {}
        for run in _merged(runs):
            for adapter, weight in run.adapters:
                for index, pages in adapter.targets.items():
                    if weight != 1:
                        pages = _weighted(pages, weight)
                    _add(Segment(run.start, run.end, pages), by_target.setdefault(index, []))
        return cls(
            {
                index: tuple([TargetSegments(base.targets[index], r, device) for r in rounds])
                for index, rounds in by_target.items()
            }
        )


def _merged(runs: Iterable[Run]) -> list[Run]:
    """Non-empty runs in row order, adjacent ones of equal adapters and weights made one."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        if run.end < run.start or run.start < 0:
            raise ValueError(f"a run of rows [{run.start}, {run.end}) is not a range")
        if run.end == run.start:
            continue
        last = merged[-1] if merged else None
        if last is not None and run.start < last.end:
            raise ValueError(
                f"runs [{last.start}, {last.end}) and [{run.start}, {run.end}) share rows"
            )
        if last is not None and run.start == last.end and run.adapters == last.adapters:
            merged[-1] = Run(last.start, run.end, run.adapters)
        else:
            merged.append(run)
    return merged


def _weighted(pages: PagedTarget, weight: float) -> PagedTarget:
    return replace(pages, scales=tuple(scale * weight for scale in pages.scales))


def _add(segment: Segment, rounds: list[list[Segment]]) -> None:
    """Append `segment` to the first round that has none of its rows yet."""
    for segments in rounds:
        if segments[-1].end <= segment.start:
            segments.append(segment)
            return
    rounds.append([segment])


def _group(target: TargetSegments, layer: int, device: torch.device) -> list[SegmentBatch]:
    by_shape: dict[tuple[int, int], list[Segment]] = {}
    for segment in target.segments:
        if rank := segment.pages.ranks[layer]:
            by_shape.setdefault((segment.end - segment.start, rank), []).append(segment)
    batches: list[SegmentBatch] = []
    widest = max(target.spec.in_features, target.spec.out_features)
    for (_, rank), alike in by_shape.items():
        most = max(1, BATCH_ELEMENTS // (-(-rank // PAGE_RANK) * PAGE_RANK * widest))
        for i in range(0, len(alike), most):
            batches.append(_batch(alike[i : i + most], layer, device))
    return batches


def _batch(segments: list[Segment], layer: int, device: torch.device) -> SegmentBatch:
    first, rank = segments[0], segments[0].pages.ranks[layer]
    pages = [page for s in segments for page in s.pages.pages[: -(-rank // PAGE_RANK)]]
    scales = [s.pages.scales[layer] for s in segments]
    return SegmentBatch(
        segments=tuple(segments),
        rows=first.end - first.start,
        rank=rank,
        tokens=_tokens(segments, device),
        pages=torch.tensor(pages, dtype=torch.int64, device=device),
        scales=torch.tensor(scales, dtype=torch.float32, device=device).view(-1, 1, 1),
    )


def _tokens(segments: list[Segment], device: torch.device) -> slice | Tensor:
    first, last = segments[0], segments[-1]
    rows = sum(s.end - s.start for s in segments)
    if last.end - first.start == rows:
        return slice(first.start, last.end)
    return torch.tensor([r for s in segments for r in range(s.start, s.end)], device=device)


def _to_device(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of contiguous tensors, made in one transfer; widest dtype first."""
    sizes = [t.nbytes for t in tensors]
    packed = torch.cat([t.view(-1).view(torch.uint8) for t in tensors]).to(device)
    parts = torch.split(packed, sizes)
    return [p.view(t.dtype).view(t.shape) for p, t in zip(parts, tensors, strict=True)]
