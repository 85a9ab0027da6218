"""Activated LoRA: the base up to the invocation tokens, the adapter from there on, as PEFT does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.variants import calculate_alora_offsets

from adapters.manifest import AdapterManifest, AdapterRef
from base_engine.engine import Engine
from base_engine.errors import NotInvoked
from base_engine.sequence import Sequence
from tests.base_engine.test_engine import prompt_of
from tests.generation import (
    Answer,
    adapter_ref,
    answers,
    assert_exact,
    collect,
    request,
    running_engine,
)
from tests.tiny import make_adapter, oracle_logprobs

#: Bytes of one KV block of the tiny Llama.
BLOCK = 4 * 2 * 2 * 2 * 16 * 4

#: Ids that `prompt_of` never draws.
CALL, OTHER_CALL = (270, 271, 272), (280, 281)


def activated(base: Path, folder: Path, call: tuple[int, ...] = CALL, **options: Any) -> Path:
    return make_adapter(base, folder, **{"alora_invocation_tokens": list(call)} | options)


@pytest.fixture(scope="module")
def alora(llama_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return activated(llama_base, tmp_path_factory.mktemp("alora") / "a", seed=1, std=0.1)


@pytest.fixture(scope="module")
def loud(llama_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Changes keys and values from the first layer on, so that a mix-up of them would show."""
    folder = tmp_path_factory.mktemp("loud") / "a"
    return activated(llama_base, folder, seed=2, std=0.3, target_modules=["k_proj", "v_proj"])


