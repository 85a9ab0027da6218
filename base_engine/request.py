"""The data that crosses the engine's edge: requests in, token events out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from adapters.manifest import AdapterRef

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 and `min_p` 0.0 are off.

    `logprobs` is the number of alternatives reported per token (None: no logprobs at all).
    `seed` None draws from fresh entropy; the same seed gives the same tokens whatever else runs.
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


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to continue. `salt` separates tenants in the prefix cache."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    adapter: AdapterRef | None = None
    salt: str = ""


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
    """

    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    trace: Trace | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class StepRecord:
    """One forward pass: when, how long, and how many tokens of each adapter were in it.

    Keys of `tokens` are adapter digests; the base's key is "base".
    """

    number: int
    started: float
    seconds: float
    tokens: dict[str, int] = field(default_factory=dict)
    prefill_tokens: int = 0
    decode_tokens: int = 0
