"""The step loop in its own thread, and its asynchronous edge."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from adapters.manifest import AdapterRef, WeightedAdapter
from adapters.pool import AdapterPool, PoolStats
from base_engine.blocks import BlockPool
from base_engine.config import EngineConfig
from base_engine.errors import EngineStopped, PromptTooLong, QueueFull, StepFailed
from base_engine.model import Decoder
from base_engine.request import GenerateRequest, SamplingParams, StepRecord, TokenEvent
from base_engine.runner import Runner
from base_engine.scheduler import Scheduler
from base_engine.sequence import Chunk, Sequence
from base_engine.smoke import largest_change, smoke_prompts
from base_engine.tokenizer import ChatTokenizer

log = logging.getLogger(__name__)

#: Steps that may fail one after the other before the engine gives up.
MAX_FAILED_STEPS = 3

#: Seconds after which waiting requests are looked at again although nothing was reported.
RECHECK_S = 0.5


@dataclass(frozen=True)
class EngineStats:
    """Where the engine stands. Counters are totals since the start."""

    waiting: int
    running: int
    kv_blocks_used: int
    kv_blocks_total: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    preemptions: int
    busy_s: float  # how long the current step has been running; 0 when idle
    adapters: PoolStats


class Generation:
    """The token events of one request, in order; ends after the one with a finish reason.

    Leaving it early needs an `abort()`, which gives its memory back within a step.
    """

    def __init__(self, engine: Engine, request: GenerateRequest) -> None:
        self.request = request
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._ended = False

    def abort(self) -> None:
        """Stop generating. Harmless at any time, also after the end."""
        if not self._ended:
            self._engine._inbox.put(_Abort(self.request.request_id))

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        while not self._ended:
            event = await self._events.get()
            self._ended = event.finish_reason is not None
            yield event


@dataclass(frozen=True)
class _Add:
    sequence: Sequence


@dataclass(frozen=True)
class _Abort:
    request_id: str


class _Wake:
    """Something outside changed: an adapter has arrived, or the engine shall stop."""


class Engine:
    """Serves one resident base and any number of adapters.

    It knows token ids and adapter references only: who may use an adapter, and what a name
    means, is decided before. `submit` is called on an event loop; everything else happens in the
    step thread: take in new requests and aborts, schedule, run one forward pass, hand out events.

    Loading the base takes a while and happens in the constructor. Raises ModelUnsupported or
    OSError for a base that cannot be served, ValueError for memory budgets that fit nothing.
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        name: str | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.config = config
        self.decoder = Decoder.load(model, name=name, dtype=config.dtype, device=config.device)
        self.base = self.decoder.spec
        self.tokenizer = ChatTokenizer.load(model)
        self.eos_ids = self.decoder.eos_ids | self.tokenizer.eos_ids
        self.adapters = AdapterPool(
            self.base,
            parameters=self.decoder.parameter,
            device=self.decoder.device,
            dtype=self.decoder.dtype,
            device_bytes=config.adapter_bytes,
            host_bytes=config.host_adapter_bytes,
            loader_threads=config.loader_threads,
            on_change=self._wake,
        )
        self.runner = Runner(self.decoder, self.adapters, config)
        cache = self.runner.cache
        self.blocks = BlockPool(cache.num_blocks, cache.block_size, config.prefix_cache)
        self.scheduler = Scheduler(config, self.blocks, self.adapters, self.eos_ids)
        #: Longest prompt plus answer, in tokens: the model's context or all of the KV cache.
        self.max_length = min(self.base.max_positions, cache.num_blocks * cache.block_size)
        self.failure: str | None = None
        self._on_step = on_step
        self._inbox: queue.SimpleQueue[_Add | _Abort | _Wake] = queue.SimpleQueue()
        self._generations: dict[str, Generation] = {}
        self._steps: deque[StepRecord] = deque(maxlen=config.steps_kept)
        self._arrivals = 0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._cached_tokens = 0
        self._step_started: float | None = None
        self._stopping = False
        #: Held while a request is put in, so that none slips in after the last one was taken out.
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    def stop(self) -> None:
        """End all requests with EngineStopped and give up the threads. Waits for the step."""
        self._stopping = True
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        self.adapters.close()
        self.tokenizer.close()

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and steps run."""
        return self.failure is None and not self._stopping and self._thread.is_alive()

    def submit(self, request: GenerateRequest) -> Generation:
        """Queue `request`; call it on the event loop that will read the events.

        An answer longer than what is left of `max_length` ends there with reason "length".
        Raises PromptTooLong, NotInvoked, QueueFull, EngineStopped.
        """
        if not self.healthy:
            raise EngineStopped(self.failure or "the engine is not running")
        length = len(request.prompt_ids)
        if not 0 < length < self.max_length:
            raise PromptTooLong(
                f"the prompt has {length} tokens; it must have at least 1 and at most "
                f"{self.max_length - 1}, which leaves room for one token of answer"
            )
        limit = self.config.max_running + self.config.max_waiting
        if len(self._generations) >= limit:
            raise QueueFull(
                f"{limit} requests are running or waiting, the most that are taken", retry_after=1
            )
        generation = Generation(self, request)
        with self._gate:
            if self._stopping:
                raise EngineStopped("the engine is stopping")
            sequence = Sequence(request, self._arrivals + 1, self.max_length)
            self._arrivals += 1
            self._generations[request.request_id] = generation
            self._inbox.put(_Add(sequence))
        return generation

    async def effect(self, adapter: AdapterRef) -> float:
        """The largest change of a logit that `adapter` makes to a few fixed prompts; 0.0 if none.

        Raises LogitsNotFinite if its logits overflow, AdapterUnavailable, QueueFull,
        EngineStopped, StepFailed.
        """
        weighted = (WeightedAdapter(adapter),)
        prompts = smoke_prompts(self.base, adapter.manifest, self.max_length - 1)
        # One after the other, so that on a quiet engine the steps of base and adapter have the
        # same shapes and round alike.
        after = [await self._logits(ids, weighted) for ids in prompts.shared + prompts.own]
        before = [await self._logits(ids, ()) for ids in prompts.shared]
        return largest_change(self.base, adapter.manifest, before, after)

    async def _logits(self, ids: tuple[int, ...], adapters: tuple[WeightedAdapter, ...]) -> Tensor:
        """The logits after each of `ids`: float32 [len(ids), at least the vocabulary]."""
        sampling = SamplingParams(max_tokens=1, logits=True)
        generation = self.submit(GenerateRequest(uuid.uuid4().hex, ids, sampling, adapters))
        try:
            async for event in generation:
                if event.error is not None:
                    raise event.error
                if event.logits is not None:
                    return event.logits
            raise EngineStopped("the request was aborted")
        finally:
            generation.abort()

    def prefetch(self, adapter: AdapterRef) -> None:
        """Begin to load `adapter`, expecting requests for it."""
        self.adapters.prefetch(adapter)

    def forget(self, digest: str) -> None:
        """Drop an adapter's weights as soon as no running request uses them."""
        self.adapters.forget(digest)

    def digests_in_use(self) -> set[str]:
        """The adapters of all requests that have not ended; their files may still be read."""
        requests = [generation.request for generation in list(self._generations.values())]
        return {adapter.ref.digest for request in requests for adapter in request.adapters}

    def steps(self, limit: int) -> list[StepRecord]:
        """The last `limit` steps, oldest first."""
        return list(self._steps)[-limit:] if limit > 0 else []

    def stats(self) -> EngineStats:
        """A snapshot of counts; cheap, from any thread."""
        started = self._step_started
        running = len(self.scheduler.running)
        return EngineStats(
            waiting=max(0, len(self._generations) - running),
            running=running,
            kv_blocks_used=self.blocks.num_used,
            kv_blocks_total=self.blocks.num_blocks,
            steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=self.scheduler.num_preemptions,
            busy_s=time.monotonic() - started if started is not None else 0.0,
            adapters=self.adapters.stats(),
        )

    def _run(self) -> None:
        failed_steps = 0
        try:
            while not self._stopping:
                chunks = self._next_chunks()
                if not chunks:
                    continue
                try:
                    self._step(chunks)
                    failed_steps = 0
                except Exception as error:
                    log.exception("step %d failed", self._num_steps)
                    self._fail([chunk.sequence for chunk in chunks], StepFailed(_reason(error)))
                    failed_steps += 1
                    if failed_steps >= MAX_FAILED_STEPS:
                        raise
                finally:
                    self._step_started = None
        except Exception as error:
            self.failure = f"the engine stopped after an error: {_reason(error)}"
            log.exception("the engine stopped")
        finally:
            self._stop_all()

    def _next_chunks(self) -> list[Chunk]:
        """Take in what has arrived and schedule; waits if there is nothing to do."""
        self._take_in(block=False)
        plan = self.scheduler.schedule()
        for ended in plan.ended:
            self._emit([(ended.sequence, _failed(ended.sequence, ended.error))])
        if not plan.chunks:
            self._take_in(block=True)
        return plan.chunks

    def _take_in(self, *, block: bool) -> None:
        try:
            while True:
                # Nobody reports that time has passed, so look again now and then while some wait.
                message = self._inbox.get(block, RECHECK_S if self.scheduler.waiting else None)
                block = False
                if isinstance(message, _Add):
                    self.scheduler.add(message.sequence)
                elif isinstance(message, _Abort):
                    sequence = self.scheduler.abort(message.request_id)
                    if sequence is not None:
                        self._emit([(sequence, TokenEvent(None, "abort", trace=sequence.trace))])
        except queue.Empty:
            pass

    def _step(self, chunks: list[Chunk]) -> None:
        started = time.time()
        self._step_started = clock = time.monotonic()
        ran = self.runner.run(chunks)
        record = _record(self._num_steps, started, time.monotonic() - clock, chunks)
        for chunk in chunks:
            if chunk.sequence.steps == 0:
                self._prompt_tokens += len(chunk.sequence.request.prompt_ids)
                self._cached_tokens += chunk.sequence.cached_tokens
        events = self.scheduler.update(ran.chunks, ran.sampled)
        self._num_steps += 1
        self._generated_tokens += sum(event.token_id is not None for _, event in events)
        self._steps.append(record)
        self._emit(events)
        if self._on_step is not None:
            self._on_step(record)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        for sequence in sequences:
            if self.scheduler.abort(sequence.request.request_id) is not None:
                self._emit([(sequence, _failed(sequence, error))])

    def _stop_all(self) -> None:
        error = EngineStopped(self.failure or "the engine was stopped")
        with self._gate:
            self._stopping = True
        self._take_in(block=False)
        for sequence in self.scheduler.abort_all():
            self._emit([(sequence, _failed(sequence, error))])

    def _emit(self, events: list[tuple[Sequence, TokenEvent]]) -> None:
        """Hand events to their event loops, one call per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Generation, TokenEvent]]] = {}
        for sequence, event in events:
            generation = self._generations[sequence.request.request_id]
            if event.finish_reason:
                del self._generations[sequence.request.request_id]
            by_loop.setdefault(generation._loop, []).append((generation, event))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:
                log.warning("an event loop closed with %d requests open", len(batch))

    def _wake(self) -> None:
        self._inbox.put(_Wake())


def _deliver(batch: list[tuple[Generation, TokenEvent]]) -> None:
    for generation, event in batch:
        generation._events.put_nowait(event)


def _failed(sequence: Sequence, error: Exception) -> TokenEvent:
    return TokenEvent(None, "error", trace=sequence.trace, error=error)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _record(number: int, started: float, seconds: float, chunks: list[Chunk]) -> StepRecord:
    tokens: dict[str, int] = {}
    prefill = 0
    for chunk in chunks:
        label = chunk.sequence.label
        tokens[label] = tokens.get(label, 0) + chunk.count
        prefill += chunk.count if chunk.start < len(chunk.sequence.request.prompt_ids) else 0
    total = sum(tokens.values())
    return StepRecord(number, started, seconds, tokens, prefill, total - prefill)
