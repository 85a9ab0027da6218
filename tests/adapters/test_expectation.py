from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from adapters.validation import Limits, validate
from tests.adapters.lora_files import (
    edit_config,
    edit_weights,
    parameters_of,
    rename_keys,
    spec_of,
    violations_of,
)
from tests.tiny import make_adapter, tiny_base

# PEFT advises against tied embeddings in an adapter.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    # It looks for the patterns of parameters among modules only.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("mixture"), "mixtral")


def test_parameters_of_one_module_are_told_apart_as_peft_nests_them(mixture: Path) -> None:
    names = ["down_proj", "mlp.experts.gate_up_proj"]
    model: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(mixture),
        LoraConfig(r=2, target_modules=[], target_parameters=names),
    )
    outer = model.base_model.model.model.layers[0].mlp.experts
    assert (outer.parameter_name, outer.base_layer.parameter_name) == ("down_proj", "gate_up_proj")


def test_wrappers_beyond_those_of_the_config_are_refused(mixture: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": [], "target_parameters": ["experts.down_proj"]}
    folder = make_adapter(mixture, tmp_path / "a", seed=1, **options)
    assert len(validate(folder, spec_of(mixture), Limits()).parameter_loras) == 2
    rename_keys(folder, lambda name: name.replace(".lora_", ".base_layer.lora_"))
    found = violations_of(folder, spec_of(mixture))
    assert {v.code for v in found} == {"module_not_targeted", "incomplete_adapter"}


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        ({"target_parameters": ["norm.weight"]}, "model.norm.weight"),
        (
            {"target_parameters": ["q_proj.weight"]},
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ({"target_modules": ["q_proj", "norm"]}, "model.norm"),
        ({"target_modules": ["q_proj", "w1", "w2", "w3"]}, "target_modules"),
        ({"target_modules": r".*\.q_proj"}, "target_modules"),
        ({"target_modules": "all-linear"}, "target_modules"),
        ({"modules_to_save": ["proj"]}, "model.layers.0.self_attn.q_proj"),
        ({"modules_to_save": ["attn"]}, "model.layers.0.self_attn"),
        ({"modules_to_save": ["mlp", "experts"]}, "model.layers.0.mlp.experts"),
        ({"trainable_token_indices": {"norm": [3]}}, "trainable_token_indices"),
        ({"trainable_token_indices": {"nothing": [3]}}, "trainable_token_indices"),
        (
            {"trainable_token_indices": {"lm_head": [3]}, "modules_to_save": ["lm_head"]},
            "trainable_token_indices",
        ),
        (
            {"target_modules": ["q_proj", "embed_tokens"], "trainable_token_indices": [3]},
            "trainable_token_indices",
        ),
        (
            {"trainable_token_indices": {"embed_tokens": [3], "model.embed_tokens": [4]}},
            "trainable_token_indices",
        ),
    ],
)
def test_what_peft_would_not_do_as_the_config_says_is_refused(
    mixture: Path, tmp_path: Path, change: dict[str, Any], subject: str
) -> None:
    folder = make_adapter(mixture, tmp_path / "a", seed=1, target_modules=["q_proj"])
    edit_config(folder, **change)
    found = violations_of(folder, spec_of(mixture))
    assert ("unsupported_target", subject) in {(v.code, v.subject) for v in found}


def test_a_tied_head_cannot_have_token_rows_and_lora(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", "llama-tied")
    options: dict[str, Any] = {
        "target_modules": ["q_proj", "lm_head"],
        "trainable_token_indices": [3, 5],
    }
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    assert ("unsupported_target", "trainable_token_indices") in {
        (v.code, v.subject) for v in violations_of(folder, spec_of(base))
    }


def test_a_transposed_weight_is_not_targeted_as_a_parameter(tmp_path: Path) -> None:
    """PEFT adds B A to the weight as it is stored: the other way round than a linear's LoRA, which
    the shapes of a square one do not tell."""
    base = tiny_base(tmp_path / "base", "gpt2")
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["attn.c_proj"])
    edit_config(
        folder, target_modules=[], target_parameters=["attn.c_proj.weight"], fan_in_fan_out=False
    )
    found = violations_of(folder, spec_of(base))
    assert {v.code for v in found} == {"unsupported_target", "module_not_targeted"}
    assert "target its module instead" in found[0].message


@pytest.mark.parametrize("targets", [[], ["nothing"], "nothing"])
def test_an_adapter_that_adapts_nothing_is_refused(
    tmp_path: Path, adapter: Path, spec: Any, targets: Any
) -> None:
    edit_config(adapter, target_modules=targets)
    assert ("no_target", "target_modules") in {
        (v.code, v.subject) for v in violations_of(adapter, spec)
    }


def test_experts_by_their_old_names_are_served_once_peft_has_saved_them_again(
    mixture: Path, tmp_path: Path
) -> None:
    """The advice of the refusal, followed: an adapter of transformers 4, expert by expert."""
    old = make_adapter(mixture, tmp_path / "old", seed=1, target_modules=["q_proj"])
    edit_config(old, target_modules=["q_proj", "w1", "w2", "w3"])
    generator = torch.Generator().manual_seed(5)

    def add_experts(tensors: dict[str, torch.Tensor]) -> None:
        for layer in (0, 1):
            for expert in range(4):
                stem = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}"
                for name, wide, out in (("w1", 64, 128), ("w3", 64, 128), ("w2", 128, 64)):
                    a = torch.randn(4, wide, generator=generator)
                    b = torch.randn(out, 4, generator=generator)
                    tensors |= {
                        f"{stem}.{name}.lora_A.weight": a,
                        f"{stem}.{name}.lora_B.weight": b,
                    }

    edit_weights(old, add_experts)
    assert any("save it again" in v.message for v in violations_of(old, spec_of(mixture)))

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(mixture), str(old))
    model.save_pretrained(str(tmp_path / "new"))
    manifest = validate(
        tmp_path / "new", spec_of(mixture), Limits(), parameters=parameters_of(mixture)
    )
    assert {(lora.rank, lora.experts) for lora in manifest.parameter_loras} == {(8, 4), (4, 4)}


@pytest.mark.parametrize("tokens", [[5, 6], [319]])
def test_an_activated_lora_names_its_invocation(
    base: Path, spec: Any, tmp_path: Path, tokens: list[int]
) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "alora_invocation_tokens": tokens}
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    assert validate(folder, spec, Limits()).invocation == tuple(tokens)


def test_an_invocation_outside_the_vocabulary_is_refused(adapter: Path, spec: Any) -> None:
    edit_config(adapter, alora_invocation_tokens=[5, 320])
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("token_out_of_range", "alora_invocation_tokens")


def test_an_activated_lora_changes_linears_alone(base: Path, spec: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "target_modules": ["q_proj", "embed_tokens"],
        "save_embedding_layers": False,
    }
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    edit_config(folder, alora_invocation_tokens=[5])
    (violation,) = violations_of(folder, spec)
    assert (violation.code, violation.subject) == ("invalid_combination", "model.embed_tokens")

    options = {"target_modules": ["q_proj"], "save_embedding_layers": True}
    folder = make_adapter(base, tmp_path / "b", seed=1, **options)
    edit_config(folder, alora_invocation_tokens=[5])
    name = "base_model.model.lm_head.weight"
    edit_weights(folder, lambda t: t[name].mul_(2))
    found = violations_of(folder, spec, None, parameters_of(base))
    assert [(v.code, v.subject) for v in found] == [("invalid_combination", "lm_head.weight")]
