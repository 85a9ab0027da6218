"""Whether an adapter does anything: prompts that show it, and how far it changes the logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from adapters.manifest import AdapterManifest, BaseSpec
from base_engine.sampler import LogitsNotFinite

#: Lengths of the prompts that every adapter gets.
LENGTHS = (8, 16, 24)

#: Most ids of one kind (changed rows, own ids) that are tried, spread over all of them.
MOST_IDS = 48

#: Part of the largest logit by which one may change through float32 rounding alone.
ROUNDING = 16 * torch.finfo(torch.float32).eps


class SmokePrompts(NamedTuple):
    """Token ids; `own` prompts have ids that only the adapter has, so the base cannot run them."""

    shared: list[tuple[int, ...]]
    own: list[tuple[int, ...]]


def smoke_prompts(base: BaseSpec, manifest: AdapterManifest, room: int) -> SmokePrompts:
    """Fixed prompts, cut to `room` tokens, with all that an adapter of this kind reacts to.

    Ids are spread over the vocabulary. Rows of single tokens that it changes, ids that it adds
    and its invocation tokens come in too.
    """
    vocab = base.vocab_size
    everywhere = _spread(sum(LENGTHS), range(vocab))
    texts = [everywhere[sum(LENGTHS[:i]) :][:length] for i, length in enumerate(LENGTHS)]
    changed = sorted({index for rows in manifest.token_rows for index in rows.indices})
    changed = [index for index in changed if index < vocab]
    added = range(vocab, manifest.vocab_size)
    texts += [texts[0] + _spread(MOST_IDS, ids) for ids in (changed, added) if ids]
    invocation = manifest.invocation
    prompts = SmokePrompts([], [])
    for text in filter(None, texts):
        text = text[: max(0, room - len(invocation))]
        half = len(text) // 2
        prompt = (*text[:half], *invocation, *text[half:])
        (prompts.shared if max(prompt) < vocab else prompts.own).append(prompt)
    return prompts


def largest_change(
    base: BaseSpec, manifest: AdapterManifest, before: Seq[Tensor], after: Seq[Tensor]
) -> float:
    """The largest change of a logit; 0.0 for what rounding alone may do.

    `before` are the base's logits of the shared prompts, `after` the adapter's of these and its
    own, [tokens, vocab] each, which may be wider than the vocabulary. Where the base's ids show no
    change, the adapter's own ids count by their logits. Raises LogitsNotFinite.
    """
    vocab = base.vocab_size
    after = [logits[:, : manifest.vocab_size or vocab] for logits in after]
    if not all(logits.isfinite().all() for logits in after):
        raise LogitsNotFinite("the adapter's output is not finite on a test prompt")
    changes = [0.0]
    for old, new in zip(before, after, strict=False):
        change = (new[:, :vocab] - old[:, :vocab]).abs().max().item()
        if change > ROUNDING * old[:, :vocab].abs().max().item():
            changes.append(change)
    if len(changes) == 1 and manifest.vocab_size > vocab:
        changes += [logits[:, vocab:].abs().max().item() for logits in after]
    return max(changes)


def _spread(count: int, ids: Seq[int]) -> tuple[int, ...]:
    """At most `count` different ids, evenly from all of `ids`, neighbours far apart."""
    count = min(count, len(ids))
    # Multiples of the golden ratio fill the unit interval evenly, in every number.
    picks = dict.fromkeys(int(k * 0.6180339887498949 % 1 * len(ids)) for k in range(1, count + 1))
    return tuple(ids[pick] for pick in picks)
