"""A request while it is inside the engine."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass

from adapters.pages import ResidentAdapter
from base_engine.request import GenerateRequest, Trace


class Sequence:
    """Tokens so far, and what the sequence holds on the device.

    `tokens` starts as the prompt and grows by what is generated, to at most `max_length`. The
    first `num_computed` of them have their keys and values in `blocks`. The first `num_recorded`
    blocks are in the prefix cache, ending in chain node `node`. Only the scheduler changes these.
    """

    def __init__(self, request: GenerateRequest, arrival: int, max_length: int) -> None:
        self.request = request
        self.arrival = arrival
        self.tokens = list(request.prompt_ids)
        self.max_length = min(max_length, len(self.tokens) + request.sampling.max_tokens)
        self.num_computed = 0
        self.num_recorded = 0
        self.blocks: list[int] = []
        self.resident: ResidentAdapter | None = None
        self.node: Hashable = self.root
        self.passed = 0
        seed = request.sampling.seed
        # Python's generator takes the absolute value: -1 would draw what 1 draws.
        self.random = random.Random(None if seed is None else seed % 2**64)
        self.steps = 0
        self.mixed_steps = 0
        self.max_adapters = 0
        self.preemptions = 0
        self.cached_tokens = 0

    @property
    def digest(self) -> str | None:
        return self.request.adapter.digest if self.request.adapter else None

    @property
    def root(self) -> Hashable:
        """What the keys and values depend on besides the tokens."""
        return ("salt", self.request.salt, "adapter", self.digest)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def trace(self) -> Trace:
        return Trace(
            steps=self.steps,
            mixed_steps=self.mixed_steps,
            max_adapters=self.max_adapters,
            preemptions=self.preemptions,
            cached_tokens=self.cached_tokens,
        )


@dataclass(frozen=True, eq=False)
class Chunk:
    """A sequence's share of one step: its tokens [start, start + count).

    `samples` is true when the chunk reaches the last token, so that a new one can be drawn.
    """

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)
