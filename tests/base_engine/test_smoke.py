"""The smoke check: how far an adapter moves the logits of a few fixed prompts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.errors import AdapterUnavailable
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, AdapterManifest, BaseSpec, TokenRows
from base_engine.engine import Engine
from base_engine.errors import EngineStopped, QueueFull
from base_engine.request import GenerateRequest, SamplingParams
from base_engine.sampler import LogitsNotFinite
from base_engine.smoke import largest_change, smoke_prompts
from tests.base_engine.test_engine import prompt_of
from tests.generation import (
    SMALL,
    adapter_ref,
    answers,
    assert_exact,
    collect,
    request,
    running_engine,
)
from tests.tiny import FAMILIES, make_adapter, oracle, tiny_base

BASE = BaseSpec("base", vocab_size=320, max_positions=512, targets=())


def manifest(**fields: Any) -> AdapterManifest:
    return AdapterManifest("d", (), 0, 0, (), 4, **fields)


def effect(engine: Engine, folder: Path) -> float:
    ref = adapter_ref(engine, folder)
    return asyncio.run(asyncio.wait_for(engine.effect(ref), 60))


def rewritten(source: Path, folder: Path, value: float, part: str = "lora_B") -> Path:
    """The adapter in `source` with all of its B's (or A's) numbers made `value`."""
    folder.mkdir()
    tensors = load_file(source / WEIGHTS_FILE)
    save_file(
        {n: torch.full_like(t, value) if part in n else t for n, t in tensors.items()},
        folder / WEIGHTS_FILE,
    )
    (folder / CONFIG_FILE).write_text((source / CONFIG_FILE).read_text())
    return folder


def logits_of(base: Path, adapter: Path | None, prompts: list[tuple[int, ...]]) -> list[Tensor]:
    """Up to a constant for each position, which log-probabilities leave open."""
    return [oracle(base, adapter)(prompt) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shows_an_effect_and_none_for_zeros(family: str, tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", family)
    how: dict[str, Any] = {"fan_in_fan_out": family == "gpt2", "std": 0.1}
    adapter = make_adapter(base, tmp_path / "a", seed=1, **how)
    zero = rewritten(adapter, tmp_path / "zero", 0.0)
    with running_engine(base) as engine:
        assert effect(engine, zero) == 0.0
        assert effect(engine, adapter) > 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"alora_invocation_tokens": [270, 271]},
        {"trainable_token_indices": {"embed_tokens": [7, 300]}, "target_modules": ["q_proj"]},
        {"use_dora": True},
        {"target_modules": ["embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_only_some_tokens_show_is_seen(
    options: dict[str, Any], llama_base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(llama_base, tmp_path / "a", seed=1, std=0.1, **options)
    if "trainable_token_indices" in options:
        adapter = rewritten(adapter, tmp_path / "rows", 0.0)  # the rows alone
    with running_engine(llama_base) as engine:
        assert effect(engine, adapter) > 0.01


def test_an_activated_adapter_of_zeros_has_no_effect(llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "a", seed=1, alora_invocation_tokens=[270, 271])
    with running_engine(llama_base) as engine:
        assert effect(engine, rewritten(adapter, tmp_path / "zero", 0.0)) == 0.0


def test_an_adapter_with_ids_of_its_own_is_run_on_them(llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "a", seed=1, std=0.1, added_tokens=4)
    zero = rewritten(adapter, tmp_path / "zero", 0.0)
    with running_engine(llama_base) as engine:
        ref = adapter_ref(engine, zero)
        assert ref.manifest.vocab_size == 324
        [prompt] = smoke_prompts(engine.base, ref.manifest, 511).own
        assert {320, 321, 322, 323} <= set(prompt)
        assert effect(engine, zero) > 0.1  # its ids' logits, for nothing else has changed
        tensors = load_file(zero / WEIGHTS_FILE)
        for name in tensors:
            if "lm_head" in name:
                tensors[name][323] = 3e38
        save_file(tensors, zero / WEIGHTS_FILE)
        with pytest.raises(LogitsNotFinite):
            effect(engine, zero)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zeros_have_no_effect_in_any_dtype(dtype: str, llama_base: Path, tmp_path: Path) -> None:
    """A step's shape changes its rounding; that is not to pass for an effect."""
    adapter = make_adapter(llama_base, tmp_path / "a", seed=1)
    zero = rewritten(adapter, tmp_path / "zero", 0.0)
    with running_engine(llama_base, dtype=dtype) as engine:
        assert [effect(engine, zero) for _ in range(3)] == [0.0] * 3


