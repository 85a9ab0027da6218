"""A request while it is inside the engine."""

from __future__ import annotations

import random
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from adapters.pages import ResidentAdapter
from base_engine.blocks import Branch
from base_engine.errors import NotInvoked
from base_engine.request import GenerateRequest, Trace


class Sequence:
    """Tokens so far, and what the sequence holds on the device.

    `tokens` starts as the prompt and grows by what is generated, to at most `max_length`. The
    first `num_computed` of them have their keys and values in `blocks`. The first `num_recorded`
    blocks are in the prefix cache, ending in chain node `node`. Only the scheduler changes these.

    `refs` and `weights` are the request's adapters by digest, so that their order makes no
    difference; `key` tells both. They apply from token `activation` on (0: everywhere). `parts`
    are they on the device, with their weights. `label` names them in step records. `logits` are
    those so far of a request for logits, one entry per token.

    Raises NotInvoked if an adapter's invocation tokens are not in the prompt.
    """

    def __init__(self, request: GenerateRequest, arrival: int, max_length: int) -> None:
        self.request = request
        ordered = sorted(request.adapters, key=attrgetter("ref.digest"))
        self.refs = tuple(adapter.ref for adapter in ordered)
        self.weights = tuple(float(adapter.weight) for adapter in ordered)
        self.key = tuple((a.ref.digest, float(a.weight)) for a in ordered)
        self.label = "+".join(ref.digest for ref in self.refs) or "base"
        self.activation = _activation(request)
        self.arrival = arrival
        self.tokens = list(request.prompt_ids)
        self.max_length = min(max_length, len(self.tokens) + request.sampling.max_tokens)
        self.num_computed = 0
        self.num_recorded = 0
        self.blocks: list[int] = []
        self.parts: tuple[tuple[ResidentAdapter, float], ...] = ()
        self.logits: list[Tensor] = []
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
    def root(self) -> Hashable:
        """What the keys and values depend on besides the tokens, from the first token on.

        None where the cache must not be used, for it would leave out what is asked for.
        """
        if self.request.sampling.logits:
            return None
        return ("salt", self.request.salt, "adapters", () if self.activation else self.key)

    def branch(self, block_size: int) -> Branch | None:
        """Where the keys and values begin to depend on the adapter, if not from the start."""
        if not self.activation:
            return None
        label = ("adapters", self.key, "from", self.activation)
        return Branch(self.activation // block_size, label)

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

    @property
    def logit_rows(self) -> range:
        """The tokens, counted from the chunk's first, after which logits are needed."""
        if self.sequence.request.sampling.logits:
            return range(self.count)
        return range(self.count - self.samples, self.count)


def _activation(request: GenerateRequest) -> int:
    # Only a request for one adapter alone can have one with an invocation.
    for adapter in request.adapters:
        invocation = adapter.ref.manifest.invocation
        if invocation:
            start = _last_start(request.prompt_ids, invocation)
            if start is None:
                raise NotInvoked(
                    f"adapter {adapter.ref.name!r} applies from its invocation tokens "
                    f"{list(invocation)} on; the prompt must contain them in this order"
                )
            return start
    return 0


def _last_start(tokens: Seq[int], wanted: Seq[int]) -> int | None:
    length = len(wanted)
    for start in range(len(tokens) - length, -1, -1):
        if tokens[start] == wanted[0] and tokens[start : start + length] == wanted:
            return start
    return None
