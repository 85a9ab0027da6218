from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters.errors import AdapterRejected, Violation
from adapters.foreign import MLX_WEIGHTS_FILE, convert
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, BaseSpec
from adapters.peft_files import content_digest
from adapters.validation import Limits, validate
from tests.adapters.lora_files import write_safetensors

Q, UP = "self_attn.q_proj", "mlp.up_proj"
IDS = torch.arange(3, 27)[None]


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


@pytest.fixture(scope="module")
def known(spec: BaseSpec, model: Any) -> BaseSpec:
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return replace(spec, embedding="model.embed_tokens", parameters=parameters)


class Mlx:
    """An adapter as MLX-LM saves it, and what MLX-LM computes with it."""

    def __init__(self, model: Any, rank: int = 4, scale: float = 2.5, dora: bool = False) -> None:
        self.model, self.rank, self.scale = model, rank, scale
        self.tensors: dict[str, Tensor] = {}
        for layer in range(model.config.num_hidden_layers):
            for name in (Q, UP):
                self.add(f"model.layers.{layer}.{name}", dora)
        self.config: dict[str, Any] = {
            "adapter_path": "adapters",
            "fine_tune_type": "dora" if dora else "lora",
            "iters": 100,
            "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": [Q, UP]},
            "model": "mlx-community/tiny-4bit",
            "num_layers": -1,
        }

    def add(self, path: str, dora: bool = False) -> None:
        weight = self.model.get_submodule(path).weight
        outputs, inputs = weight.shape
        generator = torch.Generator().manual_seed(len(self.tensors))
        if isinstance(self.model.get_submodule(path), torch.nn.Embedding):
            outputs, inputs = inputs, outputs
        self.tensors[f"{path}.lora_a"] = 0.2 * torch.randn(inputs, self.rank, generator=generator)
        self.tensors[f"{path}.lora_b"] = 0.2 * torch.randn(self.rank, outputs, generator=generator)
        if dora:
            noise = 1 + 0.2 * torch.rand(len(weight), generator=generator)
            self.tensors[f"{path}.m"] = noise * weight.detach().norm(dim=1)

    def save(self, folder: Path, name: str = MLX_WEIGHTS_FILE, **metadata: str) -> Path:
        folder.mkdir(exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, folder / name, metadata)
        (folder / CONFIG_FILE).write_text(json.dumps(self.config))
        return folder

    def logits(self) -> Tensor:
        """`mlx_lm.tuner`'s arithmetic on the torch model."""
        modules = dict.fromkeys(name.rpartition(".")[0] for name in self.tensors)
        hooks = [
            self.model.get_submodule(path).register_forward_hook(self._hook(path))
            for path in modules
        ]
        try:
            with torch.no_grad():
                logits: Tensor = self.model(IDS).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits

    def _hook(self, path: str) -> Callable[..., Tensor]:
        a, b = self.tensors[f"{path}.lora_a"].float(), self.tensors[f"{path}.lora_b"].float()
        m = self.tensors.get(f"{path}.m")

        def hook(module: Any, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
            (x,) = args
            z = a[x] @ b if isinstance(module, torch.nn.Embedding) else (x @ a) @ b
            if m is None:
                return y + self.scale * z
            norm = (module.weight + (self.scale * b.T) @ a.T).norm(dim=1)
            adapted: Tensor = m / norm * (y + self.scale * z)
            return adapted

        return hook


def peft_logits(base: Path, folder: Path) -> Tensor:
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = PeftModel.from_pretrained(fresh, str(folder)).eval()(IDS).logits
    return logits


def refusal(folder: Path, base: BaseSpec) -> tuple[Violation, ...]:
    """Why it is not converted; checks that nothing was changed on the way."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(AdapterRejected) as error:
        convert(folder, base)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    return error.value.violations


@pytest.mark.parametrize(
    ("rank", "scale"), [(4, 2.5), (64, 20.0), (3, 0.1), (12, 1 / 3), (128, 0.05), (5, 2)]
)
def test_peft_computes_what_mlx_did(
    base: Path, known: BaseSpec, model: Any, tmp_path: Path, rank: int, scale: float
) -> None:
    """With rank 64, the input size, lora_a and its transpose have one shape."""
    mlx = Mlx(model, rank, scale)
    folder = mlx.save(tmp_path / "a")
    (note,) = convert(folder, known)
    assert "MLX-LM" in note and "4 modules" in note and f"scale {scale:g}" in note
    assert {path.name for path in folder.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE}

    manifest = validate(folder, known, Limits())
    (served,) = {lora.scale for lora in manifest.modules}
    # No float64 over 3 is 0.1: then it is the one that MLX, which multiplies in float32, cannot
    # tell from it.
    assert served == scale or (rank == 3 and np.float32(served) == np.float32(scale))
    assert manifest.base_model == "mlx-community/tiny-4bit"
    stored = load_file(folder / WEIGHTS_FILE)
    name = f"base_model.model.model.layers.1.{Q}"
    assert torch.equal(stored[f"{name}.lora_A.weight"], mlx.tensors[f"model.layers.1.{Q}.lora_a"].T)
    assert torch.equal(stored[f"{name}.lora_B.weight"], mlx.tensors[f"model.layers.1.{Q}.lora_b"].T)
    logits = mlx.logits()
    torch.testing.assert_close(peft_logits(base, folder), logits, rtol=0, atol=1e-4)
    with torch.no_grad():
        assert (logits - model(IDS).logits).abs().max() > 1e-2


def test_dora(base: Path, known: BaseSpec, model: Any, tmp_path: Path) -> None:
    mlx = Mlx(model, dora=True)
    folder = mlx.save(tmp_path / "a")
    convert(folder, known)
    assert json.loads((folder / CONFIG_FILE).read_text())["use_dora"] is True
    logits = mlx.logits()
    torch.testing.assert_close(peft_logits(base, folder), logits, rtol=0, atol=1e-4)
    mlx.tensors = {k: v for k, v in mlx.tensors.items() if not k.endswith(".m")}
    assert (mlx.logits() - logits).abs().max() > 1e-2


def test_embedding_and_head(base: Path, known: BaseSpec, model: Any, tmp_path: Path) -> None:
    mlx = Mlx(model)
    for path in ("model.embed_tokens", "lm_head"):
        mlx.add(path)
        mlx.config["lora_parameters"]["keys"].append(path)
    folder = mlx.save(tmp_path / "a")
    convert(folder, known)
    stored = load_file(folder / WEIGHTS_FILE)
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    assert stored[name].shape == (4, known.vocab_size)
    torch.testing.assert_close(peft_logits(base, folder), mlx.logits(), rtol=0, atol=1e-4)

    tied = replace(known, tied_head=True)
    (violation,) = refusal(mlx.save(tmp_path / "b"), tied)
    assert (violation.code, violation.subject) == ("unsupported_feature", "model.embed_tokens")


def test_dora_of_an_embedding_is_refused(known: BaseSpec, model: Any, tmp_path: Path) -> None:
    mlx = Mlx(model, dora=True)
    mlx.add("model.embed_tokens", dora=True)
    mlx.config["lora_parameters"]["keys"].append("model.embed_tokens")
    (violation,) = refusal(mlx.save(tmp_path / "a"), known)
    assert (violation.code, violation.subject) == ("unsupported_feature", "model.embed_tokens")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_bits(
    known: BaseSpec, model: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    mlx = Mlx(model)
    mlx.tensors = {
        name: tensor if UP in name else tensor.to(dtype) for name, tensor in mlx.tensors.items()
    }
    folder = mlx.save(tmp_path / "a")
    convert(folder, known)
    for name, tensor in load_file(folder / WEIGHTS_FILE).items():
        source = name.removeprefix("base_model.model.").removesuffix(".weight").lower()
        assert tensor.dtype == (torch.float32 if UP in name else dtype)
        assert torch.equal(tensor, mlx.tensors[source].T)


def test_the_bytes_depend_on_the_adapter_alone(known: BaseSpec, model: Any, tmp_path: Path) -> None:
    """Not on the file's name, its metadata, the order of its tensors, or settings of training."""
    mlx = Mlx(model)
    first = mlx.save(tmp_path / "a")
    convert(first, known)
    mlx.config = dict(reversed(mlx.config.items())) | {"iters": 7}
    second = mlx.save(tmp_path / "b", WEIGHTS_FILE, format="mlx", note="2")
    convert(second, known)
    header, data, end = {}, b"", 0
    for name, tensor in reversed(mlx.tensors.items()):
        raw = struct.pack(f"<{tensor.numel()}f", *tensor.flatten().tolist())
        begin, end = end, end + len(raw)
        shape = list(tensor.shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        data += raw
    third = mlx.save(tmp_path / "c")
    write_safetensors(third / MLX_WEIGHTS_FILE, header, data)
    convert(third, known)
    assert content_digest(first) == content_digest(second) == content_digest(third)
    assert convert(first, known) == []
    assert content_digest(first) == content_digest(second)


def test_peft_layout_is_left_alone_whatever_its_shapes(
    adapter: Path, known: BaseSpec, tmp_path: Path
) -> None:
    digest = content_digest(adapter)
    assert convert(adapter, known) == []
    assert content_digest(adapter) == digest
    (adapter / WEIGHTS_FILE).rename(adapter / MLX_WEIGHTS_FILE)
    (note,) = convert(adapter, known)
    assert "PEFT's layout" in note
    assert content_digest(adapter) == digest


@pytest.mark.parametrize("missing", [CONFIG_FILE, WEIGHTS_FILE])
def test_what_is_broken_anyway_is_left_to_validation(
    adapter: Path, known: BaseSpec, missing: str
) -> None:
    (adapter / missing).write_bytes(b"{")
    assert convert(adapter, known) == []
    (adapter / missing).unlink()
    assert convert(adapter, known) == []
    assert convert(adapter.parent / "none", known) == []


def test_older_configs(known: BaseSpec, model: Any, tmp_path: Path) -> None:
    mlx = Mlx(model, dora=True)
    del mlx.config["fine_tune_type"], mlx.config["num_layers"]
    mlx.config |= {"use_dora": True, "lora_layers": 2}
    mlx.config["lora_parameters"] |= {"alpha": 4.0}  # the rank: either reading is the same
    assert convert(mlx.save(tmp_path / "a"), known)
    mlx.config["lora_parameters"] |= {"alpha": 16.0}
    (violation,) = refusal(mlx.save(tmp_path / "b"), known)
    assert violation.code == "ambiguous_layout" and "alpha" in violation.message


def test_the_last_layers_and_the_keys_say_what_must_be_there(
    known: BaseSpec, model: Any, tmp_path: Path
) -> None:
    mlx = Mlx(model)
    mlx.config["num_layers"] = 1
    found = refusal(mlx.save(tmp_path / "a"), known)
    assert {(v.code, v.subject) for v in found} == {
        ("module_not_targeted", f"model.layers.0.{name}") for name in (Q, UP)
    }
    mlx.tensors = {k: v for k, v in mlx.tensors.items() if "layers.1" in k}
    assert convert(mlx.save(tmp_path / "b"), known)
    for keys, code, subject in (
        ([Q], "module_not_targeted", UP),
        ([Q, UP, "mlp.down_proj"], "incomplete_adapter", "mlp.down_proj"),
    ):
        mlx.config["lora_parameters"]["keys"] = keys
        (violation,) = refusal(mlx.save(tmp_path / "c"), known)
        assert (violation.code, violation.subject) == (code, f"model.layers.1.{subject}")
    mlx.config["lora_parameters"]["keys"] = None
    assert convert(mlx.save(tmp_path / "d"), known)
    del mlx.tensors[f"model.layers.1.{UP}.lora_a"]
    (violation,) = refusal(mlx.save(tmp_path / "e"), known)
    assert (violation.code, violation.subject) == ("incomplete_adapter", f"model.layers.1.{UP}")


def test_names_of_the_multimodal_sibling_are_found(
    known: BaseSpec, model: Any, tmp_path: Path
) -> None:
    mlx = Mlx(model)
    mlx.tensors = {f"language_model.{name}": tensor for name, tensor in mlx.tensors.items()}
    folder = mlx.save(tmp_path / "a")
    convert(folder, known)
    assert len(validate(folder, known, Limits()).modules) == 4


def test_unknown_modules_are_left_to_validation(
    known: BaseSpec, model: Any, tmp_path: Path
) -> None:
    mlx = Mlx(model)
    for side in "ab":
        mlx.tensors[f"vision.q.lora_{side}"] = torch.zeros(4, 4)
    folder = mlx.save(tmp_path / "a")
    convert(folder, known)
    with pytest.raises(AdapterRejected, match="vision.q"):
        validate(folder, known, Limits())


Change = Callable[[Mlx], Any]
P = "lora_parameters"


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        (lambda m: m.config.update(fine_tune_type="full", **{P: None}), "unsupported_feature", ""),
        (lambda m: m.config.update(fine_tune_type="other"), "invalid_adapter_config", "other"),
        (lambda m: m.config.update({P: None}), "invalid_adapter_config", P),
        (lambda m: m.config.update({P: {"scale": 1.0}}), "invalid_adapter_config", "rank"),
        (lambda m: m.config[P].pop("scale"), "invalid_adapter_config", "scale"),
        (lambda m: m.config[P].update(scale=-1.0), "invalid_adapter_config", "scale"),
        (lambda m: m.config[P].update(scale=True), "invalid_adapter_config", "scale"),
        (lambda m: m.config[P].update(scale=10**400), "invalid_adapter_config", "scale"),
        (lambda m: m.config[P].update(rank=0), "invalid_adapter_config", "rank"),
        (lambda m: m.config[P].update(rank="4"), "invalid_adapter_config", "rank"),
        (lambda m: m.config[P].update(rank=5), "shape_mismatch", "rank 5"),
        (lambda m: m.config[P].update(keys="q_proj"), "invalid_adapter_config", "keys"),
        (lambda m: m.config[P].update(rslora=True), "invalid_adapter_config", "rslora"),
        (lambda m: m.config.pop("num_layers"), "invalid_adapter_config", "missing"),
        (lambda m: m.config.update(peft_type="LORA"), "ambiguous_layout", "PEFT"),
        (
            lambda m: (m.config.pop(P), m.config.pop("fine_tune_type")),
            "ambiguous_layout",
            "config of another layout",
        ),
        (
            lambda m: m.tensors.update({"model.layers.0.mlp.x.lora_A.weight": torch.zeros(4, 4)}),
            "unexpected_key",
            "MLX-LM",
        ),
        (
            lambda m: m.tensors.update({f"model.layers.0.{Q}.m": torch.ones(64)}),
            "unsupported_tensor",
            "dora",
        ),
        (lambda m: m.config.update(fine_tune_type="dora"), "incomplete_adapter", "m"),
        (
            lambda m: m.tensors.update({f"layers.0.{Q}.lora_a": torch.zeros(64, 4)}),
            "duplicate_tensor",
            "same tensor",
        ),
        (
            lambda m: m.tensors.update({f"model.layers.0.{Q}.lora_a": torch.zeros(4, 64)}),
            "shape_mismatch",
            "[in, 4]",
        ),
        (
            lambda m: m.tensors.update({f"model.layers.0.{Q}.lora_a": torch.zeros(2, 4, 64)}),
            "unsupported_tensor",
            "experts",
        ),
        (
            lambda m: m.tensors.update({f"model.layers.0.{Q}.lora_a": torch.zeros(64, 4).double()}),
            "unsupported_dtype",
            "F64",
        ),
    ],
)
def test_broken_or_ambiguous_files_are_refused(
    known: BaseSpec, model: Any, tmp_path: Path, change: Change, code: str, told: str
) -> None:
    mlx = Mlx(model)
    change(mlx)
    for name in (MLX_WEIGHTS_FILE, WEIGHTS_FILE):
        found = refusal(mlx.save(tmp_path / name, name), known)
        assert {v.code for v in found} == {code}
        assert all(told in v.message for v in found)


