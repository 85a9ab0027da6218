from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, AdapterManifest, BaseSpec
from adapters.pages import page_elements
from adapters.peft_files import content_digest
from adapters.validation import MAX_LISTED, Limits, validate
from tests.adapters.lora_files import (
    A0,
    B0,
    Q0,
    Q1,
    codes_of,
    edit_config,
    edit_weights,
    spec_of,
    violations_of,
)
from tests.tiny import make_adapter, signature_adapter, tiny_base

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ALL},
        {"target_modules": r".*layers\.1\..*(q|v)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": [Q0, "model.layers.1.mlp.down_proj"]},
        {"target_modules": ALL, "rank_pattern": {"layers.1.self_attn.q_proj": 16}},
        {
            "target_modules": ALL,
            "rank_pattern": {r".*\.1\..*": 3, "q_proj": 5},
            "alpha_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 1.5},
        },
        {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
        {"use_rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 5}},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.0\..*"},
        {"target_modules": ["q_proj"], "bias": "all"},
        {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
        {"target_modules": ["q_proj"], "lora_alpha": 8.5},
        {"target_modules": ["q_proj"], "lora_alpha": 0},
        *({"target_modules": ["q_proj"], "r": r} for r in (1, 2, 3, 5, 7, 8, 17, 31, 48, 64)),
    ],
)
def test_ranks_scales_and_tensors_are_those_of_peft(
    base: Path, spec: BaseSpec, tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = make_adapter(base, tmp_path / "adapter", seed=2, **config)

    manifest = validate(folder, spec, Limits())

    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder)
    )
    layers: dict[str, Any] = {
        name: module
        for name, module in model.base_model.model.named_modules()
        if isinstance(module, LoraLayer)
    }
    tensors = load_file(folder / WEIGHTS_FILE)
    assert {m.module for m in manifest.modules} == set(layers)
    for module in manifest.modules:
        layer = layers[module.module]
        assert module.rank == layer.r["default"]
        assert module.scale == layer.scaling["default"]
        assert torch.equal(tensors.pop(module.a_key), layer.lora_A["default"].weight)
        assert torch.equal(tensors.pop(module.b_key), layer.lora_B["default"].weight)
    assert not tensors


def test_manifest_describes_the_adapter(adapter: Path, spec: BaseSpec) -> None:
    edit_config(adapter, base_model_name_or_path="other/model", fan_in_fan_out=True)

    manifest = validate(adapter, spec, Limits(), notes=["README.md was ignored"])

    order = [spec.module_index[module.module] for module in manifest.modules]
    assert order == sorted(order)
    assert manifest.digest == content_digest(adapter)
    assert manifest.parameters == 2 * (2 * 4 * 64 + 4 * 64 + 4 * 32)
    assert manifest.weights_bytes == 4 * manifest.parameters
    assert (manifest.dtypes, manifest.max_rank) == (("F32",), 4)
    assert manifest.base_model == "other/model"
    note, fan, other = manifest.warnings
    assert note == "README.md was ignored"
    assert fan.startswith("fan_in_fan_out")
    assert "other/model" in other and "org/tiny" in other
    assert AdapterManifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_a_base_of_the_same_last_name_is_no_cause_to_warn(adapter: Path, spec: BaseSpec) -> None:
    edit_config(adapter, base_model_name_or_path="/data/models/Tiny/", revision="main")
    assert validate(adapter, spec, Limits()).warnings == ()


def test_an_adapter_of_a_quantised_base_is_served_on_the_whole_one(
    adapter: Path, spec: BaseSpec
) -> None:
    edit_config(adapter, base_model_name_or_path="org/tiny-bnb-4bit")
    (warning,) = validate(adapter, spec, Limits()).warnings
    assert "tiny-bnb-4bit" in warning


def test_a_pattern_that_applies_to_nothing_is_warned_about(adapter: Path, spec: BaseSpec) -> None:
    edit_config(adapter, rank_pattern={"nothing": 4}, alpha_pattern={"q_proj": 8, "layers.0": 2})
    edit_config(adapter, base_model_name_or_path=None)
    first, second = validate(adapter, spec, Limits()).warnings
    assert "'nothing' of rank_pattern" in first
    assert "'layers.0' of alpha_pattern" in second


@pytest.mark.parametrize("literal", ["all-linear", "ALL-LINEAR"])
def test_all_linear_means_all_but_the_head(
    base: Path, spec: BaseSpec, tmp_path: Path, literal: str
) -> None:
    folder = make_adapter(base, tmp_path / "adapter", seed=1, target_modules=ALL)
    edit_config(folder, target_modules=literal)
    assert len(validate(folder, spec, Limits()).modules) == 14
    spare = replace(spec, output_module=None)
    assert codes_of(folder, spare) == {"incomplete_adapter"}


