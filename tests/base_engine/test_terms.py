"""Everything an adapter may be besides plain LoRA, in mixed batches, against PEFT row by row."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from adapters.pages import ResidentAdapter
from adapters.terms import Affine, ReplacedRows
from base_engine.attention import KVCache, StepAttention
from base_engine.kernels.segments import Run, Segments
from base_engine.model import Decoder
from base_engine.request import GenerateRequest, SamplingParams
from base_engine.sequence import Chunk, Sequence
from base_engine.terms import StepTerms
from tests.base_engine.peft_resident import random_peft, resident
from tests.base_engine.workload import Layout
from tests.tiny import tiny_base

# PEFT's advice to trainers, about configs that are right as they are.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "`lora_bias=True` was passed but the targeted layer",
        "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter",
        "The following (rank|alpha)_pattern keys did not match any targeted module",
    )
]

QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BIG = 324

#: Family and adapter: `random_peft`'s arguments.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {**QV, "use_dora": True}),
    ("llama-bias", {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "bias": "all"}),
    ("llama", {**QV, "lora_bias": True}),
    ("llama-bias", {**QV, "bias": "all"}),
    ("llama-bias", {**QV, "bias": "lora_only", "lora_bias": True}),
    ("qwen2", {"target_modules": "all-linear", "bias": "all", "use_dora": True}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    ("gemma", {"target_modules": ["embed_tokens", "q_proj"]}),
    ("gemma", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    ("llama", {**QV, "modules_to_save": ["lm_head", "embed_tokens"]}),
    ("llama", {"target_modules": ["q_proj", "lm_head"], "retrained": ["q_proj", "lm_head"]}),
    ("llama-tied", {**QV, "modules_to_save": ["embed_tokens"]}),
    ("gemma", {**QV, "modules_to_save": ["embed_tokens", "norm"]}),
    ("gemma2", {**QV, "modules_to_save": ["lm_head"]}),
    ("llama", {**QV, "modules_to_save": ["input_layernorm", "mlp"]}),
    ("qwen3", {**QV, "modules_to_save": ["q_norm", "k_norm"]}),
    ("phi3", {"target_modules": ["qkv_proj"], "modules_to_save": ["gate_up_proj"]}),
    ("llama", {**QV, "trainable_token_indices": [5, 97, 200]}),
    ("llama-tied", {**QV, "trainable_token_indices": [5, 97, 200]}),
    ("gemma", {**QV, "trainable_token_indices": [97, 100]}),
    ("llama", {**QV, "trainable_token_indices": {"embed_tokens": [97], "lm_head": [5, 99]}}),
    ("llama", {**QV, "vocab_size": BIG}),
    ("llama-tied", {**QV, "vocab_size": BIG}),
    ("gemma2", {**QV, "vocab_size": BIG, "modules_to_save": ["lm_head"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head"], "vocab_size": BIG}),
    ("llama", {**QV, "vocab_size": BIG, "trainable_token_indices": [5, 322]}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    (
        "gpt2",
        {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True, "use_dora": True},
    ),
    ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    ("gpt2", {"target_modules": ["c_fc"], "fan_in_fan_out": True, "modules_to_save": ["wpe"]}),
    ("mixtral", {**QV, "target_parameters": EXPERTS}),
    ("mixtral", {**QV, "target_parameters": ["mlp.gate.weight"]}),
    ("mixtral", {**QV, "modules_to_save": ["gate", "experts"]}),
    ("mixtral", {**QV, "target_parameters": EXPERTS[1:], "modules_to_save": ["gate"]}),
    ("qwen2-moe", {"target_modules": "all-linear", "target_parameters": EXPERTS[:1]}),
    ("qwen3-moe", {**QV, "target_parameters": EXPERTS, "use_rslora": True}),
    ("aria", {**QV, "target_parameters": EXPERTS}),
    ("llama", {"target_modules": [], "target_parameters": ["mlp.up_proj.weight"]}),
]


@lru_cache(maxsize=16)
def base_folder(root: Path, family: str) -> Path:
    if family != "aria":
        return tiny_base(root / family, family)
    torch.manual_seed(0)
    # The only experts stored [experts, in, out] whose attention can be served.
    sizes: dict[str, Any] = dict(
        vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config = CONFIG_MAPPING["aria_text"](**sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter.data, std=0.12)
    model.save_pretrained(root / family)
    return root / family


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("terms")


def load(folder: Path) -> Decoder:
    return Decoder.load(folder, name=None, dtype="float32", device="cpu")


def plain(folder: Path) -> Any:
    return copy.deepcopy(saved(folder))


@lru_cache(maxsize=16)
def saved(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def logits_of(model: Any, ids: Seq[int]) -> Tensor:
    found: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return found


def step(
    decoder: Decoder, buffer: Tensor, rows: Seq[tuple[Seq[int], ResidentAdapter | None]]
) -> list[Tensor]:
    """The logits at every position of each prompt, from one step with all of them."""
    blocks = iter(range(1000))
    cache = KVCache(decoder.kv_shapes, 100, 4, decoder.dtype, decoder.device)
    chunks: list[Chunk] = []
    runs: list[Run] = []
    ids: list[int] = []
    positions: list[int] = []
    for prompt, adapter in rows:
        request = GenerateRequest(str(len(runs)), tuple(prompt), SamplingParams(1))
        sequence = Sequence(request, len(runs), 1000)
        sequence.blocks = [next(blocks) for _ in range(-(-len(prompt) // 4))]
        chunks.append(Chunk(sequence, 0, len(prompt)))
        parts = () if adapter is None else ((adapter, 1.0),)
        runs.append(Run(len(ids), len(ids) + len(prompt), parts))
        ids += prompt
        positions += range(len(prompt))
    segments = Segments.build(runs, decoder.spec, decoder.device)
    binding = decoder.binding
    binding.buffer, binding.rows, binding.head = buffer, segments, segments
    terms = StepTerms.build(runs, runs, decoder.spec)
    with nullcontext() if terms is None else terms.attached(decoder):
        logits = decoder.forward(
            torch.tensor(ids),
            torch.tensor(positions),
            torch.arange(len(ids)),
            StepAttention(cache, chunks),
        )
    if terms is not None:
        with torch.inference_mode():
            terms.hide_foreign_tokens(logits)
    assert hooks_of(decoder) == 0
    return list(torch.split(logits, [len(prompt) for prompt, _ in rows]))


def hooks_of(decoder: Decoder) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in decoder.model.modules()
    )


def prompt(seed: int, length: int, high: int = 320) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, high, (length,), generator=generator).tolist()
    return ids


@pytest.mark.parametrize(("family", "config"), CASES, ids=str)
def test_a_mixed_batch_gives_what_peft_gives(
    family: str, config: dict[str, Any], bases: Path
) -> None:
    folder = base_folder(bases, family)
    decoder = load(folder)
    kept = {name: p.clone() for name, p in decoder.model.named_parameters()}
    layout = Layout(decoder.spec, slots=8)
    other_config: dict[str, Any] = {
        "target_modules": "all-linear",
        "fan_in_fan_out": family == "gpt2",
    }
    models = [
        random_peft(plain(folder), 1, **config),
        random_peft(plain(folder), 2, **other_config),
        random_peft(plain(folder), 3, **config),
    ]
    adapters = [resident(model, decoder, layout) for model in models]
    assert adapters[0].terms or family == "gpt2"
    own = [5, 97, 99, 200, *prompt(1, 9)] + ([320, 323, 322] if "vocab_size" in config else [])
    rows: list[tuple[list[int], int | None]] = [
        (prompt(2, 6), None), (own, 0), (prompt(4, 1), 0), (prompt(5, 5), 1),
        (prompt(6, 4), None), (own[::-1], 2), (prompt(7, 3), None),
    ]  # fmt: skip
    found = step(
        decoder, layout.buffer, [(ids, None if n is None else adapters[n]) for ids, n in rows]
    )
    base = plain(folder)
    for (ids, n), logits in zip(rows, found, strict=True):
        expected = logits_of(base if n is None else models[n], ids)
        width = expected.shape[1]
        torch.testing.assert_close(logits[:, :width], expected, atol=1e-4, rtol=0)
        assert bool((logits[:, width:] == -torch.inf).all())
        if n in (0, 2):
            assert (expected[:, :320] - logits_of(base, [i % 320 for i in ids])).abs().max() > 0.01
    alone = step(decoder, layout.buffer, [(ids, None) for ids, _ in rows if max(ids) < 320])
    assert all(logits.shape[1] == 320 for logits in alone)
    assert all(torch.equal(p, kept[name]) for name, p in decoder.model.named_parameters())


@pytest.mark.parametrize(
    "config",
    [
        {**QV, "use_dora": True},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {**QV, "modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"]},
    ],
    ids=str,
)
def test_base_rows_are_bit_equal_to_a_step_of_the_base_alone(
    config: dict[str, Any], bases: Path
) -> None:
    folder = base_folder(bases, "llama")
    decoder = load(folder)
    layout = Layout(decoder.spec, slots=8)
    adapter = resident(random_peft(plain(folder), 1, **config), decoder, layout)
    prompts = [prompt(seed, 7) for seed in range(4)]
    mixed = step(
        decoder, layout.buffer, [(ids, (None, adapter)[i % 2]) for i, ids in enumerate(prompts)]
    )
    alone = step(decoder, layout.buffer, [(ids, None) for ids in prompts])
    for i in (0, 2):
        assert torch.equal(mixed[i], alone[i])
        assert not torch.equal(mixed[i + 1], alone[i + 1])


def test_without_terms_there_is_nothing_to_attach(bases: Path) -> None:
    folder = base_folder(bases, "llama")
    decoder = load(folder)
    layout = Layout(decoder.spec, slots=8)
    adapter = resident(random_peft(plain(folder), 1, **QV), decoder, layout)
    assert not adapter.terms
    runs = [Run(0, 3, ((adapter, 1.0),)), Run(3, 5, ())]
    assert StepTerms.build(runs, runs, decoder.spec) is None


def test_only_the_modules_concerned_are_hooked(bases: Path) -> None:
    decoder = load(base_folder(bases, "llama"))
    path = "model.layers.1.self_attn.q_proj"
    adapter = ResidentAdapter("0" * 64, 0, {}, {path: (Affine(None, torch.ones(64)),)})
    terms = StepTerms.build([Run(0, 3, ((adapter, 1.0),))], [], decoder.spec)
    assert terms is not None
    with terms.attached(decoder):
        assert hooks_of(decoder) == len(decoder.model.get_submodule(path)._forward_hooks) == 1
    assert hooks_of(decoder) == 0


def test_nothing_is_left_after_a_step_that_fails(bases: Path) -> None:
    folder = base_folder(bases, "llama")
    decoder = load(folder)
    layout = Layout(decoder.spec, slots=8)
    path = "model.layers.1.mlp.up_proj"
    broken = ResidentAdapter(
        "0" * 64,
        0,
        {},
        {
            "model.embed_tokens": (ReplacedRows((5,), torch.ones(1, 64)),),
            path: (Affine(torch.ones(7), None), Affine(torch.ones(128), torch.ones(2, 3, 5))),
        },
    )
    rows = [(prompt(1, 5), None), (prompt(2, 4), broken)]
    before = step(decoder, layout.buffer, [(ids, None) for ids, _ in rows])
    with pytest.raises(RuntimeError):
        step(decoder, layout.buffer, rows)
    assert hooks_of(decoder) == 0
    after = step(decoder, layout.buffer, [(ids, None) for ids, _ in rows])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_terms_where_rows_cannot_be_told_apart_are_an_error(bases: Path) -> None:
    decoder = load(base_folder(bases, "llama"))
    adapter = ResidentAdapter("0" * 64, 0, {}, {"model.layers.0.mlp": (Affine(None, None),)})
    terms = StepTerms.build([Run(0, 3, ((adapter, 1.0),))], [], decoder.spec)
    assert terms is not None
    with pytest.raises(KeyError, match=r"model.layers.0.mlp"), terms.attached(decoder):
        raise AssertionError("attached")
    assert hooks_of(decoder) == 0


def test_only_the_experts_hit_are_merged(bases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base_folder(bases, "mixtral")
    decoder = load(folder)
    layout = Layout(decoder.spec, slots=8)
    model = random_peft(plain(folder), 1, **QV, target_parameters=EXPERTS)
    adapter = resident(model, decoder, layout)
    merged: list[int] = []
    baddbmm = torch.baddbmm

    def counted(stack: Tensor, *args: Tensor, alpha: float) -> Tensor:
        merged.append(len(stack))
        return baddbmm(stack, *args, alpha=alpha)

    monkeypatch.setattr(torch, "baddbmm", counted)
    ids = prompt(4, 1)
    [found] = step(decoder, layout.buffer, [(ids, adapter)])
    assert merged == [2] * 4, "two stacks in each of two layers, two experts for the one token"
    monkeypatch.undo()
    torch.testing.assert_close(found, logits_of(model, ids), atol=1e-4, rtol=0)


def test_modules_are_left_as_they_were(bases: Path) -> None:
    folder = base_folder(bases, "llama")
    decoder = load(folder)
    layout = Layout(decoder.spec, slots=8)
    adapter = resident(
        random_peft(plain(folder), 1, **QV, modules_to_save=["lm_head", "mlp"]), decoder, layout
    )
    modules: dict[str, nn.Module] = dict(decoder.model.named_modules())
    kept = {path: dict(vars(module)) for path, module in modules.items()}
    step(decoder, layout.buffer, [(prompt(1, 5), adapter)])
    for path, module in modules.items():
        assert {k: id(v) for k, v in vars(module).items()} == {
            k: id(v) for k, v in kept[path].items()
        }
