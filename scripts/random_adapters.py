"""Random LoRA adapters for any base with the usual seven projections: to be served, not to be read.

Untrained, so made in a moment; the file's two parts are those that PEFT writes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE

RANK = 16
ALPHA = 32
B_STD = 0.02
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adaptable_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Path of each projection in the safetensors of `model` -> (in_features, out_features).

    Reads headers only. Raises ValueError where there is none.
    """
    shapes = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():
                module = key.removesuffix(".weight")
                if module != key and module.rpartition(".")[2] in PROJECTIONS:
                    out_features, in_features = tensors.get_slice(key).get_shape()
                    shapes[module] = (in_features, out_features)
    if not shapes:
        raise ValueError(f"{model} has no safetensors with linears named {', '.join(PROJECTIONS)}")
    return shapes


def adapter_elements(shapes: dict[str, tuple[int, int]]) -> int:
    """Elements of one adapter's A and B matrices together."""
    return sum(RANK * (inputs + outputs) for inputs, outputs in shapes.values())


def write_adapter(shapes: dict[str, tuple[int, int]], folder: Path, seed: int) -> None:
    """Write the adapter with number `seed` into `folder`, in bfloat16.

    A is drawn as PEFT does (Kaiming: uniform within 1 / sqrt(in_features)), B is N(0, B_STD), so
    that every adapter changes what the base says.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (inputs, outputs) in shapes.items():
        a = torch.rand(RANK, inputs, generator=generator).mul_(2).sub_(1).div_(math.sqrt(inputs))
        b = torch.randn(outputs, RANK, generator=generator).mul_(B_STD)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({module.rpartition(".")[2] for module in shapes}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
