"""Composed adapters against what PEFT's own models compose."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from adapters.composition import COMBINATIONS, Composition, Source
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, ModuleLora
from adapters.merging import compose
from tests.tiny import make_adapter, tiny_base

PATHS = [f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ("q_proj", "v_proj")]
OUTPUTS = {path: 32 if "v_proj" in path else 64 for path in PATHS}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


def loras(rank: int = 4, scale: float = 2.0) -> tuple[ModuleLora, ...]:
    key = "base_model.model.{}.lora_{}.weight"
    return tuple(
        ModuleLora(path, rank, scale, key.format(path, "A"), key.format(path, "B"))
        for path in PATHS
    )


def composed(folder: Path, *sources: Source, kind: str, **options: Any) -> dict[str, torch.Tensor]:
    folder.mkdir()
    compose(Composition(str(folder), "tiny", sources, OUTPUTS, kind, **options))
    return load_file(folder / WEIGHTS_FILE)


@pytest.mark.parametrize("kind", COMBINATIONS)
@pytest.mark.parametrize("weights", [(0.7, 1.6), (1.0, -0.5)])
def test_equals_pefts_own_weighted_adapter(
    base: Path, tmp_path: Path, kind: str, weights: tuple[float, float]
) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    a = make_adapter(base, tmp_path / "a", seed=1, **options)
    b = make_adapter(base, tmp_path / "b", seed=2, lora_alpha=12, **options)
    model = PeftModel.from_pretrained(
        copy.deepcopy(AutoModelForCausalLM.from_pretrained(base)), str(a), "a"
    )
    model.load_adapter(str(b), "b")
    density = 0.5 if COMBINATIONS[kind] else None
    want = _by_peft(model, kind, list(weights), density)
    sources = (Source(str(a), loras(), weights[0]), Source(str(b), loras(scale=3.0), weights[1]))
    got = composed(tmp_path / "c", *sources, kind=kind, density=density, seed=5)
    assert got.keys() == want.keys()
    for key, tensor in got.items():
        torch.testing.assert_close(tensor, want[key], atol=1e-6, rtol=1e-5)


def test_the_seed_decides_what_dare_drops(base: Path, tmp_path: Path) -> None:
    a = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj", "v_proj"])
    source = Source(str(a), loras(), 1.0)
    first, again, other = (
        composed(tmp_path / name, source, kind="dare_linear", density=0.5, seed=seed)
        for name, seed in (("1", 1), ("2", 1), ("3", 2))
    )
    key = f"base_model.model.{PATHS[0]}.lora_A.weight"
    assert torch.equal(first[key], again[key]) and not torch.equal(first[key], other[key])


def test_equal_input_gives_equal_bytes(base: Path, tmp_path: Path) -> None:
    a = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj", "v_proj"])
    source = Source(str(a), loras(), 0.5)
    for name in ("1", "2"):
        composed(tmp_path / name, source, kind="ties", density=0.3)
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()


def test_different_ranks_only_concatenate(base: Path, tmp_path: Path) -> None:
    a = make_adapter(base, tmp_path / "a", seed=1, target_modules=["q_proj", "v_proj"])
    b = make_adapter(base, tmp_path / "b", seed=2, r=2, target_modules=["q_proj", "v_proj"])
    sources = (Source(str(a), loras(), 1.0), Source(str(b), loras(2, 4.0), 1.0))
    with pytest.raises(ValueError, match=r"q_proj has the ranks \[2, 4\]; linear needs equal"):
        composed(tmp_path / "c", *sources, kind="linear")
    got = composed(tmp_path / "d", *sources, kind="cat")
    assert got[f"base_model.model.{PATHS[0]}.lora_A.weight"].shape == (6, 64)


def _by_peft(
    model: PeftModel, kind: str, weights: list[float], density: float | None
) -> dict[str, torch.Tensor]:
    if kind == "cat":
        model.add_weighted_adapter(["a", "b"], weights, "c", combination_type=kind)
        state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name="c")
        return state
    torch.manual_seed(5)
    want = {}
    tuner: Any = model.base_model
    merge = tuner._generalized_task_arithmetic_weighted_adapter
    for path in PATHS:
        layer = tuner.model.get_submodule(path)
        pair = merge(kind, ["a", "b"], weights, layer, density, "total")
        for side, tensor in zip("AB", pair, strict=True):
            want[f"base_model.model.{path}.lora_{side}.weight"] = tensor
    return want
