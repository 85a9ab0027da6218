"""Adapter folders to spoil, and the tiny base they are for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.errors import AdapterRejected, Violation
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, BaseSpec
from adapters.terms import BaseParameters
from adapters.validation import Limits, validate
from base_engine.model import Decoder

Q0 = "model.layers.0.self_attn.q_proj"
Q1 = "model.layers.1.self_attn.q_proj"
A0 = f"base_model.model.{Q0}.lora_A.weight"
B0 = f"base_model.model.{Q0}.lora_B.weight"


def spec_of(base: Path) -> BaseSpec:
    """What the engine offers to adapters of this base, under a name of its own."""
    return replace(decoder_of(base).spec, name="org/tiny", digest="")


def parameters_of(base: Path) -> BaseParameters:
    return decoder_of(base).parameter


@lru_cache(maxsize=16)
def decoder_of(base: Path) -> Decoder:
    return Decoder.load(base, name=None, dtype="float32", device="cpu")


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
    folder: Path,
    base: BaseSpec,
    limits: Limits | None = None,
    parameters: BaseParameters | None = None,
) -> tuple[Violation, ...]:
    """Why the adapter in `folder` is refused; fails where it is not."""
    with pytest.raises(AdapterRejected) as error:
        validate(folder, base, limits or Limits(), parameters=parameters)
    return error.value.violations


def codes_of(folder: Path, base: BaseSpec, parameters: BaseParameters | None = None) -> set[str]:
    return {violation.code for violation in violations_of(folder, base, None, parameters)}
