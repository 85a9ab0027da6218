from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters.manifest import WEIGHTS_FILE, BaseSpec
from adapters.validation import Limits, validate
from tests.adapters.lora_files import (
    A0,
    B0,
    Q0,
    codes_of,
    edit_config,
    edit_weights,
    rename_keys,
    spec_of,
    violations_of,
)
from tests.tiny import make_adapter, tiny_base


def test_the_segment_with_the_adapters_name_may_stand_in_keys(
    adapter: Path, base: Path, spec: BaseSpec
) -> None:
    rename_keys(adapter, lambda name: name.replace(".weight", ".default.weight"))
    manifest = validate(adapter, spec, Limits())
    assert manifest.modules[0].a_key == A0.replace(".weight", ".default.weight")

    model: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter)
    )
    loaded = model.base_model.model.get_submodule(Q0).lora_B["default"].weight
    assert torch.equal(loaded, load_file(adapter / WEIGHTS_FILE)[manifest.modules[0].b_key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_served_dtypes_pass(base: Path, spec: BaseSpec, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_adapter(base, tmp_path / "adapter", seed=1, dtype=dtype)
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    assert validate(folder, spec, Limits()).dtypes == (name,)


def test_dtypes_may_be_mixed(adapter: Path, spec: BaseSpec) -> None:
    edit_weights(adapter, lambda t: t.update({B0: t[B0].bfloat16(), A0: t[A0].half()}))
    assert validate(adapter, spec, Limits()).dtypes == ("BF16", "F16", "F32")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_other_dtypes_are_refused_by_name(
    adapter: Path, spec: BaseSpec, dtype: torch.dtype
) -> None:
    edit_weights(adapter, lambda t: t.update({A0: t[A0].to(dtype)}))
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("unsupported_dtype", A0)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.removeprefix("base_model."),
        lambda name: "base_model.model." + name,
        lambda name: name.replace("model.layers", "language_model.layers"),
        lambda name: name.replace(
            "base_model.model.model", "base_model.model.model.language_model"
        ),
        lambda name: name.replace(".weight", ".other.weight"),
        lambda name: name.replace(".weight", ""),
        lambda name: name.replace("lora_A", "lora_down"),
    ],
)
def test_keys_of_another_form_are_refused_with_the_expected_one(
    adapter: Path, spec: BaseSpec, rename: Callable[[str], str]
) -> None:
    rename_keys(adapter, rename)
    found = [
        v for v in violations_of(adapter, spec) if v.code in ("unexpected_key", "unknown_module")
    ]
    assert any(rename(A0) == v.subject for v in found)
    assert all("base_model.model.model.layers.0." in v.message for v in found)


def test_two_names_of_one_tensor_are_refused(adapter: Path, spec: BaseSpec) -> None:
    twin = A0.replace(".weight", ".default.weight")
    edit_weights(adapter, lambda t: t.update({twin: t[A0].clone()}))
    (violation,) = violations_of(adapter, spec)
    assert violation.code == "duplicate_tensor"


@pytest.mark.parametrize("lost", [A0, B0])
def test_half_a_pair_is_refused(adapter: Path, spec: BaseSpec, lost: str) -> None:
    edit_weights(adapter, lambda t: t.pop(lost))
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("incomplete_adapter", Q0)


def test_modules_that_the_base_does_not_offer_are_refused(adapter: Path, spec: BaseSpec) -> None:
    qkv = replace(spec, targets=tuple(t for t in spec.targets if "proj" not in t.name))
    found = violations_of(adapter, qkv)
    assert {v.code for v in found} == {"unknown_module"}
    assert len(found) == 8


def test_another_base_is_refused_with_expected_and_found(spec: BaseSpec, tmp_path: Path) -> None:
    small = tiny_base(tmp_path / "small", hidden_size=32)
    folder = make_adapter(small, tmp_path / "a", seed=1, target_modules=["q_proj"])
    found = violations_of(folder, spec)
    assert {v.code for v in found} == {"shape_mismatch"}
    assert "[4, 32]" in found[0].message and "[rank, 64]" in found[0].message

    deep = tiny_base(tmp_path / "deep", num_hidden_layers=4)
    folder = make_adapter(deep, tmp_path / "b", seed=1, target_modules=["q_proj"])
    found = violations_of(folder, spec)
    assert {v.code for v in found} == {"unknown_module"}
    assert len(found) == 4


@pytest.mark.parametrize(
    "change",
    [
        {A0: torch.ones(4, 64, 1)},
        {A0: torch.ones(4)},
        {A0: torch.tensor(1.0)},
        {A0: torch.ones(64, 4)},
        {B0: torch.ones(4, 64)},
        {A0: torch.ones(8, 64)},
    ],
)
def test_tensors_of_a_wrong_shape_are_refused(
    adapter: Path, spec: BaseSpec, change: dict[str, Tensor]
) -> None:
    edit_weights(adapter, lambda t: t.update(change))
    assert codes_of(adapter, spec) == {"shape_mismatch"}


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"use_dora": True}, "unsupported_tensor"),
        ({"modules_to_save": ["lm_head"]}, "unsupported_tensor"),
        ({"modules_to_save": ["embed_tokens", "input_layernorm"]}, "unsupported_tensor"),
        ({"trainable_token_indices": {"embed_tokens": [3, 5, 126]}}, "unsupported_tensor"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "unsupported_tensor"),
    ],
)
def test_features_beyond_lora_are_refused_by_their_tensors_too(
    base: Path, spec: BaseSpec, tmp_path: Path, config: dict[str, Any], code: str
) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, **config)
    if "target_modules" not in config:
        assert codes_of(folder, spec) == {code, "unsupported_feature"}
        edit_config(folder, use_dora=False, modules_to_save=None, trainable_token_indices=None)
    assert codes_of(folder, spec) == {code}


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_of_the_base_are_refused(tmp_path: Path, bias: str) -> None:
    base = tiny_base(tmp_path / "base", "llama-bias")
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"], bias=bias)
    found = violations_of(folder, spec_of(base))
    assert {v.code for v in found} == {"unsupported_tensor"}
    assert any(v.subject.endswith("q_proj.base_layer.bias") for v in found)


def test_a_bias_of_b_is_refused(adapter: Path, spec: BaseSpec) -> None:
    name = B0.replace(".weight", ".bias")
    edit_weights(adapter, lambda t: t.update({name: torch.ones(64)}))
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("unsupported_tensor", name)
    edit_config(adapter, lora_bias=True)
    assert codes_of(adapter, spec) == {"unsupported_tensor", "unsupported_feature"}


def test_tensors_of_the_base_itself_are_refused(adapter: Path, spec: BaseSpec) -> None:
    names = [
        f"base_model.model.{Q0}.base_layer.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.weight",
        "../../etc/passwd",
    ]
    edit_weights(adapter, lambda t: t.update({name: torch.ones(2, 2) for name in names}))
    assert {v.subject for v in violations_of(adapter, spec)} == set(names)


def test_a_file_without_tensors_is_refused(adapter: Path, spec: BaseSpec) -> None:
    save_file({}, adapter / WEIGHTS_FILE)
    assert "empty_adapter" in codes_of(adapter, spec)
