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

    `chunks` are in row order: sorted by adapters, so that each adapter is one segment. `runs` and
    `head_runs` tell which adapters the T tokens and the R logit rows have, `rows` and `head` are
    the segments made of them. `sampling` has the chunk of each logit row: most chunks have one
    or none, a request for logits one for each of its tokens.
    """

    chunks: list[Chunk]
    sampling: list[Chunk]
    input_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    runs: list[Run]
    head_runs: list[Run]
    rows: Segments
    head: Segments
    attention: StepAttention


def build_batch(
    chunks: Iterable[Chunk], base: BaseSpec, cache: KVCache, device: torch.device
) -> Batch:
    """Lay out `chunks` as one batch on `device`."""
    ordered = sorted(chunks, key=lambda chunk: (chunk.sequence.key, chunk.count))
    sampling: list[Chunk] = []
    ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    runs: list[Run] = []
    head_runs: list[Run] = []
    for chunk in ordered:
        end = chunk.start + chunk.count
        needed = chunk.logit_rows
        runs += _runs(chunk, range(chunk.count), len(ids))
        if needed:
            head_runs += _runs(chunk, needed, len(logit_rows))
            logit_rows += [len(ids) + row for row in needed]
            sampling += [chunk] * len(needed)
        ids += chunk.sequence.tokens[chunk.start : end]
        positions += range(chunk.start, end)
    return Batch(
        chunks=ordered,
        sampling=sampling,
        input_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        runs=runs,
        head_runs=head_runs,
        rows=Segments.build(runs, base, device),
        head=Segments.build(head_runs, base, device),
        attention=StepAttention(cache, ordered),
    )


def _runs(chunk: Chunk, tokens: range, first: int) -> list[Run]:
    """The runs of a chunk's `tokens` (counted from its first), laid out from row `first` on."""
    sequence, end = chunk.sequence, first + len(tokens)
    turn = first + max(0, sequence.activation - chunk.start - tokens.start)
    if turn == first:
        return [Run(first, end, sequence.parts)]
    if turn >= end:
        return [Run(first, end, ())]
    return [Run(first, turn, ()), Run(turn, end, sequence.parts)]
