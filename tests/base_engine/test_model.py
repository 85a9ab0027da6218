"""The resident base: every family gives what transformers gives, whatever the batch looks like."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MambaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from base_engine.attention import KVCache, StepAttention
from base_engine.errors import ModelUnsupported
from base_engine.model import Decoder
from base_engine.request import GenerateRequest, SamplingParams
from base_engine.row_layout import RowLayout, learned_layouts
from base_engine.sequence import Chunk, Sequence
from tests.tiny import FAMILIES, make_adapter, oracle_logprobs, tiny_base

#: Families beyond those that tests/tiny.py can adapt.
OTHER_FAMILIES = ("gemma3_text", "gpt2", "gpt_neox", "mixtral", "olmo", "qwen3_moe")

BLOCK = 4


def load(model: Path) -> Decoder:
    return Decoder.load(model, name=None, dtype="float32", device="cpu")


def run_in_chunks(decoder: Decoder, prompts: list[list[int]], seed: int) -> list[torch.Tensor]:
    """Log-probabilities at every position of each prompt, from ragged steps of random chunks."""
    rng = random.Random(seed)
    free = list(range(sum(-(-len(prompt) // BLOCK) for prompt in prompts)))
    rng.shuffle(free)
    cache = KVCache(decoder.kv_shapes, len(free), BLOCK, decoder.dtype, decoder.device)
    # Whatever was there before must not matter.
    for tensor in [*cache.keys.values(), *cache.values.values()]:
        tensor.fill_(torch.nan)
    sequences = []
    for index, prompt in enumerate(prompts):
        request = GenerateRequest(str(index), tuple(prompt), SamplingParams(1))
        sequence = Sequence(request, index, 1000)
        sequence.blocks = [free.pop() for _ in range(-(-len(prompt) // BLOCK))]
        sequences.append(sequence)
    rows: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(prompts))}
    while unfinished := [s for s in sequences if s.num_computed < len(s.tokens)]:
        chunks = []
        for sequence in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            left = len(sequence.tokens) - sequence.num_computed
            chunks.append(
                Chunk(sequence, sequence.num_computed, min(left, rng.choice([1, 1, 5, 40])))
            )
        ids = [t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        logits = decoder.forward(
            torch.tensor(ids),
            torch.tensor(positions),
            torch.arange(len(ids)),
            StepAttention(cache, chunks),
        )
        parts = torch.split(logits.log_softmax(-1), [chunk.count for chunk in chunks])
        for chunk, part in zip(chunks, parts, strict=True):
            rows[chunk.sequence.arrival].append(part)
            chunk.sequence.num_computed += chunk.count
    return [torch.cat(parts) for parts in rows.values()]


def save_other(folder: Path, family: str) -> Path:
    sizes: dict[str, Any] = dict(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    extra: dict[str, dict[str, Any]] = {
        "gemma3_text": dict(num_key_value_heads=2, head_dim=16, sliding_window=16),
        "gpt_neox": {},
        "gpt2": {},
        "mixtral": dict(num_key_value_heads=2),
        "olmo": dict(num_key_value_heads=2),
        "qwen3_moe": dict(
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
    }
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**(sizes | extra[family]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_ragged_chunks_equal_one_plain_run(family: str, tmp_path: Path) -> None:
    base = (
        tiny_base(tmp_path / family, family)
        if family in FAMILIES
        else save_other(tmp_path / family, family)
    )
    decoder = load(base)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 259) for _ in range(n)] for n in (1, 2, 17, 45, 70)]
    for prompt, got in zip(prompts, run_in_chunks(decoder, prompts, seed=2), strict=True):
        torch.testing.assert_close(got, oracle_logprobs(base, None, prompt), atol=2e-5, rtol=0)


def test_the_spec_names_every_linear_with_its_sizes(llama_base: Path) -> None:
    spec = load(llama_base).spec
    sizes = {t.name: (t.in_features, t.out_features, len(t.modules)) for t in spec.targets}
    assert sizes == {
        "self_attn.q_proj": (64, 64, 2),
        "self_attn.k_proj": (64, 32, 2),
        "self_attn.v_proj": (64, 32, 2),
        "self_attn.o_proj": (64, 64, 2),
        "mlp.gate_proj": (64, 128, 2),
        "mlp.up_proj": (64, 128, 2),
        "mlp.down_proj": (128, 64, 2),
        "lm_head": (64, 320, 1),
    }
    assert spec.output_module == "lm_head" and not spec.tied_head
    assert spec.name == llama_base.name and spec.max_positions == 512 and spec.vocab_size == 320
    assert spec.targets[0].modules[1] == "model.layers.1.self_attn.q_proj"


def test_a_tied_head_is_told(tmp_path: Path) -> None:
    assert load(tiny_base(tmp_path / "tied", "llama-tied")).spec.tied_head


def test_router_and_expert_weights_are_not_offered_to_adapters(tmp_path: Path) -> None:
    spec = load(save_other(tmp_path / "mixtral", "mixtral")).spec
    assert {t.name.rpartition(".")[2] for t in spec.targets} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "lm_head",
    }


def test_the_spec_offers_every_parameter_that_sees_the_batch_row_by_row(tmp_path: Path) -> None:
    for family in ("llama-tied", "qwen3", "gemma2", "gpt2", "qwen2-moe"):
        decoder = load(tiny_base(tmp_path / family, family))
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float32)
        shapes = {n: tuple(p.shape) for n, p in plain.named_parameters(remove_duplicate=False)}
        assert decoder.spec.parameters == shapes
        for name, parameter in plain.named_parameters(remove_duplicate=False):
            assert torch.equal(decoder.parameter(name), parameter)
        assert decoder.spec.embedding == (
            "transformer.wte" if family == "gpt2" else "model.embed_tokens"
        )
        assert decoder.spec.model_type == plain.config.model_type


def test_gpt2s_linears_are_offered_with_their_sizes(tmp_path: Path) -> None:
    spec = load(tiny_base(tmp_path / "gpt2", "gpt2")).spec
    assert {t.name: (t.in_features, t.out_features) for t in spec.targets} == {
        "attn.c_attn": (64, 192),
        "attn.c_proj": (64, 64),
        "mlp.c_fc": (64, 256),
        "mlp.c_proj": (256, 64),
        "lm_head": (64, 320),
    }


def test_linears_that_see_all_tokens_in_two_dimensions_are_offered(tmp_path: Path) -> None:
    spec = load(tiny_base(tmp_path / "moe", "qwen2-moe")).spec
    names = {t.name for t in spec.targets}
    assert {"mlp.shared_expert.gate_proj", "mlp.shared_expert_gate"} <= names


def test_modules_that_mix_rows_are_not_offered() -> None:
    class Causal(nn.Module):
        """Looks like a row-wise module by its shapes, but adds up the rows before."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x.cumsum(1)

    model = nn.Sequential(
        nn.LayerNorm(4), Causal(), nn.Conv1d(7, 7, 1), nn.Linear(4, 3), nn.Flatten(0, 1)
    )
    with learned_layouts(model, 7, None, 2) as layouts:
        model(torch.randn(1, 7, 4))
    assert set(layouts) == {"0", "3"}
    assert layouts["0"] == RowLayout((1,), {}, (1,), flat=True)


