from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters.manifest import WEIGHTS_FILE, AdapterManifest, BaseSpec
from adapters.validation import Limits, validate
from tests.adapters.lora_files import (
    codes_of,
    edit_config,
    edit_weights,
    parameters_of,
    spec_of,
    violations_of,
)
from tests.tiny import make_adapter, tiny_base

# PEFT advises against tied and resized embeddings in an adapter.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

HEAD = "base_model.model.lm_head."
EMBEDDING = "base_model.model.model.embed_tokens."
BOTH: dict[str, Any] = {
    "target_modules": ["embed_tokens", "lm_head"],
    "save_embedding_layers": True,
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("tied"), "llama-tied")


def test_the_bases_own_embeddings_are_left_out(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, **BOTH)
    manifest = _validated(base, folder)
    reason = "equals the base's"
    names = [f"{part}base_layer.weight" for part in (EMBEDDING, HEAD)]
    assert sorted(manifest.unused) == sorted((name, reason) for name in names)
    assert manifest.replaced == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_compared_in_the_resident_dtype(
    base: Path, spec: BaseSpec, tmp_path: Path, dtype: torch.dtype
) -> None:
    """An adapter saved in float32 on a base that is served in half precision."""
    folder = make_adapter(base, tmp_path / "a", seed=1, **BOTH)

    def resident(path: str) -> Tensor:
        return parameters_of(base)(path).to(dtype)

    assert len(validate(folder, spec, Limits(), parameters=resident).unused) == 2


@pytest.mark.parametrize("part", [EMBEDDING, HEAD])
def test_embeddings_of_another_base_are_refused(base: Path, tmp_path: Path, part: str) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, **BOTH)
    name = f"{part}base_layer.weight"
    edit_weights(folder, lambda t: t[name][-1, -1].add_(1))
    (violation,) = violations_of(folder, spec_of(base), None, parameters_of(base))
    assert (violation.code, violation.subject) == ("base_mismatch", name)
    assert "another base" in violation.message


def test_copies_that_cannot_be_compared_are_refused(
    base: Path, spec: BaseSpec, tmp_path: Path
) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, **BOTH)
    found = violations_of(folder, spec)
    assert {v.code for v in found} == {"unsupported_tensor"}
    assert all("cannot be compared" in v.message for v in found)


def test_copies_where_peft_does_not_look_are_refused(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"])
    name = f"{HEAD}base_layer.weight"
    edit_weights(folder, lambda t: t.update({name: torch.ones(320, 64)}))
    (violation,) = violations_of(folder, spec_of(base), None, parameters_of(base))
    assert (violation.code, violation.subject) == ("unsupported_tensor", name)
    head = parameters_of(base)("lm_head.weight")
    edit_weights(folder, lambda t: t.update({name: head.clone()}))
    assert _validated(base, folder).unused == ((name, "equals the base's"),)


def test_an_embedding_under_a_name_that_peft_does_not_load_is_refused(
    base: Path, tmp_path: Path
) -> None:
    """PEFT would leave it out, however clear what it is meant to be."""
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"])
    own = parameters_of(base)("model.embed_tokens.weight").clone()
    name = "base_model.model.embed_tokens.weight"
    edit_weights(folder, lambda t: t.update({name: own + 1}))
    found = violations_of(folder, spec_of(base), parameters=parameters_of(base))
    assert [(v.code, v.subject) for v in found] == [("unsupported_tensor", name)]
    edit_weights(folder, lambda t: t.update({name: own}))
    manifest = validate(folder, spec_of(base), Limits(), parameters=parameters_of(base))
    assert (name, "equals the base's") in manifest.unused and not manifest.replaced


def test_embeddings_saved_beside_lora_replace_the_bases(base: Path, tmp_path: Path) -> None:
    """save_embedding_layers=True without modules_to_save: PEFT loads them into the base."""
    options: dict[str, Any] = {"target_modules": ["q_proj"], "save_embedding_layers": True}
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    assert len(_validated(base, folder).unused) == 2
    edit_weights(folder, lambda t: t[f"{HEAD}weight"].mul_(2))
    manifest = _validated(base, folder)
    assert manifest.unused == ((f"{EMBEDDING}weight", "equals the base's"),)
    assert [own.parameter for own in manifest.replaced] == ["lm_head.weight"]


def test_a_tied_weight_is_replaced_on_both_sides(tied: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "save_embedding_layers": True}
    folder = make_adapter(tied, tmp_path / "a", seed=1, **options)
    edit_weights(folder, lambda t: [t[f"{part}weight"].mul_(2) for part in (HEAD, EMBEDDING)])
    both = {"model.embed_tokens.weight", "lm_head.weight"}
    assert {own.parameter for own in _validated(tied, folder).replaced} == both
    edit_weights(folder, lambda t: t.pop(f"{HEAD}weight"))
    manifest = _validated(tied, folder)
    assert {own.parameter for own in manifest.replaced} == both
    assert {own.key for own in manifest.replaced} == {f"{EMBEDDING}weight"}


@pytest.mark.parametrize("changed", [EMBEDDING, HEAD])
def test_a_tied_weight_with_two_values_is_refused(tied: Path, tmp_path: Path, changed: str) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "save_embedding_layers": True}
    folder = make_adapter(tied, tmp_path / "a", seed=1, **options)
    edit_weights(folder, lambda t: t[f"{changed}weight"].mul_(2))
    (violation,) = violations_of(folder, spec_of(tied), None, parameters_of(tied))
    assert violation.code == "unsupported_tensor"
    assert "ties head and embedding" in violation.message


