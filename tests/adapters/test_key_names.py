from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from adapters.key_names import canonical, module_path
from adapters.manifest import BaseSpec, TargetSpec
from tests.tiny import tiny_base

A0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_base(tmp_path_factory.mktemp("base"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def spec(model: Any) -> BaseSpec:
    return spec_of(model)


def spec_of(model: Any, prefix: str = "") -> BaseSpec:
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    return BaseSpec(
        name="tiny",
        vocab_size=320,
        max_positions=128,
        targets=tuple(
            TargetSpec(n, m.in_features, m.out_features, (prefix + n,))
            for n, m in model.named_modules()
            if n in linears
        ),
        embedding=f"{prefix}model.embed_tokens",
        parameters={prefix + n: tuple(p.shape) for n, p in model.named_parameters()},
        fused={
            f"{prefix}model.layers.{i}.self_attn.qkv_proj": tuple(
                (f"{prefix}model.layers.{i}.self_attn.{part}_proj", size)
                for part, size in (("q", 64), ("k", 32), ("v", 32))
            )
            for i in range(2)
        },
    )


def bare(*paths: str) -> BaseSpec:
    return BaseSpec("t", 1, 1, tuple(TargetSpec(path, 4, 4, (path,)) for path in paths))


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj"]},
    "dora": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "lora_bias": {"target_modules": ["q_proj"], "lora_bias": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "mlp", "norm"]},
    "head": {"target_modules": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
# None is about names: a bias that cannot be merged or looks like a shard, base layers saved too.
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape.*lora_B.bias")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_what_peft_saves_is_literal_and_its_raw_state_reads_the_same(
    model: Any, spec: BaseSpec, config: dict[str, Any]
) -> None:
    adapted = get_peft_model(_fresh(model), LoraConfig(**config))
    saved = set(get_peft_model_state_dict(adapted))
    for name in saved:
        assert canonical(name, spec) == (name, None)

    raw = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert {canonical(name, spec)[0] for name in raw} == saved - {
        name for name in saved if "base_layer" in name
    }
    for name in raw:
        assert "'default'" in (canonical(name, spec)[1] or "")


def _fresh(model: Any) -> Any:
    fresh = type(model)(model.config)
    fresh.load_state_dict(model.state_dict())
    return fresh


@pytest.mark.parametrize(
    ("rename", "how"),
    [
        (lambda n: n.removeprefix("base_model.model."), "prefix"),
        (lambda n: n.removeprefix("base_model."), "path read as"),
        (lambda n: n.removeprefix("base_model.model.model."), "path read as"),
        (lambda n: "base_model.model." + n, "path read as"),
        (lambda n: n.replace("model.layers", "language_model.layers"), "path read as"),
        (lambda n: n.replace("model.model.", "model.model.language_model."), "path read as"),
        (lambda n: n.replace("model.model.", "model.language_model.model."), "path read as"),
        (lambda n: n.replace("base_model.model", "transformer"), "path read as"),
        (lambda n: n.replace("base_model.model.model", "text_model"), "path read as"),
        (lambda n: "module." + n, "path read as"),
        (lambda n: n.replace("model.layers", "model._orig_mod.layers"), "'_orig_mod'"),
        (lambda n: "_orig_mod." + n, "'_orig_mod'"),
        (
            lambda n: n.replace("q_proj", "_checkpoint_wrapped_module._fsdp_wrapped_module.q_proj"),
            "'_checkpoint_wrapped_module'",
        ),
        (
            lambda n: n.replace("lora_A.", "lora_A.default._fsdp_wrapped_module."),
            "'_fsdp_wrapped_module'; without the adapter name 'default'",
        ),
        (lambda n: n.replace(".weight", ".default.weight"), "adapter name 'default'"),
        (lambda n: n.replace(".weight", ".weight.weight"), "adapter name 'weight'"),
        (lambda n: n.replace(".weight", ".lora.weight"), "adapter name 'lora'"),
        (lambda n: n.replace("lora_A", "lora_down"), "lora_down.weight read as lora_A.weight"),
        (lambda n: n.replace("lora_A", "lora.down"), "lora.down.weight read as lora_A.weight"),
        (lambda n: n.replace("lora_A", "lora_linear_layer.down"), "read as lora_A.weight"),
        (
            lambda n: n.removeprefix("base_model.model.").replace("lora_A", "lora_A.default"),
            "'default'; with PEFT's prefix",
        ),
    ],
)
def test_other_writers_names_are_read(
    spec: BaseSpec, rename: Callable[[str], str], how: str
) -> None:
    assert rename(A0) != A0
    name, note = canonical(rename(A0), spec)
    assert name == A0
    assert note is not None and how in note


def test_up_is_b_and_down_is_a(spec: BaseSpec) -> None:
    for word in ("lora_", "lora.", "lora_linear_layer."):
        assert canonical(A0.replace("lora_A", f"{word}up"), spec)[0] == A0.replace("_A", "_B")


@pytest.mark.parametrize(
    "name",
    [
        A0.replace("layers.0", "layers.2"),
        A0.replace("q_proj", "r_proj"),
        A0.replace("layers.0.", ""),
        A0.replace("model.layers", "vision_model.layers"),
        A0.replace("base_model.model.model", "base_model.model.model.visual"),
        A0.replace("lora_A.weight", "alpha"),
        A0.replace("lora_A.weight", "lora_C.weight"),
        A0.replace("lora_A.weight", "lora_A"),
        A0.replace("lora_A.weight", "lora_A..weight"),
        A0.replace("lora_A.weight", "lora_A.v1.2.weight"),
        A0.replace("lora_A.weight", "lora_a"),
        A0.replace("q_proj.lora_A", "q_proj.original_module"),
        A0.replace("self_attn.q_proj.lora_A", "attn.q_proj.lora_a"),
        "base_model.model.lora_A.weight",
        "lora_A.weight",
        "weight",
        "",
        ".",
        ".".join(["base_layer"] * 60) + ".weight",
        "lora_te_model_layers_0_self_attn_q_proj.lora_down.weight",
    ],
)
def test_names_without_one_reading_stay(spec: BaseSpec, name: str) -> None:
    assert canonical(name, spec) == (name, None)


def test_two_modules_of_one_core_are_told_apart_or_not_at_all() -> None:
    base = bare("model.layers.0.q", "transformer.layers.0.q")
    for path in ("model.layers.0.q", "transformer.layers.0.q"):
        name = f"base_model.model.{path}.lora_A.weight"
        assert canonical(name, base) == (name, None)
        assert canonical(f"{path}.lora_A.weight", base)[0] == name
    stray = "base_model.model.layers.0.q.lora_A.weight"
    assert canonical(stray, base) == (stray, None)


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.weight",
        "model.layers.0.weight_proj",
        "model.layers.0.lora_A",
        "model.layers.0.lora_A.weight",
        "model.layers.0.lora_B.default",
        "model.layers.0.lora_magnitude_vector",
        "model.layers.0.modules_to_save",
        "default",
    ],
)
def test_modules_may_have_names_that_look_like_pefts(path: str) -> None:
    base = bare(path, "model.layers.0.q_proj")
    name = f"base_model.model.{path}.lora_A.weight"
    assert canonical(name, base) == (name, None)
    assert canonical(f"base_model.model.{path}.lora_A.default.weight", base)[0] == name
    assert canonical(f"{path}.lora_A.weight", base)[0] == name