def test_fused_projections_and_their_parts_are_told(tmp_path: Path) -> None:
    split = load(tiny_base(tmp_path / "llama")).spec.fused
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    parts = {
        f"{attention}.qkv_proj": (
            (f"{attention}.q_proj", 64), (f"{attention}.k_proj", 32), (f"{attention}.v_proj", 32)
        ),
        f"{mlp}.gate_up_proj": ((f"{mlp}.gate_proj", 128), (f"{mlp}.up_proj", 128)),
    }  # fmt: skip
    assert {path: split[path] for path in parts} == parts and len(split) == 4
    whole = load(tiny_base(tmp_path / "phi3", "phi3")).spec
    assert whole.fused == split
    assert set(parts) <= set(whole.module_index)
    assert load(save_other(tmp_path / "neox", "gpt_neox")).spec.fused == {}


def test_attention_sinks_are_refused_rather_than_left_out(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sinks")
    with pytest.raises(ModelUnsupported, match="s_aux"):
        load(tmp_path / "sinks")


def test_models_without_attention_layers_are_refused(tmp_path: Path) -> None:
    config = MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises((ModelUnsupported, ValueError)):
        load(tmp_path / "mamba")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rope_that_depends_on_the_batch_keeps_to_the_length_where_it_does_not(
    rope: dict[str, object], tmp_path: Path
) -> None:
    base = tiny_base(
        tmp_path / "rope", max_position_embeddings=256, rope_parameters=rope | {"rope_theta": 1e4}
    )
    decoder = load(base)
    assert decoder.spec.max_positions == 64
    prompt = list(range(3, 63))
    [got] = run_in_chunks(decoder, [prompt], seed=0)
    torch.testing.assert_close(got, oracle_logprobs(base, None, prompt), atol=2e-5, rtol=0)


def test_all_end_tokens_of_the_generation_config_count(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "llama")
    config = base / "generation_config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 2', '"eos_token_id": [2, 260]'))
    assert load(base).eos_ids >= {2, 260}


def test_a_missing_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError), match="nowhere"):
        load(tmp_path / "nowhere")


def test_loading_keeps_the_weights_bit_for_bit(llama_base: Path) -> None:
    decoder = load(llama_base)
    plain = AutoModelForCausalLM.from_pretrained(llama_base, dtype=torch.float32)
    loaded = dict(decoder.model.named_parameters())
    for name, parameter in plain.named_parameters():
        found = loaded.get(name)
        if found is None:  # a LoraLinear holds the original one level down
            found = next(p for n, p in loaded.items() if n.replace(".base.", ".") == name)
        assert torch.equal(found, parameter)
    assert isinstance(decoder.model.config, LlamaConfig)


def test_a_base_is_told_by_its_weights_in_whatever_dtype(tmp_path: Path) -> None:
    one, other = (tiny_base(tmp_path / f"b{seed}", seed=seed) for seed in (1, 2))
    digests = {
        Decoder.load(one, name=name, dtype=dtype, device="cpu").spec.digest
        for name, dtype in [("a", "float32"), ("b", "bfloat16"), ("c", "float16")]
    }
    assert len(digests) == 1
    assert load(other).spec.digest not in digests


def test_a_little_training_makes_another_base(tmp_path: Path) -> None:
    one = tiny_base(tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
    generator = torch.Generator().manual_seed(99)
    for parameter in model.parameters():
        step = torch.randn(parameter.shape, generator=generator) * 1e-3
        parameter.data += step * parameter.abs().mean()
    model.save_pretrained(tmp_path / "trained")
    assert load(tmp_path / "trained").spec.digest != load(one).spec.digest


def test_a_base_folder_that_holds_an_adapter_is_refused(llama_base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(llama_base, folder)
    make_adapter(llama_base, folder, seed=1)
    with pytest.raises(ModelUnsupported, match="both holds an adapter"):
        Decoder.load(folder, name=None, dtype="float32", device="cpu")
