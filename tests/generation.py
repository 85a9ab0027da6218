"""Drives a real engine from a test: adapters by folder, requests in, whole answers out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from adapters.manifest import AdapterRef, WeightedAdapter
from adapters.validation import Limits, validate
from base_engine.config import EngineConfig
from base_engine.engine import Engine, Generation
from base_engine.request import GenerateRequest, SamplingParams, TokenLogprobs, Trace
from tests.tiny import oracle_logprobs

_ids = itertools.count()

SMALL = EngineConfig(
    kv_bytes=1 << 20,
    adapter_bytes=4 << 20,
    host_adapter_bytes=16 << 20,
    block_size=4,
    step_tokens=64,
    max_running=32,
)


@dataclass
class Answer:
    """What one request brought."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reported: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    error: Exception | None = None
    trace: Trace | None = None


@contextmanager
def running_engine(base: Path, **settings: Any) -> Iterator[Engine]:
    """A started engine of `base`; stops, and checks that nothing is left held, at the end."""
    engine = Engine(base, replace(SMALL, **settings))
    engine.start()
    try:
        yield engine
        assert engine.failure is None
        engine.scheduler.check_integrity()
        engine.adapters.check_integrity()
    finally:
        engine.stop()
    assert engine.blocks.num_used == 0
    assert engine.adapters.stats().pinned == 0


def adapter_ref(engine: Engine, folder: Path) -> AdapterRef:
    """The accepted adapter in `folder`, as the registry would hand it down."""
    manifest = validate(folder, engine.base, Limits())
    return AdapterRef(manifest.digest, folder.name, folder, manifest)


def ref_or_base(engine: Engine, folder: Path | None) -> AdapterRef | None:
    """The adapter in `folder`, or the base where there is none."""
    return None if folder is None else adapter_ref(engine, folder)


def request(
    prompt: Sequence[int],
    adapter: AdapterRef | Sequence[WeightedAdapter] | None = None,
    max_tokens: int = 8,
    salt: str = "",
    **sampling: Any,
) -> GenerateRequest:
    """A greedy request that does not stop by itself, unless told otherwise."""
    options = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0} | sampling
    params = SamplingParams(max_tokens=max_tokens, **options)
    if adapter is None:
        adapters: tuple[WeightedAdapter, ...] = ()
    elif isinstance(adapter, AdapterRef):
        adapters = (WeightedAdapter(adapter),)
    else:
        adapters = tuple(adapter)
    return GenerateRequest(f"test-{next(_ids)}", tuple(prompt), params, adapters, salt)


async def collect(generation: Generation) -> Answer:
    answer = Answer()
    async for event in generation:
        if event.token_id is not None:
            answer.tokens.append(event.token_id)
            if event.logprobs is not None:
                answer.logprobs.append(event.logprobs.chosen)
                answer.reported.append(event.logprobs)
        if event.finish_reason is not None:
            assert answer.reason is None, "two ends"
            answer.reason, answer.error = event.finish_reason, event.error
            answer.trace = event.trace
    return answer


def answers(
    engine: Engine, requests: Sequence[GenerateRequest], seconds: float = 120
) -> list[Answer]:
    """All `requests` at once; their answers in the same order."""

    async def run() -> list[Answer]:
        generations = [engine.submit(r) for r in requests]
        return await asyncio.wait_for(asyncio.gather(*map(collect, generations)), seconds)

    return asyncio.run(run())


def assert_exact(base: Path, adapter: Path | None, asked: GenerateRequest, got: Answer) -> None:
    """`got` is what PEFT in float32 chooses greedily, with its log-probabilities to 1e-4."""
    assert got.error is None and len(got.tokens) == asked.sampling.max_tokens, got
    prompt = list(asked.prompt_ids)
    want = oracle_logprobs(base, adapter, prompt + got.tokens)[len(prompt) - 1 : -1]
    chosen = want[torch.arange(len(got.tokens)), torch.tensor(got.tokens)]
    torch.testing.assert_close(torch.tensor(got.logprobs), chosen, atol=1e-4, rtol=0)
    # A tie within the tolerance may go either way; anything else must be the most likely token.
    assert (want.max(-1).values - chosen).max() < 2e-4
