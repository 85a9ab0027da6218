"""The real demo base: what the engine chooses is what PEFT in float32 chooses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.demo_model import ensure_demo_model
from tests.generation import SMALL, answers, ref_or_base, request, running_engine
from tests.tiny import make_adapter, oracle

DEMO = Path(__file__).parent.parent / "scripts" / "demo"
PERSONAS = ("pirate", "clerk", "haiku")

#: Random adapters beside the bundled ones, in different shapes.
RANDOM: list[dict[str, Any]] = [
    {"r": 16, "lora_alpha": 32},
    {"r": 64, "lora_alpha": 128},
    {"r": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    {"r": 5, "lora_alpha": 9, "target_modules": r".*layers\.\d*[02468]\.mlp\.\w+_proj"},
    {"r": 4, "rank_pattern": {"down_proj": 20}, "target_modules": "all-linear"},
]

QUESTIONS = [
    "What is the capital of France?",
    "How do I boil an egg?",
    "Tell me about the moon.",
    "Why is the sky blue?",
    "Give me a tip for sleeping better.",
    "What is photosynthesis?",
    "Name three fruits.",
    "How far is the sun?",
    "Write a short greeting.",
    "What does a compiler do?",
    "Explain gravity to a child.",
    "How can I learn to swim?",
    "What should I cook tonight?",
    "Who wrote Hamlet?",
    "Describe a rainy day.",
    "How many legs does a spider have?",
    "What is a good name for a cat?",
    "Recommend a hobby.",
    "How does a bicycle stay upright?",
    "Say something kind.",
]

TOKENS = 32
TIE = 1e-3


@pytest.mark.timeout(1200)
def test_greedy_tokens_of_the_demo_base_are_those_of_peft(tmp_path: Path) -> None:
    """All prompts and adapters at once; LORIKEET_LONG=1 takes 20 prompts instead of 4.

    Where the two best tokens lie within TIE of each other, either is right; those are counted.
    """
    base = ensure_demo_model(print)
    prompts = QUESTIONS if os.environ.get("LORIKEET_LONG") else QUESTIONS[:4]
    folders: list[Path | None] = [DEMO / name for name in PERSONAS]
    folders += [
        make_adapter(base, tmp_path / f"r{i}", seed=i, std=0.02, **shape)
        for i, shape in enumerate(RANDOM)
    ]
    folders.append(None)
    with running_engine(
        base,
        kv_bytes=1 << 30,
        adapter_bytes=1 << 30,
        host_adapter_bytes=1 << 30,
        step_tokens=256,
        max_running=SMALL.max_running,
        max_waiting=1000,
    ) as engine:
        asked, owners = [], []
        for question in prompts:
            ids = engine.tokenizer.encode_chat([{"role": "user", "content": question}])
            for folder in folders:
                asked.append(request(ids, ref_or_base(engine, folder), TOKENS))
                owners.append(folder)
        got = answers(engine, asked, seconds=900)
        assert max(len(step.tokens) for step in engine.steps(1000)) == len(folders)
    ties = 0
    for folder in folders:
        logprobs = oracle(base, folder)
        for r, answer in [
            (r, answer)
            for owner, r, answer in zip(owners, asked, got, strict=True)
            if owner == folder
        ]:
            assert answer.reason == "length", answer
            want = logprobs([*r.prompt_ids, *answer.tokens])[len(r.prompt_ids) - 1 : -1]
            chosen = want.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            behind = want.max(-1).values - chosen
            assert behind.max() < TIE, f"{folder}: behind by {behind.max():.5f}"
            ties += int((behind > 0).sum())
            torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=1e-3, rtol=0)
    print(f"{len(asked)} requests of {TOKENS} tokens, {ties} ties within {TIE}")
    assert ties <= len(asked) * TOKENS // 200