def test_a_name_of_two_readings_stays() -> None:
    # The adapter "lora_A" of `a`, or the adapter without a name of `a.lora_A`.
    base = bare("model.a", "model.a.lora_A")
    name = "model.a.lora_A.lora_A.weight"
    assert canonical(name, base) == (name, None)


def test_other_bases_prefixes_are_put_where_the_base_has_them(model: Any) -> None:
    nested = spec_of(model, "language_model.")
    name = A0.replace("base_model.model.", "base_model.model.language_model.")
    assert canonical(A0, nested)[0] == name
    assert canonical(name, nested) == (name, None)


def test_parameters_of_their_own(spec: BaseSpec) -> None:
    for path in ("lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        name = f"base_model.model.{path}"
        assert canonical(name, spec) == (name, None)
        assert canonical(path, spec)[0] == name
        module, _, leaf = name.rpartition(".")
        assert canonical(f"{module}.modules_to_save.mine.{leaf}", spec)[0] == name
    saved = "base_model.model.model.layers.0.mlp.modules_to_save.default.up_proj.weight"
    assert canonical(saved, spec)[0] == "base_model.model.model.layers.0.mlp.up_proj.weight"


def test_experts_of_nested_parameter_loras() -> None:
    base = BaseSpec("t", 1, 1, (), parameters={"model.layers.0.mlp.experts.gate_up_proj": (2, 4)})
    inner = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    assert canonical(inner, base) == (inner, None)
    assert canonical(inner.replace(".weight", ".default.weight"), base)[0] == inner
    whole = "base_model.model.model.layers.0.mlp.experts.gate_up_proj"
    assert canonical(whole, base) == (whole, None)


def test_projections_the_base_holds_in_another_cut_are_known(spec: BaseSpec) -> None:
    name = A0.replace("q_proj", "qkv_proj")
    assert canonical(name, spec) == (name, None)
    assert canonical(name.removeprefix("base_model.model."), spec)[0] == name
    assert module_path("language_model.layers.1.self_attn.qkv_proj", spec) == (
        "model.layers.1.self_attn.qkv_proj"
    )
    assert module_path("layers.2.self_attn.qkv_proj", spec) is None


def test_answers_follow_the_base_asked_for(spec: BaseSpec) -> None:
    other = bare("q")
    assert module_path("q", other) == "q"
    assert module_path("q", spec) is None
    assert module_path("q", other) == "q"


def test_hostile_names_take_no_time(spec: BaseSpec, tmp_path: Path) -> None:
    for name in ("lora_A." * 70 + "weight", "modules_to_save." * 30, "a" * 512, "." * 512):
        assert canonical(name, spec) == (name, None)