def test_a_head_that_is_tied_can_be_adapted(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", "llama-tied")
    with pytest.warns(UserWarning, match="tie"):
        folder = make_adapter(base, tmp_path / "adapter", seed=1, target_modules=["lm_head"])
    manifest = validate(folder, spec_of(base), Limits())
    assert [module.module for module in manifest.modules] == ["lm_head"]


def test_signature_adapters_are_accepted(base: Path, spec: BaseSpec, tmp_path: Path) -> None:
    folder = signature_adapter(base, tmp_path / "adapter", token=70)
    assert validate(folder, spec, Limits()).max_rank == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(
    adapter: Path, spec: BaseSpec, dtype: torch.dtype, value: float
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[B0] = tensors[B0].to(dtype)
        tensors[B0][-1, -1] = value

    edit_weights(adapter, spoil)
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("non_finite_weights", B0)
    assert "1 values" in violation.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_and_smallest_finite_values_pass(
    adapter: Path, spec: BaseSpec, dtype: torch.dtype
) -> None:
    info = torch.finfo(dtype)
    values = [info.max, info.min, info.tiny, -0.0]
    edit_weights(adapter, lambda t: t.update({B0: torch.tensor([values] * 64, dtype=dtype)}))
    validate(adapter, spec, Limits())


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("served", ["float32", "float16", "bfloat16"])
def test_values_that_the_served_type_cannot_hold_are_refused(
    adapter: Path, spec: BaseSpec, stored: torch.dtype, served: str
) -> None:
    """Both signs of every value around the largest numbers of the three types."""
    largest = [torch.finfo(t).max for t in (torch.float32, torch.float16, torch.bfloat16)]
    bits = torch.tensor([m for m in largest if m <= torch.finfo(stored).max], dtype=stored)
    whole = torch.int32 if stored == torch.float32 else torch.int16
    steps = [*range(-3, 4), *(s * 2**15 + d for s in (-1, 0, 1) for d in (-1, 0, 1))]
    steps += [2**12 - 1, 2**12, 2**12 + 1] if stored == torch.float32 else []
    near = (bits.view(whole)[:, None] + torch.tensor(steps, dtype=torch.int32)).flatten()
    values = near.to(whole).view(stored)
    for value in values[values.isfinite()]:
        for number in (value, -value):
            b = number.repeat(64, 4)
            edit_weights(adapter, partial(dict.update, **{B0: b}))
            limits = Limits(dtype=served)
            if number.to(getattr(torch, served)).isfinite():
                validate(adapter, spec, limits)
            else:
                (violation,) = violations_of(adapter, spec, limits)
                assert (violation.code, violation.subject) == ("non_finite_weights", B0)
                assert f"256 values that are NaN, infinite or too large for {served}" in (
                    violation.message
                )


def test_a_b_of_zeros_passes(adapter: Path, spec: BaseSpec) -> None:
    edit_weights(adapter, lambda t: [v.zero_() for k, v in t.items() if "lora_B" in k])
    validate(adapter, spec, Limits())


def test_a_targeted_module_without_tensors_is_refused(adapter: Path, spec: BaseSpec) -> None:
    edit_weights(adapter, lambda t: (t.pop(A0), t.pop(B0)))
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("incomplete_adapter", Q0)


def test_a_module_that_the_targets_leave_out_is_refused(adapter: Path, spec: BaseSpec) -> None:
    edit_config(adapter, target_modules=["q_proj"])
    found = violations_of(adapter, spec)
    assert {v.code for v in found} == {"module_not_targeted"}
    assert {v.subject for v in found} == {
        f"model.layers.{layer}.self_attn.v_proj" for layer in (0, 1)
    }


def test_a_layer_that_does_not_exist_is_refused(adapter: Path, spec: BaseSpec) -> None:
    edit_config(adapter, layers_to_transform=[0, 1, 9])
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("layer_out_of_range", "layers_to_transform")
    assert "layer 9" in violation.message and "0 to 1" in violation.message
    edit_config(adapter, layers_to_transform=[0, 1], layers_pattern="h")
    assert "layer_out_of_range" in codes_of(adapter, spec)


def test_rank_in_config_and_file_must_agree(adapter: Path, spec: BaseSpec) -> None:
    edit_config(adapter, r=8)
    found = violations_of(adapter, spec)
    assert {v.code for v in found} == {"rank_mismatch"}
    assert found[0].message == "has rank 4 in the file, but 8 in the config"
    edit_config(adapter, r=4, rank_pattern={"layers.1.self_attn.q_proj": 2})
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("rank_mismatch", Q1)
    edit_config(adapter, r=1_000_000_000, rank_pattern={})
    assert codes_of(adapter, spec) == {"rank_mismatch"}


def test_ranks_above_the_limit_are_refused_by_module(
    base: Path, spec: BaseSpec, tmp_path: Path
) -> None:
    pattern = {"layers.1.self_attn.q_proj": 16}
    folder = make_adapter(base, tmp_path / "a", seed=1, rank_pattern=pattern)
    (violation,) = violations_of(folder, spec, Limits(max_rank=8))
    assert (violation.code, violation.subject) == ("rank_over_limit", Q1)
    assert violation.message == "has rank 16; at most 8 is served"
    assert validate(folder, spec, Limits(max_rank=16)).max_rank == 16


def test_an_adapter_that_can_never_be_resident_is_refused(
    base: Path, spec: BaseSpec, tmp_path: Path
) -> None:
    pattern = {"layers.1.self_attn.q_proj": 9}
    folder = make_adapter(
        base, tmp_path / "a", seed=1, target_modules=["q_proj", "down_proj"], rank_pattern=pattern
    )
    pages = {target.name: page_elements(target) for target in spec.targets}
    need = 2 * (2 * pages["self_attn.q_proj"] + pages["mlp.down_proj"])
    validate(folder, spec, Limits(max_pages_bytes=need, element_bytes=2))
    (violation,) = violations_of(folder, spec, Limits(max_pages_bytes=need - 1, element_bytes=2))
    assert violation.code == "adapter_too_large"
    assert str(need) in violation.message and str(need - 1) in violation.message


def test_a_scale_beyond_the_limit_is_refused(adapter: Path, spec: BaseSpec) -> None:
    edit_config(adapter, lora_alpha=1e308)
    assert codes_of(adapter, spec) == {"scale_over_limit"}
    edit_config(adapter, lora_alpha=8, alpha_pattern={"layers.0.self_attn.q_proj": 4 * 65505})
    (violation,) = violations_of(adapter, spec)
    assert violation.subject == Q0


@pytest.mark.parametrize(
    "config",
    [
        AdaLoraConfig(target_modules=["q_proj"], init_r=4, total_step=10, task_type="CAUSAL_LM"),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    ],
)
def test_other_methods_are_refused(base: Path, spec: BaseSpec, tmp_path: Path, config: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(model, config).save_pretrained(str(tmp_path))
    assert "unsupported_peft_type" in codes_of(tmp_path, spec)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(adapter: Path, spec: BaseSpec, name: str) -> None:
    (adapter / name).rename(adapter / "step-250.safetensors")
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("missing_file", name)


def test_all_that_is_wrong_with_both_files_is_reported_at_once(
    adapter: Path, spec: BaseSpec
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[B0][0, 0] = float("nan")
        tensors["extra"] = torch.ones(1)
        del tensors[f"base_model.model.{Q1}.lora_A.weight"]

    edit_weights(adapter, spoil)
    edit_config(adapter, r=3, use_qalora=True, future=1)
    assert codes_of(adapter, spec) == {
        "non_finite_weights",
        "unexpected_key",
        "incomplete_adapter",
        "rank_mismatch",
        "unsupported_feature",
        "unknown_field",
    }
    (adapter / CONFIG_FILE).write_text("{")
    assert codes_of(adapter, spec) == {
        "invalid_adapter_config",
        "non_finite_weights",
        "unexpected_key",
        "incomplete_adapter",
    }
    edit = json.dumps({"peft_type": "LORA", "r": 0, "lora_alpha": 1, "target_modules": []})
    (adapter / CONFIG_FILE).write_text(edit)
    (adapter / WEIGHTS_FILE).write_bytes(b"")
    assert codes_of(adapter, spec) == {"invalid_adapter_config", "corrupt_adapter"}


def test_a_flood_of_violations_is_counted_not_listed(adapter: Path, spec: BaseSpec) -> None:
    edit_weights(adapter, lambda t: t.update({f"x{i}": torch.ones(1) for i in range(5000)}))
    found = violations_of(adapter, spec)
    assert len(found) == MAX_LISTED + 1
    assert found[-1].message == f"and {5000 - MAX_LISTED} more of this kind"


def test_memory_does_not_grow_with_the_file(base: Path, spec: BaseSpec, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"])
    big = 200_000

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors[A0] = torch.zeros(big, 64)
        tensors[A0][-1, -1] = float("inf")

    edit_weights(folder, widen)
    tracemalloc.start()
    found = codes_of(folder, spec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "non_finite_weights" in found
    assert peak < 16 << 20 < big * 64 * 4
