"""From logits to tokens: every row by its own parameters, its own randomness, and nothing else.

A sampling row goes through the steps of transformers' `generate`, in its order: temperature,
then top-k, then top-p over what top-k left, then min-p relative to the most likely token. Each
step sets a lowest probability that is kept; tokens that tie with it are kept too, so that no
result hangs on the order in which a sort leaves equals.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from base_engine.request import SamplingParams, TokenLogprobs

#: Temperatures below this are greedy: dividing by them would leave one token anyway.
MIN_TEMPERATURE = 1e-5

#: Most likely tokens looked at first; what is kept nearly always lies within them.
HEAD = 256

#: Weights summed at once when a token is looked for in a whole row.
BLOCK = 256

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SampleRow:
    """How to choose one row's token. `random` belongs to one request alone.

    A sampling row takes one number from it per token, a greedy or failed row none.
    """

    params: SamplingParams
    random: random.Random


@dataclass(frozen=True)
class Sampled:
    """One row's result; with `error` set, `token_id` is -1 and no token was chosen.

    `logits` are the row itself, float32 [vocab] on the CPU, where they were asked for.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None
    logits: Tensor | None = None


class LogitsNotFinite(Exception):
    """A row of logits holds NaN or +inf, or -inf only: its adapter or the base overflowed."""


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose one token for each row of `logits`: float32 [rows, vocab], left unchanged.

    Log-probabilities are those of the logits as they are, before temperature and truncation.
    Ids whose logit is -inf (of another row's larger vocabulary) are neither chosen nor reported.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{len(rows)} rows of parameters for {logits.shape[0]} rows of logits")
    if not rows:
        return []
    best = logits.argmax(-1, keepdim=True)
    # NaN counts as the largest, so the best value is finite just where the row is usable.
    peaks = logits.gather(1, best)
    usable = peaks.isfinite().squeeze(1).tolist()
    tokens: list[int] = best.squeeze(1).tolist()
    drawing = [
        i for i, row in enumerate(rows) if usable[i] and row.params.temperature >= MIN_TEMPERATURE
    ]
    if drawing:
        chosen = _draw_rows(
            _select(logits, drawing), _select(peaks, drawing), [rows[i] for i in drawing]
        )
        for i, token in zip(drawing, chosen, strict=True):
            tokens[i] = token
    reported = [i for i, row in enumerate(rows) if usable[i] and row.params.logprobs is not None]
    logprobs = _logprobs(logits, rows, tokens, reported) if reported else {}
    return [
        Sampled(tokens[i], logprobs.get(i), logits=_copy(logits[i]) if row.params.logits else None)
        if usable[i]
        else Sampled(-1, error=_not_finite())
        for i, row in enumerate(rows)
    ]


def _not_finite() -> LogitsNotFinite:
    return LogitsNotFinite("the model's output is not a finite number; generation ends here")


def _copy(row: Tensor) -> Tensor:
    return row.to("cpu", copy=True)


def _select(logits: Tensor, indices: list[int]) -> Tensor:
    if len(indices) == logits.shape[0]:
        return logits
    return logits[torch.tensor(indices, device=logits.device)]


def _draw_rows(logits: Tensor, peaks: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    temperatures = torch.tensor(
        [[row.params.temperature] for row in rows], dtype=logits.dtype, device=logits.device
    )
    # Shifted before it is scaled, so that no small temperature overflows. Softmax over the last
    # dimension works row by row: the number of rows does not change a row's rounding.
    probs = (logits - peaks).div_(temperatures).softmax(-1)
    vocab = logits.shape[1]
    cut = [i for i, row in enumerate(rows) if _truncates(row.params, vocab)]
    heads: dict[int, tuple[_Floats, npt.NDArray[np.int64]]] = {}
    if cut:
        values, ids = _select(probs, cut).topk(min(HEAD, vocab), dim=-1)
        values, ids = values.double().cpu(), ids.cpu()
        heads = {i: (values[n].numpy(), ids[n].numpy()) for n, i in enumerate(cut)}
    tokens = []
    for i, row in enumerate(rows):
        u = row.random.random()
        if i not in heads:
            tokens.append(_draw(probs[i].cpu().numpy(), u))
            continue
        head, ids_ = heads[i]
        lowest = _lowest_kept(head, row.params, vocab)
        if lowest is None or (lowest <= head[-1] and len(head) < vocab):
            # Not all that is kept lies within the head.
            full = probs[i].cpu().numpy()
            if lowest is None:
                lowest = _lowest_kept(np.sort(full)[::-1].astype(np.float64), row.params, vocab)
            assert lowest is not None
            tokens.append(_draw(full * (full >= lowest), u))
        else:
            tokens.append(_draw_head(head, ids_, lowest, u))
    return tokens


def _truncates(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1.0 or params.min_p > 0.0


def _lowest_kept(probs: _Floats, params: SamplingParams, vocab: int) -> float | None:
    """The smallest probability that is kept; None where `probs` does not reach that far.

    `probs` are the largest probabilities of the row, or all of them, in descending order.
    """
    lowest, total = 0.0, 1.0
    if 0 < params.top_k < vocab:
        if params.top_k > len(probs):
            return None
        lowest = float(probs[params.top_k - 1])
        kept = probs[probs >= lowest]
        if len(kept) == len(probs) < vocab:
            return None
        total = float(kept.sum())
    if params.top_p < 1.0:
        covered = np.cumsum(probs)
        at = int(np.searchsorted(covered, params.top_p * total))
        if at == len(probs):
            if len(probs) < vocab:
                return None
            at -= 1
        lowest = max(lowest, float(probs[at]))
    return max(lowest, params.min_p * float(probs[0]))


def _draw_head(head: _Floats, ids: npt.NDArray[np.int64], lowest: float, u: float) -> int:
    count = int(np.count_nonzero(head >= lowest))
    # In id order, as over a whole row: equal probabilities have no order of their own.
    order = np.argsort(ids[:count])
    return int(ids[order[_draw(head[order], u)]])


def _draw(weights: npt.NDArray[np.floating], u: float) -> int:
    """The index at which the cumulative weight passes `u`, 0 <= u < 1, of the whole."""
    if len(weights) <= 2 * BLOCK:
        return _pick(weights, u)[0]
    # Sums of blocks first, then one block: ten times cheaper than one long running sum.
    sums = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK))
    block, u = _pick(sums, u)
    start = block * BLOCK
    return start + _pick(weights[start : start + BLOCK], u)[0]


def _pick(weights: npt.NDArray[np.floating], u: float) -> tuple[int, float]:
    """The index where `u` of the whole falls, and how far into that weight, from 0 to 1."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    target = u * cumulative[-1]
    index = int(np.searchsorted(cumulative, target, side="right"))
    # Rounding up to the whole must not reach a weight of 0 behind the last possible one.
    index = min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))
    before = cumulative[index] - weights[index]
    return index, float(np.clip((target - before) / weights[index], 0.0, 1.0))


def _logprobs(
    logits: Tensor, rows: Sequence[SampleRow], tokens: list[int], reported: list[int]
) -> dict[int, TokenLogprobs]:
    values = _select(logits, reported).log_softmax(-1)
    index = torch.tensor([[tokens[i]] for i in reported], device=logits.device)
    chosen: list[float] = values.gather(1, index).squeeze(1).tolist()
    return {
        i: TokenLogprobs(chosen[n], _top(values[n], rows[i].params.logprobs or 0))
        for n, i in enumerate(reported)
    }


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely tokens of one row; among equals the lower id comes first."""
    count = min(count, len(logprobs))
    if count == 0:
        return ()
    values, ids = logprobs.topk(count)
    last = values[-1]
    ahead = values > last
    ties = (logprobs == last).nonzero().squeeze(1)[: count - int(ahead.sum())]
    top = zip([*ids[ahead].tolist(), *ties.tolist()], values.tolist(), strict=True)
    return tuple(sorted((t for t in top if t[1] != -torch.inf), key=_likely_first))


def _likely_first(item: tuple[int, float]) -> tuple[float, int]:
    token, logprob = item
    return -logprob, token