def test_modules_to_save_and_the_file_must_agree(base: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "target_modules": ["q_proj"],
        "modules_to_save": ["input_layernorm", "lm_head"],
    }
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    spec = spec_of(base)
    assert len(_validated(base, folder).replaced) == 3
    edit_config(folder, modules_to_save=["lm_head"])
    found = violations_of(folder, spec)
    assert {v.code for v in found} == {"module_not_targeted"}
    assert len(found) == 2
    edit_config(folder, modules_to_save=["input_layernorm", "lm_head", "up_proj"])
    found = violations_of(folder, spec)
    assert {v.code for v in found} == {"incomplete_adapter"}
    assert {v.subject for v in found} == {
        f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)
    }


@pytest.mark.parametrize(
    ("bias", "change", "code"),
    [
        ("none", {}, "config_mismatch"),
        ("lora_only", {}, "config_mismatch"),
        ("all", {"q_proj.base_layer.bias": None}, "incomplete_adapter"),
        ("all", {"k_proj.bias": None}, "incomplete_adapter"),
        ("all", {"q_proj.base_layer.bias": "q_proj.bias"}, "unsupported_tensor"),
        ("all", {"k_proj.bias": "k_proj.base_layer.bias"}, "unsupported_tensor"),
    ],
)
def test_biases_must_be_those_that_the_config_trains(
    tmp_path: Path, bias: str, change: dict[str, str | None], code: str
) -> None:
    base = tiny_base(tmp_path / "base", "llama-bias")
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"], bias="all")
    edit_config(folder, bias=bias)

    def spoil(tensors: dict[str, Tensor]) -> None:
        for old, new in change.items():
            prefix = "base_model.model.model.layers.0.self_attn."
            tensor = tensors.pop(prefix + old)
            if new is not None:
                tensors[prefix + new] = tensor

    edit_weights(folder, spoil)
    assert codes_of(folder, spec_of(base)) == {code}


def test_biases_of_linears_are_vectors_and_others_parameters(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", "gpt2")
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["c_attn"], bias="all")
    manifest = _validated(base, folder)
    assert {v.module.rpartition(".")[2] for v in manifest.vectors} == {"c_attn", "c_proj", "c_fc"}
    assert all(v.bias_key and v.magnitude_key is None for v in manifest.vectors)
    names = {own.parameter.removeprefix("transformer.") for own in manifest.replaced}
    assert {"h.0.ln_1.bias", "h.1.ln_2.bias", "ln_f.bias"} <= names


def test_token_rows_keep_the_order_of_the_config(base: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "trainable_token_indices": [5, 3, 126]}
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    (rows,) = _validated(base, folder).token_rows
    assert (rows.module, rows.indices) == ("model.embed_tokens", (5, 3, 126))
    edit_config(folder, trainable_token_indices=[5, 3])
    assert codes_of(folder, spec_of(base)) == {"shape_mismatch"}
    edit_config(folder, trainable_token_indices=[5, 3, 320])
    (violation,) = violations_of(folder, spec_of(base))
    assert violation.code == "token_out_of_range"
    assert "320" in violation.message
    edit_config(folder, trainable_token_indices=None)
    assert codes_of(folder, spec_of(base)) == {"module_not_targeted"}


