"""LoRA on CUDA: segmented gather matrix-vector products over paged ranks, written in Triton.

Two kernels, each over tiles of rows of one segment. `_shrink` multiplies x by the A rows, split
along in_features so that a few decode rows still fill the device; each split writes its own
partial sums, and `_expand` adds them in a fixed order, multiplies by Bᵀ and adds to y. There are
no atomics and the split depends on in_features alone, so a row's result depends neither on chance
nor on the other rows of the batch. Rank rows are found through the page table and stop at the
segment's true rank in this layer.

Operands are widened to float32 before they are multiplied: 16-bit numbers fit tf32 exactly, so the
tensor cores still do the work, and at these ranks memory is the bound, not arithmetic.
"""

# Triton ships no types, and its kernels' parameters have none in Python's sense.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from adapters.manifest import PAGE_RANK
from base_engine.kernels.segments import TargetSegments

#: Rank rows per block (two pages: the narrowest that tensor cores take), in_features per split
#: of the shrink and per turn of its loop, out_features per block of the expand.
BLOCK_RANK = 16
SPLIT_IN = 512
BLOCK_IN = 64
BLOCK_OUT = 64


@triton.jit(do_not_specialize=["rows", "page_stride", "layer"])
def _shrink(
    partial,  # float32 [splits, rows, rank_width]
    x,  # [rows, in_features]
    buffer,
    pages,
    tiles,
    ranks,
    rows,
    rank_width,
    x_stride,
    page_stride,
    layer,
    layers: tl.constexpr,
    in_features: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    segment = tl.load(tiles + tile * 3)
    end = tl.load(tiles + tile * 3 + 2)
    rank = tl.load(ranks + segment * layers + layer)
    first_rank = tl.program_id(1) * BLOCK_R
    if first_rank >= rank:
        return
    split = tl.program_id(2)

    row = (tl.load(tiles + tile * 3 + 1) + tl.arange(0, BLOCK_M)).to(tl.int64)  # [M]
    r = first_rank + tl.arange(0, BLOCK_R)  # [R]
    k = split * SPLIT + tl.arange(0, BLOCK_K)  # [K]
    split_end = tl.minimum(split * SPLIT + SPLIT, in_features)
    has_row = (row < end)[:, None]
    has_rank = r < rank
    page = tl.load(pages + segment * page_stride + r // PAGE, mask=has_rank, other=0)  # [R] int64
    a_start = page + (layer * PAGE + r % PAGE).to(tl.int64) * in_features

    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for _ in range(0, SPLIT, BLOCK_K):
        has_k = k < split_end
        x_tile = tl.load(
            x + row[:, None] * x_stride + k[None, :], mask=has_row & has_k[None, :], other=0.0
        )  # [M, K]
        a_tile = tl.load(
            buffer + a_start[None, :] + k[:, None],
            mask=has_rank[None, :] & has_k[:, None],
            other=0.0,
        )  # [K, R]
        total = tl.dot(
            x_tile.to(tl.float32), a_tile.to(tl.float32), total, input_precision=PRECISION
        )
        k += BLOCK_K
    out = partial + (split.to(tl.int64) * rows + row[:, None]) * rank_width + r[None, :]
    tl.store(out, total, mask=has_row & has_rank[None, :])


@triton.jit(do_not_specialize=["rows", "page_stride", "layer"])
def _expand(
    y,  # [rows, out_features]
    partial,  # float32 [splits, rows, rank_width]
    buffer,
    pages,
    tiles,
    ranks,
    scales,
    rows,
    rank_width,
    y_stride,
    page_stride,
    layer,
    layers: tl.constexpr,
    in_features: tl.constexpr,
    out_features: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    segment = tl.load(tiles + tile * 3)
    end = tl.load(tiles + tile * 3 + 2)
    rank = tl.load(ranks + segment * layers + layer)
    if rank == 0:
        return
    scale = tl.load(scales + segment * layers + layer)

    row = (tl.load(tiles + tile * 3 + 1) + tl.arange(0, BLOCK_M)).to(tl.int64)  # [M]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    has_row = (row < end)[:, None]
    has_n = (n < out_features)[None, :]

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first_rank in range(0, rank, BLOCK_R):
        r = first_rank + tl.arange(0, BLOCK_R)  # [R]
        has_rank = r < rank
        inner = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for split in range(SPLITS):
            part = partial + (split * rows.to(tl.int64) + row[:, None]) * rank_width + r[None, :]
            inner += tl.load(part, mask=has_row & has_rank[None, :], other=0.0)
        page = tl.load(pages + segment * page_stride + r // PAGE, mask=has_rank, other=0)
        b_start = page + layers * PAGE * in_features
        b_start += (layer * PAGE + r % PAGE).to(tl.int64) * out_features
        b_tile = tl.load(
            buffer + b_start[:, None] + n[None, :], mask=has_rank[:, None] & has_n, other=0.0
        )  # [R, N]
        total = tl.dot(inner, b_tile.to(tl.float32), total, input_precision=PRECISION)
    place = y + row[:, None] * y_stride + n[None, :]
    old = tl.load(place, mask=has_row & has_n, other=0.0).to(tl.float32)
    tl.store(place, (old + scale * total).to(y.dtype.element_ty), mask=has_row & has_n)


def add_lora_triton(
    y: Tensor, x: Tensor, buffer: Tensor, target: TargetSegments, layer: int
) -> None:
    """As `reference.add_lora_reference`; sums in float32 whatever the dtypes."""
    spec, tables = target.spec, target.tables
    rows, most_pages = len(x), tables.pages.shape[1]
    precision = "ieee" if torch.float32 in (x.dtype, buffer.dtype) else "tf32"
    splits = triton.cdiv(spec.in_features, SPLIT_IN)
    rank_blocks = triton.cdiv(most_pages * PAGE_RANK, BLOCK_RANK)
    rank_width = rank_blocks * BLOCK_RANK
    partial = torch.empty((splits, rows, rank_width), dtype=torch.float32, device=x.device)
    tiles = len(tables.tiles)
    _shrink[(tiles, rank_blocks, splits)](
        partial,
        x,
        buffer,
        tables.pages,
        tables.tiles,
        tables.ranks,
        rows,
        rank_width,
        x.stride(0),
        most_pages,
        layer,
        layers=len(spec.modules),
        in_features=spec.in_features,
        PAGE=PAGE_RANK,
        PRECISION=precision,
        SPLIT=SPLIT_IN,
        BLOCK_M=tables.tile_rows,
        BLOCK_R=BLOCK_RANK,
        BLOCK_K=BLOCK_IN,
        enable_fp_fusion=True,
    )
    _expand[(tiles, triton.cdiv(spec.out_features, BLOCK_OUT))](
        y,
        partial,
        buffer,
        tables.pages,
        tables.tiles,
        tables.ranks,
        tables.scales,
        rows,
        rank_width,
        y.stride(0),
        most_pages,
        layer,
        layers=len(spec.modules),
        in_features=spec.in_features,
        out_features=spec.out_features,
        PAGE=PAGE_RANK,
        PRECISION=precision,
        SPLITS=splits,
        BLOCK_M=tables.tile_rows,
        BLOCK_R=BLOCK_RANK,
        BLOCK_N=BLOCK_OUT,
        enable_fp_fusion=True,
    )
