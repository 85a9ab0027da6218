from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adapters.manifest import BaseSpec
from adapters.peft_files import TensorEntry, TensorTable
from adapters.tensor_roles import Role, find_roles, linear_sizes
from adapters.validation import Limits, validate
from tests.adapters.lora_files import (
    A0,
    Q0,
    edit_config,
    edit_weights,
    rename_keys,
    spec_of,
    violations_of,
)
from tests.tiny import make_adapter, tiny_base


@pytest.mark.parametrize(
    ("name", "role"),
    [
        (f"{Q0}.lora_A.weight", Role("lora_A.weight", Q0)),
        (f"{Q0}.lora_B.bias", Role("lora_B.bias", Q0)),
        (f"{Q0}.base_layer.base_layer.lora_B.weight", Role("lora_B.weight", Q0, 2)),
        (f"{Q0}.lora_magnitude_vector", Role("lora_magnitude_vector", Q0)),
        (f"{Q0}.lora_magnitude_vector.weight", Role("lora_magnitude_vector", Q0)),
        (f"{Q0}.weight", Role("parameter", f"{Q0}.weight")),
        (f"{Q0}.base_layer.weight", Role("base", f"{Q0}.weight", 1)),
        (f"{Q0}.original_module.weight", Role("original", f"{Q0}.weight")),
        (f"{Q0}.modules_to_save.weight", Role("spare", f"{Q0}.weight")),
        (f"{Q0}.modules_to_save.default.weight", Role("parameter", f"{Q0}.weight")),
        ("lm_head.token_adapter.base_layer.weight", Role("token base", "lm_head.weight", 1)),
        (
            "lm_head.token_adapter.trainable_tokens_delta",
            Role("trainable_tokens_delta", "lm_head"),
        ),
        ("model.embed_tokens.lora_embedding_A", Role("lora_embedding_A", "model.embed_tokens")),
    ],
)
def test_a_name_says_what_the_tensor_is(spec: BaseSpec, name: str, role: Role) -> None:
    tensor = TensorEntry(f"base_model.model.{name}", "F32", (1,), 0, 4)
    roles = find_roles(TensorTable((tensor,)), spec)
    assert roles.violations == []
    assert roles.tensors == {role: tensor}


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.removeprefix("base_model."),
        lambda name: "base_model.model." + name,
        lambda name: name.replace("base_model.model.model", "base_model.model.language_model"),
        lambda name: name.replace(".weight", ".other.weight"),
        lambda name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"),
    ],
)
def test_names_of_other_writers_are_read_and_said_so(
    adapter: Path, spec: BaseSpec, rename: Callable[[str], str]
) -> None:
    plain = validate(adapter, spec, Limits())
    rename_keys(adapter, rename)
    manifest = validate(adapter, spec, Limits())
    assert [m.module for m in manifest.modules] == [m.module for m in plain.modules]
    assert [m.a_key for m in manifest.modules] == [rename(m.a_key) for m in plain.modules]
    assert {name for name, _ in manifest.mapped} == {
        rename(key) for m in plain.modules for key in (m.a_key, m.b_key)
    }
    assert plain.mapped == ()


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("self_attn", "attention"),
        lambda name: name.replace(".weight", ""),
        lambda name: name.replace("lora_A", "lora_C"),
        lambda name: name.replace("layers.0", "layers.7"),
    ],
)
def test_names_that_mean_nothing_are_refused_with_an_example(
    adapter: Path, spec: BaseSpec, rename: Callable[[str], str]
) -> None:
    rename_keys(adapter, rename)
    found = {v.subject: v for v in violations_of(adapter, spec)}
    violation = found[rename(A0)]
    assert violation.code in ("unexpected_key", "unknown_module")
    assert "base_model.model.model.layers.0." in violation.message


def test_one_tensor_under_two_names_must_say_the_same(adapter: Path, spec: BaseSpec) -> None:
    twin = A0.replace(".weight", ".default.weight")
    edit_weights(adapter, lambda t: t.update({twin: t[A0].clone()}))
    manifest = validate(adapter, spec, Limits())
    ((name, reason),) = manifest.unused
    assert name in (A0, twin)
    assert "says the same" in reason
    edit_weights(adapter, lambda t: t[twin].add_(1))
    (violation,) = violations_of(adapter, spec)
    assert violation.code == "duplicate_tensor"
    assert violation.subject in (A0, twin)


def test_experts_one_by_one_are_refused_with_advice(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", "mixtral")
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"])
    name = "base_model.model.model.layers.0.mlp.experts.0.w1.lora_A.weight"
    edit_weights(folder, lambda t: t.update({name: torch.ones(4, 64)}))
    edit_config(folder, target_modules=["q_proj", "w1"])
    found = {v.subject: v for v in violations_of(folder, spec_of(base))}
    assert "save it again" in found[name].message
    assert "target_parameters" in found[name].message
    assert "save it again" in found["target_modules"].message


def test_tensors_of_what_cannot_be_exchanged_are_refused(adapter: Path, spec: BaseSpec) -> None:
    names = ["base_model.model.score.weight", "../../etc/passwd", "base_model.model.rope.inv_freq"]
    edit_weights(adapter, lambda t: t.update({name: torch.ones(2, 2) for name in names}))
    edit_config(adapter, modules_to_save=["score"])
    assert {v.subject for v in violations_of(adapter, spec)} == set(names)


def test_linears_in_another_cut_have_sizes_too(spec: BaseSpec, tmp_path: Path) -> None:
    sizes = linear_sizes(spec)
    assert sizes["model.layers.0.self_attn.qkv_proj"] == (64, 128)
    assert sizes["model.layers.1.mlp.gate_up_proj"] == (64, 256)
    fused = linear_sizes(spec_of(tiny_base(tmp_path / "fused", "phi3")))
    assert fused["model.layers.0.self_attn.k_proj"] == (64, 32)
    assert fused["model.layers.0.self_attn.qkv_proj"] == (64, 128)
