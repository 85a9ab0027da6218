"""Adapter folders to spoil, and the tiny base they are for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters.errors import AdapterRejected, Violation
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, BaseSpec, TargetSpec
from adapters.validation import Limits, validate

Q0 = "model.layers.0.self_attn.q_proj"
Q1 = "model.layers.1.self_attn.q_proj"
A0 = f"base_model.model.{Q0}.lora_A.weight"
B0 = f"base_model.model.{Q0}.lora_B.weight"


def spec_of(base: Path) -> BaseSpec:
    """The base's linears, grouped as the engine groups them."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    groups: dict[tuple[str, int, int], list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            name = re.sub(r"^.*\.\d+\.", "", path)
            key = (name, module.in_features, module.out_features)
            groups.setdefault(key, []).append(path)
    return BaseSpec(
        name="org/tiny",
        vocab_size=model.config.vocab_size,
        max_positions=model.config.max_position_embeddings,
        targets=tuple(TargetSpec(*key, tuple(paths)) for key, paths in groups.items()),
        output_module="lm_head",
        tied_head=bool(model.config.tie_word_embeddings),
    )


def edit_config(folder: Path, **changes: Any) -> None:
    """Set fields of the config; `...` removes one."""
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Let `change` alter the file's tensors in place."""
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / WEIGHTS_FILE)


def rename_keys(folder: Path, rename: Callable[[str], str]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        renamed = {rename(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    edit_weights(folder, change)


def write_safetensors(
    path: Path, header: dict[str, Any] | list[Any] | bytes | str, data: bytes = b""
) -> Path:
    """A safetensors file with this header, right or wrong."""
    text = json.dumps(header) if isinstance(header, dict | list) else header
    raw = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def violations_of(
    folder: Path, base: BaseSpec, limits: Limits | None = None
) -> tuple[Violation, ...]:
    """Why the adapter in `folder` is refused; fails where it is not."""
    with pytest.raises(AdapterRejected) as error:
        validate(folder, base, limits or Limits())
    return error.value.violations


def codes_of(folder: Path, base: BaseSpec) -> set[str]:
    return {violation.code for violation in violations_of(folder, base)}
