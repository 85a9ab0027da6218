"""One step's tensors, built once and read by every layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from adapters.manifest import BaseSpec
from base_engine.attention import KVCache, StepAttention
from base_engine.kernels.segments import Run, Segments
from base_engine.sequence import Chunk


class Batch(NamedTuple):
    """A flattened ragged batch of T tokens, of which R need logits.

    `chunks` are in row order: sorted by adapter, so that each adapter is one segment. `rows` and
    `head` are the adapter segments over the T tokens and over the R logit rows. `sampling` are
    the chunks whose logits were asked for, in order.
    """

    chunks: list[Chunk]
    sampling: list[Chunk]
    input_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    rows: Segments
    head: Segments
    attention: StepAttention


def build_batch(
    chunks: Iterable[Chunk], base: BaseSpec, cache: KVCache, device: torch.device
) -> Batch:
    """Lay out `chunks` as one batch on `device`."""
    ordered = sorted(chunks, key=lambda chunk: (chunk.sequence.digest or "", chunk.count))
    sampling = [chunk for chunk in ordered if chunk.samples]
    ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    runs: list[Run] = []
    for chunk in ordered:
        end = chunk.start + chunk.count
        runs.append(Run(len(ids), len(ids) + chunk.count, chunk.sequence.resident))
        ids += chunk.sequence.tokens[chunk.start : end]
        positions += range(chunk.start, end)
        if chunk.samples:
            logit_rows.append(len(ids) - 1)
    head_runs = [Run(row, row + 1, chunk.sequence.resident) for row, chunk in enumerate(sampling)]
    return Batch(
        chunks=ordered,
        sampling=sampling,
        input_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        rows=Segments.build(runs, base, device),
        head=Segments.build(head_runs, base, device),
        attention=StepAttention(cache, ordered),
    )
