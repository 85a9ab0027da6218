"""LoRA on the CPU with torch's own operators, a few calls per batch of equally shaped segments."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.manifest import PAGE_RANK
from base_engine.kernels.segments import Segment, SegmentBatch, TargetSegments


def add_lora_cpu(y: Tensor, x: Tensor, buffer: Tensor, target: TargetSegments, layer: int) -> None:
    """As `reference.add_lora_reference`; sums in float32 whatever the dtypes."""
    in_place = y.dtype == x.dtype == buffer.dtype == torch.float32
    for batch in target.batches(layer):
        if in_place and _few_products(batch):
            _add_by_page(y, x, buffer, target, layer, batch.segments[0])
        else:
            _add_batch(y, x, buffer, target, layer, batch)


def _few_products(batch: SegmentBatch) -> bool:
    """Whether multiplying page by page, in place, beats gathering the pages first (measured)."""
    if len(batch.segments) > 1:
        return False
    return batch.rank <= PAGE_RANK or (batch.rank <= 2 * PAGE_RANK and batch.rows <= 16)


def _add_by_page(
    y: Tensor, x: Tensor, buffer: Tensor, target: TargetSegments, layer: int, segment: Segment
) -> None:
    spec, rank, scale = target.spec, segment.pages.ranks[layer], segment.pages.scales[layer]
    x, y = x[segment.start : segment.end], y[segment.start : segment.end]
    for first, page in zip(range(0, rank, PAGE_RANK), segment.pages.pages, strict=False):
        ranks, inner, outer = min(rank - first, PAGE_RANK), spec.in_features, spec.out_features
        a = buffer.as_strided((inner, ranks), (1, inner), page + target.a_offset(layer))
        b = buffer.as_strided((ranks, outer), (outer, 1), page + target.b_offset(layer))
        y.addmm_(x.mm(a), b, alpha=scale)


def _add_batch(
    y: Tensor, x: Tensor, buffer: Tensor, target: TargetSegments, layer: int, batch: SegmentBatch
) -> None:
    spec, tokens = target.spec, batch.tokens
    shape = (len(batch.segments), batch.rows, -1)
    a = _gathered(buffer, batch, target.a_offset(layer), spec.in_features)
    b = _gathered(buffer, batch, target.b_offset(layer), spec.out_features)
    inner = torch.bmm(x[tokens].view(shape).float(), a.transpose(1, 2)).mul_(batch.scales)
    if isinstance(tokens, slice) and y.dtype == torch.float32:
        y[tokens].view(shape).baddbmm_(inner, b)
    elif isinstance(tokens, slice):
        y[tokens].view(shape).add_(torch.bmm(inner, b))
    else:
        delta = torch.bmm(inner, b).view(-1, spec.out_features)
        y[tokens] = (y[tokens] + delta).to(y.dtype)


def _gathered(buffer: Tensor, batch: SegmentBatch, offset: int, features: int) -> Tensor:
    """The rank rows at `offset` in each page of the batch: float32 [segments, rank, features].

    Copying scattered pages side by side costs less than one product per page and segment: the
    copy stays in the processor's cache, and a layer makes a few calls instead of dozens.
    """
    size = PAGE_RANK * features
    # Row i of this view is the page that starts at element i: rows overlap, and none is copied.
    pages = buffer.as_strided((buffer.numel() - offset - size + 1, size), (1, 1), offset)
    rows = pages.index_select(0, batch.pages).view(len(batch.segments), -1, features)
    return rows[:, : batch.rank].float()
