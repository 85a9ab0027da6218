"""The engine at the edges of its numbers: dtypes, overflows, seeds, chunks, equal names."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.manifest import WEIGHTS_FILE
from base_engine.engine import Engine
from base_engine.sampler import LogitsNotFinite
from tests.base_engine.test_engine import prompt_of
from tests.generation import (
    Answer,
    adapter_ref,
    answers,
    assert_exact,
    collect,
    ref_or_base,
    request,
    running_engine,
)
from tests.tiny import make_adapter, oracle_logprobs

#: Bytes of one KV block of the tiny Llama: tokens, k and v, layers, kv heads, head size, float32.
BLOCK = 4 * 2 * 2 * 2 * 16 * 4


def recast(source: Path, folder: Path, a: torch.dtype, b: torch.dtype) -> Path:
    """The adapter in `source` with its A and B stored as these types."""
    tensors = load_file(source / WEIGHTS_FILE)
    folder.mkdir()
    cast = {name: t.to(a if "lora_A" in name else b) for name, t in tensors.items()}
    save_file(cast, folder / WEIGHTS_FILE)
    for file in source.iterdir():
        if file.name != WEIGHTS_FILE:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_adapters_of_every_stored_type_share_a_batch_and_each_is_exact(
    llama_base: Path, tmp_path: Path
) -> None:
    plain = make_adapter(llama_base, tmp_path / "plain", seed=1, std=0.1)
    types = [torch.float32, torch.float16, torch.bfloat16]
    folders: list[Path | None] = [
        recast(plain, tmp_path / f"{i}-{j}", a, b)
        for i, a in enumerate(types)
        for j, b in enumerate(types)
    ]
    folders += [None]
    with running_engine(llama_base) as engine:
        asked = [request(prompt_of(9), ref_or_base(engine, folder)) for folder in folders]
        for folder, r, got in zip(folders, asked, answers(engine, asked), strict=True):
            assert_exact(llama_base, folder, r, got)


def test_a_base_of_half_precision_serves_adapters_within_its_rounding(
    llama_base: Path, tmp_path: Path
) -> None:
    """Alone or beside others, each row stays near float32 and far from the base."""
    plain = make_adapter(llama_base, tmp_path / "plain", seed=1, std=0.1)
    half = recast(plain, tmp_path / "half", torch.float32, torch.bfloat16)
    prompt = prompt_of(12)
    with running_engine(llama_base, dtype="bfloat16") as engine:
        asked = [request(prompt, ref_or_base(engine, f), 1) for f in (plain, half, None)]
        for folder, got in zip((plain, half, None), answers(engine, asked), strict=True):
            [token], [logprob] = got.tokens, got.logprobs
            want = oracle_logprobs(llama_base, folder, prompt)[-1]
            other = oracle_logprobs(llama_base, None if folder else plain, prompt)[-1]
            assert abs(logprob - want[token]) < 0.1 < abs(logprob - other[token])


@pytest.mark.parametrize("value", [1e19, 3e38])
def test_an_adapter_whose_output_overflows_fails_alone_and_spoils_no_memory(
    value: float, llama_base: Path, tmp_path: Path
) -> None:
    """Its weights are finite; keys, values and logits made from them are not."""
    good = make_adapter(llama_base, tmp_path / "good", seed=1, std=0.1)
    bad = make_adapter(llama_base, tmp_path / "bad", seed=2, target_modules=["k_proj", "v_proj"])
    tensors = load_file(bad / WEIGHTS_FILE)
    save_file({n: torch.full_like(t, value) for n, t in tensors.items()}, bad / WEIGHTS_FILE)
    with running_engine(llama_base, kv_bytes=20 * BLOCK, step_tokens=16) as engine:
        folders = [good, bad, None, bad, good]
        for _ in range(3):  # the KV blocks of the bad one are used again by the others
            asked = [request(prompt_of(17), ref_or_base(engine, f), 6) for f in folders]
            for folder, r, got in zip(folders, asked, answers(engine, asked), strict=True):
                if folder is bad:
                    assert got.reason == "error" and got.tokens == []
                    assert isinstance(got.error, LogitsNotFinite)
                else:
                    assert_exact(llama_base, folder, r, got)


def test_a_last_chunk_of_one_token_beside_decoding_requests(
    llama_base: Path, tmp_path: Path
) -> None:
    folders = [make_adapter(llama_base, tmp_path / f"a{i}", seed=i, std=0.1) for i in range(3)]

    async def run(engine: Engine) -> list[tuple[Path, Any, Answer]]:
        decoding = [
            engine.submit(request([70 + i], ref_or_base(engine, folders[i]), 400)) for i in range(3)
        ]
        while engine.stats().generated_tokens < 3:
            await asyncio.sleep(0.01)
        got = []
        # Three tokens of each step go to the others, sixteen are left for the prompt.
        for i, length in enumerate((15, 16, 17, 33, 97, 100)):
            folder = folders[i % 3]
            asked = request(prompt_of(length, i), ref_or_base(engine, folder), 4)
            got.append((folder, asked, await collect(engine.submit(asked))))
        assert engine.stats().running == 3
        for generation in decoding:
            generation.abort()
        await asyncio.gather(*map(collect, decoding))
        return got

    with running_engine(llama_base, step_tokens=19) as engine:
        for folder, asked, got in asyncio.run(asyncio.wait_for(run(engine), 60)):
            assert_exact(llama_base, folder, asked, got)
        prefills = [step.prefill_tokens for step in engine.steps(1000)]
        assert [count for count in prefills if count > 1].count(16) == 1 + 1 + 2 + 6 + 6
        assert prefills.count(1) >= 3, "no last chunk of one token"


def test_two_adapters_of_one_name_share_nothing(llama_base: Path, tmp_path: Path) -> None:
    """The adapters change keys and values from the first layer on, so a mix-up would show."""
    folders = [
        make_adapter(llama_base, tmp_path / n, seed=i, std=0.3, target_modules=["v_proj"])
        for i, n in enumerate("ab")
    ]
    for order in ((0, 1, 0, 1), (1, 0, 0, 1)):
        with running_engine(llama_base) as engine:
            refs = [replace(adapter_ref(engine, f), name="support-bot") for f in folders]
            seen = set()
            for i in order:
                asked = request(prompt_of(32), refs[i])
                [got] = answers(engine, [asked])
                assert_exact(llama_base, folders[i], asked, got)
                assert got.trace is not None and (got.trace.cached_tokens > 0) == (i in seen)
                seen.add(i)


def test_several_sequences_that_only_fit_one_after_the_other_all_end(scripted: Path) -> None:
    with running_engine(scripted, kv_bytes=24 * BLOCK, prefix_cache=False) as engine:
        assert engine.max_length == 96
        got = answers(engine, [request([50] * 60, None, 30) for _ in range(4)], seconds=60)
        assert [answer.tokens for answer in got] == [[51 + i for i in range(30)]] * 4


def test_every_seed_has_draws_of_its_own_also_a_negative_one(llama_base: Path) -> None:
    seeds = [-2, -1, 0, 1, 2, 2**63 - 1, -(2**63), -(2**63) + 1]
    with running_engine(llama_base) as engine:

        def run() -> list[tuple[int, ...]]:
            asked = [request([50], None, 16, seed=s, temperature=1.5) for s in seeds]
            return [tuple(answer.tokens) for answer in answers(engine, asked)]

        first = run()
        assert run() == first
        assert len(set(first)) == len(seeds)
