"""Which tokens go into the next step: admission, chunked prefill, preemption, the end."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from itertools import islice
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from adapters.errors import AdapterUnavailable
from adapters.pool import AdapterPool
from base_engine.blocks import BlockPool, CachedPrefix
from base_engine.config import EngineConfig
from base_engine.request import FinishReason, TokenEvent
from base_engine.sampler import Sampled
from base_engine.sequence import Chunk, Sequence


class Ended(NamedTuple):
    """A sequence that ended without a token, and why."""

    sequence: Sequence
    error: Exception


class Plan(NamedTuple):
    """One scheduling decision: the step's chunks, and the sequences that could not go on."""

    chunks: list[Chunk]
    ended: list[Ended]


class Scheduler:
    """Decides, before each forward pass, who is in it.

    Running sequences come first: one token for each that decodes, then prefill chunks, within
    `step_tokens`. Waiting ones are admitted in order of arrival when their adapters are resident
    and KV blocks for all their tokens are free; one that cannot be admitted does not hold back
    those behind it, except that one waiting for room (KV blocks or adapter pages) is passed at
    most `patience` times: then nothing is admitted past it until it runs, so the running ones
    drain and it is never starved. Waiting for an adapter that is still being read from disk does
    not count, for no amount of holding back makes the disk faster. When KV blocks run out, the
    sequence that arrived last goes back to waiting and is computed again later.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockPool,
        adapters: AdapterPool,
        eos_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.adapters = adapters
        self.eos_ids = eos_ids
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._by_id: dict[str, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence; its adapters begin to load at once."""
        self._by_id[sequence.request.request_id] = sequence
        insort(self.waiting, sequence, key=_arrival)
        for ref in sequence.refs:
            self.adapters.prefetch(ref)

    def abort(self, request_id: str) -> Sequence | None:
        """Drop a sequence wherever it is; None if it has already ended."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._remove(sequence)
        return sequence

    def abort_all(self) -> list[Sequence]:
        """Drop every sequence; returns them."""
        sequences = list(self._by_id.values())
        for sequence in sequences:
            self._remove(sequence)
        return sequences

    def schedule(self) -> Plan:
        """Choose the next step's chunks. Empty chunks: nothing can run now."""
        chunks: list[Chunk] = []
        budget = self.config.step_tokens
        # Decodes first, so that a long prompt costs others at most one chunk.
        for sequence in sorted(self.running, key=_is_prefilling):
            if sequence not in self.running:
                continue  # preempted a moment ago
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            if count and self._grow(sequence):
                chunks.append(Chunk(sequence, sequence.num_computed, count))
                budget -= count
        chunks = [chunk for chunk in chunks if chunk.sequence in self.running]
        ended = self._admit(chunks, budget)
        return Plan(chunks, ended)

    def update(
        self, chunks: Seq[Chunk], sampled: Seq[Sampled]
    ) -> list[tuple[Sequence, TokenEvent]]:
        """Take in a step's results; `sampled` has an entry for each of the chunks' logit rows.

        Returns the events to send, in order.
        """
        num_adapters = len({chunk.sequence.key for chunk in chunks})
        draws = iter(sampled)
        events = []
        for chunk in chunks:
            sequence = chunk.sequence
            samples = chunk.samples
            drawn = list(islice(draws, len(chunk.logit_rows)))
            sequence.num_computed += chunk.count
            sequence.steps += 1
            sequence.mixed_steps += num_adapters > 1
            sequence.max_adapters = max(sequence.max_adapters, num_adapters)
            self._record(sequence)
            if drawn:
                event = self._take(sequence, drawn, samples)
                if event is None:
                    continue
                if event.finish_reason:
                    self._remove(sequence)
                events.append((sequence, event))
        return events

    def check_integrity(self) -> None:
        """Raise RuntimeError unless exactly the running sequences hold blocks and adapters."""
        self.blocks.check_integrity()
        if len(self._by_id) != len(self.waiting) + len(self.running):
            raise RuntimeError("a sequence is neither waiting nor running")
        for sequence in self.waiting:
            if sequence.blocks or sequence.parts:
                raise RuntimeError(f"waiting {sequence.request.request_id} holds device memory")
        held = {block for sequence in self.running for block in sequence.blocks}
        if len(held) != self.blocks.num_used:
            raise RuntimeError(f"{len(held)} blocks held, {self.blocks.num_used} in use")

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure `sequence` has blocks for all its tokens, preempting the latest if need be."""
        missing = self.blocks.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        if missing <= 0:
            return True
        while (fresh := self.blocks.allocate(missing)) is None:
            victim = max(self.running, key=_arrival)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += fresh
        return True

    def _admit(self, chunks: list[Chunk], budget: int) -> list[Ended]:
        ended = []
        blocked: list[Sequence] = []
        for sequence in list(self.waiting):
            # Even a prompt that is all cached needs one fresh block.
            room = budget and self.blocks.num_free and len(self.running) < self.config.max_running
            if not room or any(earlier.passed >= self.config.patience for earlier in blocked):
                break
            # Blocks first: an adapter loaded for a request that cannot run would only evict others.
            branch = sequence.branch(self.blocks.block_size)
            prefix = self.blocks.match(sequence.root, sequence.tokens, branch)
            missing = self.blocks.blocks_for(len(sequence.tokens)) - len(prefix.blocks)
            if not self.blocks.has_room(missing, prefix.blocks):
                blocked.append(sequence)
                continue
            if sequence.refs:
                try:
                    residents = self.adapters.acquire(sequence.refs)
                except AdapterUnavailable as error:
                    self._remove(sequence)
                    ended.append(Ended(sequence, error))
                    continue
                if residents is None:
                    if any(self.adapters.state(r.digest) == "waiting" for r in sequence.refs):
                        blocked.append(sequence)
                    continue
                sequence.parts = tuple(zip(residents, sequence.weights, strict=True))
            self._place(sequence, prefix, missing)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            for earlier in blocked:
                earlier.passed += 1
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            chunks.append(Chunk(sequence, sequence.num_computed, count))
            budget -= count
        return ended

    def _place(self, sequence: Sequence, prefix: CachedPrefix, missing: int) -> None:
        """Give `sequence` the cached blocks of `prefix` and `missing` fresh ones."""
        fresh = self.blocks.allocate(missing, prefix.blocks)
        assert fresh is not None, "has_room was asked before"
        sequence.blocks = prefix.blocks + fresh
        sequence.node = prefix.node
        sequence.num_recorded = len(prefix.blocks)
        sequence.num_computed = len(prefix.blocks) * self.blocks.block_size
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.num_computed

    def _record(self, sequence: Sequence) -> None:
        size = self.blocks.block_size
        branch = sequence.branch(size)
        for index in range(sequence.num_recorded, sequence.num_computed // size):
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            block = sequence.blocks[index]
            sequence.node = self.blocks.record(sequence.node, index, block, tokens, branch)
            sequence.num_recorded = index + 1

    def _take(self, sequence: Sequence, results: Seq[Sampled], at_end: bool) -> TokenEvent | None:
        """What the results of a chunk's logit rows bring; `at_end`: the last token's are among
        them."""
        for result in results:
            if result.error is not None:
                return TokenEvent(None, "error", trace=sequence.trace, error=result.error)
        sampling = sequence.request.sampling
        if sampling.logits:
            sequence.logits += [r.logits for r in results if r.logits is not None]
            if not at_end:
                return None
            # A step's rows are as wide as the largest vocabulary in it.
            logits = pad_sequence(sequence.logits, batch_first=True, padding_value=-torch.inf)
            return TokenEvent(None, "stop", trace=sequence.trace, logits=logits)
        [drawn] = results
        sequence.tokens.append(drawn.token_id)
        reason: FinishReason | None = None
        ends = drawn.token_id in self.eos_ids and not sampling.ignore_eos
        if ends or drawn.token_id in sampling.stop_token_ids:
            reason = "stop"
        elif len(sequence.tokens) >= sequence.max_length:
            reason = "length"
        trace = sequence.trace if reason else None
        return TokenEvent(drawn.token_id, reason, logprobs=drawn.logprobs, trace=trace)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=_arrival)

    def _remove(self, sequence: Sequence) -> None:
        """Take `sequence` out for good."""
        del self._by_id[sequence.request.request_id]
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            wanted = {digest for other in self.waiting for digest, _ in other.key}
            for digest in {digest for digest, _ in sequence.key} - wanted:
                self.adapters.withdraw(digest)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give back the device memory that `sequence` holds."""
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_recorded = 0
        sequence.node = sequence.root
        sequence.logits = []
        for resident, _ in sequence.parts:
            self.adapters.release(resident)
        sequence.parts = ()


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _is_prefilling(sequence: Sequence) -> bool:
    return len(sequence.tokens) - sequence.num_computed > 1
