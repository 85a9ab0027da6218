"""The data that crosses the engine's edge: requests in, token events out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from adapters.manifest import WeightedAdapter

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 and `min_p` 0.0 are off.

    `logprobs` is the number of alternatives reported per token (None: no logprobs at all).
    `seed` None draws from fresh entropy; the same seed gives the same tokens whatever else runs.
    `logits`: no token is drawn; the logits after every token of the prompt come back instead.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logits: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to continue. `salt` separates tenants in the prefix cache.

    The effects of all `adapters` add up, each times its weight; none is the base. Raises
    ValueError for what cannot be added up: an adapter that comes twice, a weight that is not a
    finite number, and, unless it is alone with weight 1, one that is more than LoRA on linears.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    adapters: tuple[WeightedAdapter, ...] = ()
    salt: str = ""

    def __post_init__(self) -> None:
        seen = set()
        for ref, weight in ((adapter.ref, adapter.weight) for adapter in self.adapters):
            if ref.digest in seen:
                raise ValueError(f"adapter {ref.name!r} comes twice in one request")
            seen.add(ref.digest)
            if not math.isfinite(weight):
                raise ValueError(f"adapter {ref.name!r}: the weight {weight} is not finite")
            if not ref.manifest.plain and (len(self.adapters) > 1 or weight != 1):
                raise ValueError(
                    f"adapter {ref.name!r} is more than LoRA on linear layers; it can only be "
                    "used alone and with weight 1"
                )


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of the unmodified distribution, most likely alternatives first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Trace:
    """How a finished request ran. `mixed_steps` held at least one other adapter (or the base)."""

    steps: int
    mixed_steps: int
    max_adapters: int
    preemptions: int
    cached_tokens: int


@dataclass(frozen=True)
class TokenEvent:
    """One generated token, or the end, or both.

    Every request ends in exactly one event with `finish_reason` set; it carries `trace`, and
    `error` when the reason is "error". `token_id` is None where the end brings no token.
    `logits`, float32 [prompt tokens, vocab] on the CPU, come with the end of a request for them.
    """

    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    trace: Trace | None = None
    error: Exception | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class StepRecord:
    """One forward pass: when, how long, and how many tokens of each adapter were in it.

    Keys of `tokens` are adapter digests, several of one request joined by "+"; the base's key is
    "base".
    """

    number: int
    started: float
    seconds: float
    tokens: dict[str, int] = field(default_factory=dict)
    prefill_tokens: int = 0
    decode_tokens: int = 0