def test_the_effect_is_what_peft_makes_of_the_same_prompts(
    llama_base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(llama_base, tmp_path / "a", seed=1, std=0.1, target_modules=["lm_head"])
    with running_engine(llama_base) as engine:
        prompts = smoke_prompts(engine.base, adapter_ref(engine, adapter).manifest, 511).shared
        got = effect(engine, adapter)
    changes = [
        after - before
        for before, after in zip(
            logits_of(llama_base, None, prompts),
            logits_of(llama_base, adapter, prompts),
            strict=True,
        )
    ]
    # A log-probability's change is the logit's, less a constant of its row.
    spread = max((c.max(-1).values - c.min(-1).values).max().item() for c in changes)
    assert spread / 2 - 1e-4 <= got <= spread + 1e-4


@pytest.mark.parametrize("value", [1e30, 3e38])
def test_an_adapter_that_overflows_is_told_and_disturbs_nobody(
    value: float, llama_base: Path, tmp_path: Path
) -> None:
    good = make_adapter(llama_base, tmp_path / "good", seed=1, std=0.1)
    bad = rewritten(good, tmp_path / "bad", value)
    with running_engine(llama_base) as engine:
        with pytest.raises(LogitsNotFinite):
            effect(engine, bad)
        asked = request(prompt_of(20), adapter_ref(engine, good))
        assert_exact(llama_base, good, asked, answers(engine, [asked])[0])
        assert engine.stats().adapters.pinned == 0


def test_it_runs_among_other_requests_and_they_are_none_the_worse(
    llama_base: Path, tmp_path: Path
) -> None:
    """With few KV blocks, small chunks, preemptions and eviction of the adapter in between."""
    folders = [make_adapter(llama_base, tmp_path / f"a{i}", seed=i, std=0.1) for i in range(3)]
    block = 4 * 2 * 2 * 2 * 16 * 4

    async def run(engine: Engine) -> tuple[list[float], list[float]]:
        refs = [adapter_ref(engine, folder) for folder in folders]
        quiet = [await engine.effect(ref) for ref in refs]
        busy = asyncio.gather(*(engine.effect(ref) for ref in refs * 3))
        generations = [engine.submit(r) for r in asked]
        got.extend(await asyncio.gather(*map(collect, generations)))
        return quiet, await busy

    with running_engine(llama_base, kv_bytes=40 * block, step_tokens=7) as engine:
        asked = [
            request(prompt_of(9 + i, i), adapter_ref(engine, folders[i % 3]), 24) for i in range(9)
        ]
        got: list[Any] = []
        quiet, busy = asyncio.run(asyncio.wait_for(run(engine), 120))
        assert engine.stats().preemptions > 0
        assert busy == pytest.approx(quiet * 3, abs=1e-4)
        assert len(set(quiet)) == 3
        for i, (r, answer) in enumerate(zip(asked, got, strict=True)):
            assert_exact(llama_base, folders[i % 3], r, answer)


def test_nothing_of_it_enters_the_prefix_cache(llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "a", seed=1, std=0.1)
    with running_engine(llama_base) as engine:
        ref = adapter_ref(engine, adapter)
        prompts = smoke_prompts(engine.base, ref.manifest, 511).shared
        asked = [request(ids, one, 2) for ids in prompts for one in (ref, None)]
        assert asyncio.run(engine.effect(ref)) > 0.1
        got = answers(engine, asked)
        assert all(answer.trace and answer.trace.cached_tokens == 0 for answer in got)
        # Nor does it read from there: it could not tell the logits of what it did not compute.
        assert asyncio.run(engine.effect(ref)) > 0.1


def test_logits_of_every_token_come_at_the_end(llama_base: Path) -> None:
    prompt = tuple(prompt_of(30))
    want = oracle(llama_base, None)(prompt)

    async def run(engine: Engine) -> Tensor:
        params = SamplingParams(max_tokens=5, logits=True)
        events = [e async for e in engine.submit(GenerateRequest("r", prompt, params))]
        [event] = events
        assert event.token_id is None and event.finish_reason == "stop"
        assert event.logits is not None
        return event.logits

    for step_tokens in (7, 64):
        with running_engine(llama_base, step_tokens=step_tokens) as engine:
            logits = asyncio.run(run(engine))
            assert logits.shape == want.shape and logits.dtype == torch.float32
            torch.testing.assert_close(logits.log_softmax(-1), want, atol=1e-4, rtol=0)


def test_what_can_go_wrong_is_raised(llama_base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(llama_base, tmp_path / "a", seed=1)
    engine = Engine(llama_base, replace(SMALL, max_running=1, max_waiting=0))
    ref = adapter_ref(engine, adapter)
    try:
        with pytest.raises(EngineStopped):
            asyncio.run(engine.effect(ref))
        engine.start()

        async def full() -> None:
            generation = engine.submit(request([50], None, 400))
            with pytest.raises(QueueFull):
                await engine.effect(ref)
            generation.abort()
            await collect(generation)

        asyncio.run(full())
        (adapter / WEIGHTS_FILE).unlink()
        engine.forget(ref.digest)
        with pytest.raises(AdapterUnavailable):
            asyncio.run(asyncio.wait_for(engine.effect(ref), 30))
    finally:
        engine.stop()


def test_activated_adapters_and_changed_rows_are_in_the_prompts() -> None:
    shared, own = smoke_prompts(BASE, manifest(), 511)
    assert [len(prompt) for prompt in shared] == [8, 16, 24] and not own
    assert len({token // 32 for prompt in shared for token in prompt}) == 10
    shared, own = smoke_prompts(BASE, manifest(invocation=(300, 301)), 511)
    assert all((300, 301) in zip(prompt, prompt[1:], strict=False) for prompt in shared)
    rows = (TokenRows("embed", (7, 11), "key"), TokenRows("head", (11, 319), "key"))
    shared, own = smoke_prompts(BASE, manifest(token_rows=rows), 511)
    assert {7, 11, 319} <= set(shared[-1]) and not own


def test_prompts_with_ids_of_the_adapters_own_are_not_for_the_base() -> None:
    shared, own = smoke_prompts(BASE, manifest(vocab_size=324), 511)
    assert len(shared) == 3 and max(map(max, shared)) < 320
    assert len(own) == 1 and {320, 321, 322, 323} <= set(own[0])
    shared, own = smoke_prompts(BASE, manifest(vocab_size=324, invocation=(322,)), 511)
    assert not shared and all(322 in prompt for prompt in own)


def test_prompts_fit_into_a_small_engine() -> None:
    rows = (TokenRows("embed", tuple(range(100)), "key"),)
    for room in (1, 5, 20):
        prompts = smoke_prompts(BASE, manifest(token_rows=rows), room)
        assert all(0 < len(prompt) <= room for prompt in prompts.shared)
        prompts = smoke_prompts(BASE, manifest(token_rows=rows, invocation=(5,)), room)
        assert all(5 in prompt and len(prompt) <= room for prompt in prompts.shared)


def test_the_change_is_the_largest_of_the_ids_of_both() -> None:
    old = torch.arange(4 * 320.0).view(4, 320)
    new = old.clone()
    new[2, 5] -= 3.0
    assert largest_change(BASE, manifest(), [old, old], [old, new]) == 3.0
    # Steps with a mate of a larger vocabulary have wider rows.
    wide = torch.nn.functional.pad(new, (0, 9), value=-torch.inf)
    assert largest_change(BASE, manifest(), [wide], [wide]) == 0.0
    assert largest_change(BASE, manifest(), [old], [wide]) == 3.0


def test_rounding_is_no_change() -> None:
    old = torch.full((4, 320), 8.0)
    assert largest_change(BASE, manifest(), [old], [old + 4e-6]) == 0.0
    assert largest_change(BASE, manifest(), [old], [old + 1e-4]) == pytest.approx(1e-4, rel=0.01)


def test_ids_of_the_adapters_own_count_where_nothing_else_changes() -> None:
    old, extra = torch.zeros(4, 320), torch.full((4, 2), 0.5)
    new = torch.cat([old, extra], 1)
    assert largest_change(BASE, manifest(vocab_size=322), [old], [new]) == 0.5
    assert largest_change(BASE, manifest(vocab_size=322), [], [new]) == 0.5
    changed = torch.cat([old + 0.1, extra], 1)
    assert largest_change(BASE, manifest(vocab_size=322), [old], [changed]) == pytest.approx(0.1)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_logit_that_is_not_finite_is_refused(value: float) -> None:
    old = torch.zeros(4, 320)
    new = torch.zeros(4, 322)
    assert largest_change(BASE, manifest(vocab_size=322), [old], [new]) == 0.0
    for at in (7, 321):
        bad = new.clone()
        bad[1, at] = value
        with pytest.raises(LogitsNotFinite):
            largest_change(BASE, manifest(vocab_size=322), [old], [bad])
        with pytest.raises(LogitsNotFinite):
            largest_change(BASE, manifest(vocab_size=322), [], [bad])