def test_other_tensors_under_mlx_config_are_refused(
    adapter: Path, known: BaseSpec, model: Any
) -> None:
    (adapter / CONFIG_FILE).write_text(json.dumps(Mlx(model).config))
    (violation,) = refusal(adapter, known)
    assert violation.code == "ambiguous_layout" and "tensors of another layout" in violation.message


def test_two_weights_files_are_refused(adapter: Path, known: BaseSpec, model: Any) -> None:
    Mlx(model).save(adapter)
    (violation,) = refusal(adapter, known)
    assert (violation.code, violation.subject) == ("ambiguous_layout", MLX_WEIGHTS_FILE)


def test_a_corrupt_mlx_file_is_refused_by_its_name(
    known: BaseSpec, model: Any, tmp_path: Path
) -> None:
    folder = Mlx(model).save(tmp_path / "a")
    whole = (folder / MLX_WEIGHTS_FILE).read_bytes()
    for raw in (b"", b"PK\x03\x04", whole[:-1], whole + b"0", b"\xff" * 16):
        (folder / MLX_WEIGHTS_FILE).write_bytes(raw)
        (violation,) = refusal(folder, known)
        assert (violation.code, violation.subject) == ("corrupt_adapter", MLX_WEIGHTS_FILE)


def test_many_violations_of_a_kind_are_counted(known: BaseSpec, model: Any, tmp_path: Path) -> None:
    mlx = Mlx(model)
    mlx.tensors |= {f"x{i}.lora_c": torch.zeros(1) for i in range(40)}
    found = refusal(mlx.save(tmp_path / "a"), known)
    assert len(found) == 17 and "24 more" in found[-1].message