@pytest.fixture(scope="module")
def plain(llama_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "a"
    return make_adapter(llama_base, folder, seed=3, std=0.1)


def calling(before: int, after: int, call: tuple[int, ...] = CALL, seed: int = 0) -> list[int]:
    """A prompt with the invocation after `before` tokens."""
    text = prompt_of(before + after, seed)
    return [*text[:before], *call, *text[before:]]


def ask(engine: Engine, prompt: list[int], ref: AdapterRef | None, **options: Any) -> Answer:
    [got] = answers(engine, [request(prompt, ref, **options)])
    return got


def cached(answer: Answer) -> int:
    assert answer.trace is not None
    return answer.trace.cached_tokens


def test_rows_before_the_invocation_are_the_bases_and_the_rest_peft(
    llama_base: Path, alora: Path, plain: Path
) -> None:
    """In one batch with the base and another adapter, with the call at either end and twice."""
    prompts = [calling(0, 9), calling(9, 0), calling(7, 20), [*OTHER_CALL, *CALL], calling(1, 1)]
    prompts += [calling(5, 3) + calling(6, 4, seed=1), [*CALL[:2], *CALL, *CALL[:2]]]
    with running_engine(llama_base, step_tokens=256) as engine:
        asked = [(alora, request(list(p), adapter_ref(engine, alora))) for p in prompts]
        asked += [(plain, request(list(prompts[2]), adapter_ref(engine, plain)))]
        requests = [r for _, r in asked] + [request(list(prompts[2]))]
        got = answers(engine, requests)
        for (folder, r), answer in zip(asked, got[:-1], strict=True):
            assert_exact(llama_base, folder, r, answer)
        assert_exact(llama_base, None, requests[-1], got[-1])


def test_the_last_logits_before_the_invocation_would_tell_the_adapter(
    llama_base: Path, alora: Path
) -> None:
    """The oracle does what this file assumes."""
    prompt = calling(10, 10)
    base, peft = (oracle_logprobs(llama_base, folder, prompt) for folder in (None, alora))
    assert (base[:10] - peft[:10]).abs().max() < 1e-5 < 0.1 < (base[10] - peft[10]).abs().max()


@pytest.mark.parametrize("step_tokens", [1, 3, 7, 16])
def test_no_cut_into_chunks_moves_the_activation(
    step_tokens: int, llama_base: Path, loud: Path
) -> None:
    with running_engine(llama_base, step_tokens=step_tokens, prefix_cache=False) as engine:
        ref = adapter_ref(engine, loud)
        asked = [request(calling(before, 14 - before), ref, 4) for before in (0, 1, 6, 7, 8, 14)]
        for r, got in zip(asked, answers(engine, asked), strict=True):
            assert_exact(llama_base, loud, r, got)


@pytest.mark.parametrize("before", [16, 17, 19, 20, 2])
def test_the_bases_prefix_is_reused_up_to_the_activation(
    before: int, llama_base: Path, loud: Path
) -> None:
    """Blocks of 4 tokens: those wholly before it, in both directions, and only those."""
    prompt = calling(before, 10)
    shared = before // 4 * 4
    for base_first in (True, False):
        with running_engine(llama_base) as engine:
            ref = adapter_ref(engine, loud)
            order = [None, ref] if base_first else [ref, None]
            for number, one in enumerate(order):
                asked = request(prompt, one)
                [got] = answers(engine, [asked])
                assert_exact(llama_base, loud if one else None, asked, got)
                assert cached(got) == (shared if number else 0)
            for one in (ref, None):
                asked = request(prompt, one)
                [got] = answers(engine, [asked])
                assert_exact(llama_base, loud if one else None, asked, got)
                assert cached(got) == (len(prompt) - 1) // 4 * 4


def test_tenants_do_not_share_what_lies_before_the_activation(llama_base: Path, loud: Path) -> None:
    prompt = calling(16, 4)
    with running_engine(llama_base) as engine:
        ref = adapter_ref(engine, loud)
        assert cached(ask(engine, prompt, None, salt="one")) == 0
        assert cached(ask(engine, prompt, ref, salt="two")) == 0
        assert cached(ask(engine, prompt, ref, salt="one")) == 16


def test_other_adapters_and_other_activations_share_nothing_after_them(
    llama_base: Path, loud: Path, tmp_path: Path
) -> None:
    other = activated(
        llama_base, tmp_path / "o", OTHER_CALL, seed=4, std=0.3, target_modules=["v_proj"]
    )
    twin = activated(llama_base, tmp_path / "t", seed=5, std=0.3, target_modules=["v_proj"])
    everywhere = make_adapter(
        llama_base, tmp_path / "e", seed=2, std=0.3, target_modules=["k_proj", "v_proj"]
    )
    prompt = [*prompt_of(16), *CALL, *OTHER_CALL, *prompt_of(12, 1)]
    with running_engine(llama_base) as engine:
        for folder, expected in ((loud, 0), (other, 16), (twin, 16), (everywhere, 0), (None, 16)):
            asked = request(prompt, adapter_ref(engine, folder) if folder else None)
            [got] = answers(engine, [asked])
            assert_exact(llama_base, folder, asked, got)
            assert cached(got) == expected
        # The same beginning, but a later call: the first one is the base's now.
        again = [*prompt, *CALL, *prompt_of(3, 2)]
        asked = request(again, adapter_ref(engine, loud))
        [got] = answers(engine, [asked])
        assert_exact(llama_base, loud, asked, got)
        assert cached(got) == len(prompt) // 4 * 4  # what the base left


def test_a_call_in_an_answer_does_not_make_two_activations_one(
    llama_base: Path, loud: Path, tmp_path: Path
) -> None:
    """The same adapter and tokens in one block, but activated at different ones of them."""
    with running_engine(llama_base, block_size=16) as engine:
        ref = adapter_ref(engine, loud)
        # Look for a token that the adapter, called by it, says again soon.
        calls = range(3, 253)
        refs = [replace(ref, manifest=replace(ref.manifest, invocation=(t,))) for t in calls]
        asked = [
            request([261, 262, 263, call, 264], r, 14) for call, r in zip(calls, refs, strict=True)
        ]
        got = answers(engine, asked)
        call, answer = next(
            (c, g)
            for c, g in zip(calls, got, strict=True)
            if c in g.tokens[:9] and c not in g.tokens[9:]
        )
    folder = activated(
        llama_base, tmp_path / "a", (call,), seed=2, std=0.3, target_modules=["k_proj", "v_proj"]
    )
    with running_engine(llama_base, block_size=16) as engine:
        ref = adapter_ref(engine, folder)
        [first] = answers(engine, [request([261, 262, 263, call, 264], ref, 14)])
        assert first.tokens == answer.tokens
        # Now all of it is the prompt, and the last call counts.
        longer = request([261, 262, 263, call, 264, *first.tokens, 265], ref, 4)
        [second] = answers(engine, [longer])
        assert cached(second) == 0
        assert_exact(llama_base, folder, longer, second)


def test_preemption_and_eviction_keep_the_activation(
    llama_base: Path, loud: Path, plain: Path
) -> None:
    with running_engine(llama_base, kv_bytes=50 * BLOCK, step_tokens=16) as engine:
        ref = adapter_ref(engine, loud)
        folders = [loud, None, plain, loud, loud, None, loud]
        refs = {loud: ref, plain: adapter_ref(engine, plain), None: None}
        for _ in range(2):
            asked = [
                request(calling(9 + 3 * i, 21 - 2 * i, seed=i), refs[folder], 14)
                for i, folder in enumerate(folders)
            ]
            for folder, r, got in zip(folders, asked, answers(engine, asked), strict=True):
                assert_exact(llama_base, folder, r, got)
            engine.forget(ref.digest)
        assert engine.stats().preemptions > 0


def test_a_prompt_without_the_invocation_is_refused_and_says_why(
    llama_base: Path, alora: Path
) -> None:
    async def run(engine: Engine) -> None:
        ref = adapter_ref(engine, alora)
        for prompt in (prompt_of(20), list(CALL[:2]), [*CALL[:2], 5, CALL[2]], [CALL[2]]):
            with pytest.raises(NotInvoked, match=r"\[270, 271, 272\] on; the prompt must contain"):
                engine.submit(request(prompt, ref))
        assert engine.digests_in_use() == set()
        got = await collect(engine.submit(request(calling(3, 3), ref, 2)))
        assert len(got.tokens) == 2

    with running_engine(llama_base) as engine:
        asyncio.run(asyncio.wait_for(run(engine), 30))


@pytest.mark.parametrize(
    ("prompt", "call", "start"),
    [
        ([1, 2, 3], [1], 0),
        ([1, 2, 1], [1], 2),
        ([1, 1, 1, 1], [1, 1], 2),
        ([1, 2, 1, 2, 1], [1, 2, 1], 2),
        ([5, 1, 2, 1, 3], [1, 2], 1),
    ],
)
def test_the_last_occurrence_counts(prompt: list[int], call: list[int], start: int) -> None:
    manifest = AdapterManifest("a", (), 0, 0, (), 4, invocation=tuple(call))
    asked = request(prompt, AdapterRef("a", "a", Path(), manifest))
    assert Sequence(asked, 1, 100).activation == start
    config: Any = {"a": LoraConfig(alora_invocation_tokens=call, task_type="CAUSAL_LM")}
    [from_the_end] = calculate_alora_offsets(config, "a", torch.tensor([prompt]))
    assert len(prompt) - from_the_end == start
