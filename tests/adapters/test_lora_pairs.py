from __future__ import annotations

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
    Q1,
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


def test_two_names_of_one_tensor_are_refused(adapter: Path, spec: BaseSpec) -> None:
    twin = A0.replace(".weight", ".default.weight")
    edit_weights(adapter, lambda t: t.update({twin: t[A0] + 1}))
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
    assert {v.code for v in found} == {"module_not_targeted", "unsupported_target"}
    assert any("no linear layer that can be adapted" in v.message for v in found)
    gone = replace(qkv, parameters={}, fused={})
    found = violations_of(adapter, gone)
    assert {v.code for v in found} == {"unknown_module", "no_target"}
    assert len(found) == 9


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


def test_lora_of_a_router_needs_to_be_asked_for(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", "mixtral")
    options: dict[str, Any] = {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.gate.weight"],
    }
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    edit_config(folder, target_parameters=["experts.down_proj"])
    found = violations_of(folder, spec_of(base))
    gates = {f"model.layers.{layer}.mlp.gate" for layer in (0, 1)}
    assert {v.subject for v in found if v.code == "module_not_targeted"} == gates
    missing = {v.subject for v in found if v.code == "incomplete_adapter"}
    assert missing == {f"model.layers.{layer}.mlp.experts.down_proj" for layer in (0, 1)}


# PEFT looks for the patterns of parameters among modules only.
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match:RuntimeWarning")
def test_ranks_of_experts_are_those_of_one_expert(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", "mixtral")
    options: dict[str, Any] = {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.down_proj"],
    }
    pattern = {"experts.down_proj": 6}
    folder = make_adapter(base, tmp_path / "a", seed=1, rank_pattern=pattern, **options)
    spec = spec_of(base)
    manifest = validate(folder, spec, Limits(max_rank=6))
    assert {(lora.rank, lora.experts) for lora in manifest.parameter_loras} == {(6, 4)}
    assert manifest.max_rank == 6
    (first, _) = violations_of(folder, spec, Limits(max_rank=5))
    assert first.code == "rank_over_limit"
    assert first.subject == "model.layers.0.mlp.experts.down_proj"
    edit_config(folder, rank_pattern={})
    found = violations_of(folder, spec)
    assert {v.code for v in found} == {"rank_mismatch"}
    assert found[0].message == "has rank 6 in the file, but 4 in the config"


def test_a_rank_that_experts_cannot_share_is_refused(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", "mixtral")
    options: dict[str, Any] = {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.down_proj"],
    }
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    path = "base_model.model.model.layers.0.mlp.experts.lora_"

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[path + "A.weight"] = tensors[path + "A.weight"][:14]
        tensors[path + "B.weight"] = tensors[path + "B.weight"][:, :14]

    edit_weights(folder, cut)
    found = violations_of(folder, spec_of(base))
    assert {v.code for v in found} == {"shape_mismatch"}
    assert "[4 * rank, 128]" in found[0].message


def test_limits_hold_for_embeddings_too(base: Path, spec: BaseSpec, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["embed_tokens"], "save_embedding_layers": False}
    folder = make_adapter(base, tmp_path / "a", seed=1, r=9, **options)
    assert validate(folder, spec, Limits(max_rank=9)).embeddings[0].rank == 9
    (violation,) = violations_of(folder, spec, Limits(max_rank=8))
    assert (violation.code, violation.subject) == ("rank_over_limit", "model.embed_tokens")
    edit_config(folder, lora_alpha=1e9)
    assert codes_of(folder, spec) == {"scale_over_limit"}
    edit_config(folder, r=4, lora_alpha=8)
    assert codes_of(folder, spec) == {"rank_mismatch"}


def test_lora_of_an_embedding_under_a_linears_names_is_refused(
    adapter: Path, spec: BaseSpec
) -> None:
    names = [f"base_model.model.model.embed_tokens.lora_{side}.weight" for side in "AB"]
    tensors = dict(zip(names, (torch.ones(4, 64), torch.ones(320, 4)), strict=True))
    edit_weights(adapter, lambda t: t.update(tensors))
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("module_not_targeted", "model.embed_tokens")


@pytest.mark.parametrize("module", ["model.layers.0.self_attn.q_proj", "lm_head"])
def test_an_embeddings_lora_elsewhere_is_refused(
    adapter: Path, spec: BaseSpec, module: str
) -> None:
    name = f"base_model.model.{module}.lora_embedding_A"
    edit_weights(adapter, lambda t: t.update({name: torch.ones(4, 64)}))
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("unknown_module", module)


def test_an_embeddings_lora_within_a_wrapper_is_refused(
    base: Path, spec: BaseSpec, tmp_path: Path
) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["embed_tokens"])
    rename_keys(
        folder, lambda name: name.replace(".lora_embedding_B", ".base_layer.lora_embedding_B")
    )
    found = {(v.code, v.subject) for v in violations_of(folder, spec)}
    assert ("unknown_module", "model.embed_tokens.base_layer") in found


def test_magnitudes_and_dora_in_the_config_go_together(
    base: Path, spec: BaseSpec, tmp_path: Path
) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"], use_dora=True)
    edit_config(folder, use_dora=False)
    found = violations_of(folder, spec)
    assert {v.code for v in found} == {"config_mismatch"}
    assert {v.subject for v in found} == {
        f"base_model.model.{module}.lora_magnitude_vector" for module in (Q0, Q1)
    }
    edit_config(folder, use_dora=True)
    edit_weights(folder, lambda t: t.pop(f"base_model.model.{Q1}.lora_magnitude_vector"))
    (violation,) = violations_of(folder, spec)
    assert (violation.code, violation.subject) == ("incomplete_adapter", Q1)


def test_magnitudes_may_be_named_as_the_layer_has_them(
    base: Path, spec: BaseSpec, tmp_path: Path
) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"], use_dora=True)
    plain = validate(folder, spec, Limits())
    end = "lora_magnitude_vector"
    rename_keys(folder, lambda name: name.replace(end, f"{end}.weight"))
    renamed = validate(folder, spec, Limits())
    assert [v.module for v in renamed.vectors] == [v.module for v in plain.vectors]
    assert renamed.vectors[0].magnitude_key == f"base_model.model.{Q0}.{end}.weight"


def test_biases_of_b_and_lora_bias_in_the_config_go_together(
    base: Path, spec: BaseSpec, tmp_path: Path, adapter: Path
) -> None:
    name = B0.replace(".weight", ".bias")
    edit_weights(adapter, lambda t: t.update({name: torch.ones(64)}))
    (violation,) = violations_of(adapter, spec)
    assert (violation.code, violation.subject) == ("config_mismatch", name)
    edit_config(adapter, lora_bias=True)
    found = violations_of(adapter, spec)
    assert {v.code for v in found} == {"incomplete_adapter"}
    assert len(found) == 3


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # lora_bias where the base has no bias
def test_lora_bias_cannot_reach_an_embedding(adapter: Path, spec: BaseSpec) -> None:
    edit_config(adapter, target_modules=["q_proj", "v_proj", "embed_tokens"], lora_bias=True)
    assert "invalid_combination" in codes_of(adapter, spec)


@pytest.mark.parametrize(
    "end", ["lora_magnitude_vector", "lora_B.bias", "token_adapter.trainable_tokens_delta"]
)
def test_vectors_without_lora_are_refused(adapter: Path, spec: BaseSpec, end: str) -> None:
    name = f"base_model.model.model.layers.0.mlp.up_proj.{end}"
    edit_config(adapter, use_dora=end.startswith("lora_m"), lora_bias=end.endswith("bias"))
    edit_weights(adapter, lambda t: t.update({name: torch.ones(128)}))
    assert ("module_not_targeted", name) in {
        (v.code, v.subject) for v in violations_of(adapter, spec)
    }


def test_fused_names_are_matched_with_the_configs_own(
    base: Path, spec: BaseSpec, tmp_path: Path
) -> None:
    """The adapter of a model with qkv_proj and gate_up_proj, on one that has their parts."""
    fused = tiny_base(tmp_path / "fused", "phi3")
    folder = make_adapter(
        fused, tmp_path / "a", seed=1, rank_pattern={"layers.1.self_attn.qkv_proj": 6}
    )
    manifest = validate(folder, spec, Limits())
    assert len(manifest.modules) == 2 * 7
    ranks = {m.module: m.rank for m in manifest.modules}
    assert ranks["model.layers.1.self_attn.k_proj"] == 6
    assert ranks["model.layers.0.self_attn.k_proj"] == 4
    assert len(manifest.mapped) == 2 * 2 * 2

    lost = "base_model.model.model.layers.1.mlp.gate_up_proj.lora_"
    edit_weights(folder, lambda t: [t.pop(f"{lost}{side}.weight") for side in "AB"])
    (violation,) = violations_of(folder, spec)
    assert (violation.code, violation.subject) == (
        "incomplete_adapter",
        "model.layers.1.mlp.gate_up_proj",
    )
    edit_config(folder, target_modules=["o_proj", "down_proj", "qkv_proj"])
    assert "module_not_targeted" in codes_of(folder, spec)


def test_parts_are_served_on_a_whole(base: Path, tmp_path: Path) -> None:
    fused = spec_of(tiny_base(tmp_path / "fused", "phi3"))
    pattern = {"k_proj": 2, "v_proj": 3}
    folder = make_adapter(
        base, tmp_path / "a", seed=1, target_modules=["k_proj", "v_proj"], rank_pattern=pattern
    )
    manifest = validate(folder, fused, Limits())
    assert [(m.rank, m.out_start) for m in manifest.modules] == 2 * [(2, 64), (3, 96)]
    assert {m.module for m in manifest.modules} == {
        f"model.layers.{layer}.self_attn.qkv_proj" for layer in (0, 1)
    }


def test_ranks_that_add_up_in_one_module_are_limited_together(base: Path, tmp_path: Path) -> None:
    fused = spec_of(tiny_base(tmp_path / "fused", "phi3"))
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["k_proj", "v_proj"])
    assert validate(folder, fused, Limits(max_rank=8)).modules
    found = violations_of(folder, fused, Limits(max_rank=7))
    assert {v.code for v in found} == {"rank_over_limit"}
    assert {v.message for v in found} == {"has rank 8; at most 7 is served"}


def test_dora_of_a_projection_in_another_cut_is_refused(tmp_path: Path, spec: BaseSpec) -> None:
    fused = tiny_base(tmp_path / "fused", "phi3")
    options: dict[str, Any] = {"target_modules": ["qkv_proj"], "use_dora": True}
    folder = make_adapter(fused, tmp_path / "a", seed=1, **options)
    found = violations_of(folder, spec)
    assert {v.code for v in found} == {"unsupported_tensor"}
    assert "another cut" in found[0].message


def test_a_file_without_tensors_is_refused(adapter: Path, spec: BaseSpec) -> None:
    save_file({}, adapter / WEIGHTS_FILE)
    assert "empty_adapter" in codes_of(adapter, spec)