def test_token_rows_of_a_tied_head_are_the_embeddings(tied: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "trainable_token_indices": [5, 3]}
    folder = make_adapter(tied, tmp_path / "a", seed=1, **options)
    rows = _validated(tied, folder).token_rows
    assert {r.module for r in rows} == {"model.embed_tokens", "lm_head"}
    assert len({(r.key, r.indices) for r in rows}) == 1

    end = "token_adapter.trainable_tokens_delta"
    edit_weights(folder, lambda t: t.update({HEAD + end: t[EMBEDDING + end].clone()}))
    assert [name for name, _ in _validated(tied, folder).unused] == [HEAD + end]
    edit_weights(folder, lambda t: t[HEAD + end].add_(1))
    assert codes_of(folder, spec_of(tied)) == {"unsupported_tensor"}


def _drop_head(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{HEAD}weight"]


def _shorten_head(tensors: dict[str, Tensor]) -> None:
    tensors[f"{HEAD}weight"] = tensors[f"{HEAD}weight"][:-1]


def _shrink_head(tensors: dict[str, Tensor]) -> None:
    tensors[f"{HEAD}weight"] = tensors[f"{HEAD}weight"][:300]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_drop_head, "vocabulary_mismatch"),
        (_shorten_head, "vocabulary_mismatch"),
        (_shrink_head, "shape_mismatch"),
    ],
)
def test_an_added_vocabulary_must_be_whole(
    base: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], code: str
) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"], added_tokens=4)
    assert _validated(base, folder).vocab_size == 324
    edit_weights(folder, change)
    assert code in codes_of(folder, spec_of(base), parameters_of(base))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_an_added_vocabulary_that_is_not_saved_whole_is_refused(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, added_tokens=4, **options)
    if options.get("modules_to_save"):
        edit_weights(folder, lambda t: t.pop(f"{HEAD}weight"))
    codes = codes_of(folder, spec_of(base), parameters_of(base))
    assert codes & {"vocabulary_mismatch", "shape_mismatch"}


def test_a_saved_embedding_with_new_tokens_needs_the_tied_head(tied: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    folder = make_adapter(tied, tmp_path / "a", seed=1, **options)
    name = f"{EMBEDDING}weight"
    edit_weights(folder, lambda t: t.update({name: torch.cat([t[name], t[name][:4]])}))
    assert codes_of(folder, spec_of(tied)) == {"vocabulary_mismatch"}


def test_a_head_with_a_bias_keeps_its_vocabulary(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj"], added_tokens=4)
    spec = spec_of(base)
    biased = replace(spec, parameters={**spec.parameters, "lm_head.bias": (320,)})
    (violation,) = violations_of(folder, biased, None, parameters_of(base))
    assert (violation.code, violation.subject) == ("vocabulary_mismatch", "lm_head.bias")


def test_an_adapter_of_tokens_alone_says_so(base: Path, tmp_path: Path) -> None:
    """Tensors of every kind count: values, size, dtype."""
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    name = "base_model.model.model.norm.weight"
    manifest = _validated(base, folder)
    stored = load_file(folder / WEIGHTS_FILE)
    assert manifest.parameters == sum(tensor.numel() for tensor in stored.values())
    edit_weights(folder, lambda t: t[name][3].fill_(float("nan")))
    (violation,) = violations_of(folder, spec_of(base))
    assert (violation.code, violation.subject) == ("non_finite_weights", name)
    edit_weights(folder, lambda t: t.update({name: torch.ones(64, dtype=torch.int64)}))
    assert codes_of(folder, spec_of(base)) == {"unsupported_dtype"}


def test_terms_count_for_the_room_on_the_device(base: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    folder = make_adapter(base, tmp_path / "a", seed=1, **options)
    room = 2 * 8 * 128 + 320 * 64
    limits = Limits(max_pages_bytes=4 * room)
    assert validate(folder, spec_of(base), limits).replaced
    (violation,) = violations_of(folder, spec_of(base), Limits(max_pages_bytes=4 * room - 1))
    assert violation.code == "adapter_too_large"


def _validated(base: Path, folder: Path) -> AdapterManifest:
    return validate(folder, spec_of(base), Limits(), parameters=parameters_of(base))
