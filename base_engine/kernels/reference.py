"""The specification: what every other kernel must compute, written to be read."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.manifest import PAGE_RANK
from base_engine.kernels.segments import TargetSegments


def add_lora_reference(
    y: Tensor, x: Tensor, buffer: Tensor, target: TargetSegments, layer: int
) -> None:
    """Semantics: y[t] += scale_a · (x[t] · A_aᵀ) · B_aᵀ for every row t of a segment of adapter a.

    y [T, out_features] and x [T, in_features], rows contiguous; `buffer` is the flat pool that
    the page offsets count in; `layer` is the layer's index within the target. All sums are in
    float32, and y is rounded to its dtype once. Rows outside every segment are left as they are.
    """
    spec = target.spec
    for segment in target.segments:
        rank, scale = segment.pages.ranks[layer], segment.pages.scales[layer]
        rows = slice(segment.start, segment.end)
        delta = torch.zeros_like(y[rows], dtype=torch.float32)
        for r in range(rank):
            page, row = segment.pages.pages[r // PAGE_RANK], r % PAGE_RANK
            a_start = page + target.a_offset(layer) + row * spec.in_features
            b_start = page + target.b_offset(layer) + row * spec.out_features
            a = buffer[a_start : a_start + spec.in_features].float()
            b = buffer[b_start : b_start + spec.out_features].float()
            delta += torch.outer(x[rows].float() @ a, b)
        if rank:
            y[rows] = (y[rows].float() + scale * delta).to(y.dtype)
