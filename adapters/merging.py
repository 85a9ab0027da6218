"""Composed adapters, computed by PEFT's own merging functions.

Run as a process of its own (`python -m adapters.merging COMPOSITION.json`), so that the serving
process neither computes nor loads anything for it and its random numbers stay its own.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.utils import merge_utils
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from adapters.composition import Composition, Source
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE


def compose(spec: Composition) -> None:
    """Write the composed adapter into `spec.target`: float32, scale 1 everywhere.

    As `LoraModel.add_weighted_adapter` of PEFT does, whose `cat` is exact and whose other types
    merge A and B apart. Raises ValueError when the ranks of a module differ, except for `cat`.
    """
    torch.manual_seed(spec.seed)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    loras = [_by_module(source, spec.outputs) for source in spec.sources]
    for module in spec.outputs:
        parts = [
            (*pairs[module], source.weight)
            for pairs, source in zip(loras, spec.sources, strict=True)
            if module in pairs
        ]
        a, b = _cat(parts) if spec.combination_type == "cat" else _merged(module, parts, spec)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.contiguous()
        ranks[module] = len(a)
    save_file(tensors, Path(spec.target) / WEIGHTS_FILE)
    config = json.dumps(_config(spec, ranks), indent=2, sort_keys=True)
    (Path(spec.target) / CONFIG_FILE).write_text(config)


_Pair = tuple[Tensor, Tensor, float]  # A [rank, in], B [out, rank], scale


def _by_module(source: Source, outputs: dict[str, int]) -> dict[str, _Pair]:
    """Each adapted module's A, B and scale in float32; several LoRAs of one module are stacked."""
    found: dict[str, list[_Pair]] = {}
    with safe_open(Path(source.folder) / WEIGHTS_FILE, "pt") as file:
        for lora in source.modules:
            a = file.get_tensor(lora.a_key).float()
            rows = file.get_tensor(lora.b_key).float()
            if lora.b_rows is not None:
                rows = rows[slice(*lora.b_rows)]
            b = torch.zeros(outputs[lora.module], lora.rank)
            b[lora.out_start : lora.out_start + len(rows)] = rows
            found.setdefault(lora.module, []).append((a, b, lora.scale))
    return {module: _stacked(pairs) for module, pairs in found.items()}


def _stacked(pairs: Sequence[_Pair]) -> _Pair:
    if len(pairs) == 1:
        return pairs[0]
    b = torch.cat([b * scale for _, b, scale in pairs], 1)
    return torch.cat([a for a, _, _ in pairs]), b, 1.0


def _cat(parts: Sequence[tuple[Tensor, Tensor, float, float]]) -> tuple[Tensor, Tensor]:
    a = torch.cat([a * weight * scale for a, _, scale, weight in parts])
    return a, torch.cat([b for _, b, _, _ in parts], 1)


def _merged(
    module: str, parts: Sequence[tuple[Tensor, Tensor, float, float]], spec: Composition
) -> tuple[Tensor, Tensor]:
    ranks = sorted({len(a) for a, _, _, _ in parts})
    if len(ranks) > 1:
        kind = spec.combination_type
        raise ValueError(f"{module} has the ranks {ranks}; {kind} needs equal ones (cat does not)")
    factors = [weight * scale for _, _, scale, weight in parts]
    # The square root of each weight goes to A and to B, its sign to A alone.
    roots = torch.tensor([math.sqrt(abs(factor)) for factor in factors])
    signs = torch.tensor([1.0 if factor >= 0 else -1.0 for factor in factors])
    merge = _merge(spec)
    a = merge([a for a, _, _, _ in parts], roots * signs)
    return a, merge([b for _, b, _, _ in parts], roots)


def _merge(spec: Composition) -> Callable[[list[Tensor], Tensor], Tensor]:
    kind, density, sign = spec.combination_type, spec.density or 0.0, spec.majority_sign_method

    def merge(tensors: list[Tensor], weights: Tensor) -> Tensor:
        match kind:
            case "linear":
                merged: Tensor = merge_utils.task_arithmetic(tensors, weights)
            case "ties":
                merged = merge_utils.ties(tensors, weights, density, sign)
            case "dare_linear":
                merged = merge_utils.dare_linear(tensors, weights, density)
            case "dare_ties":
                merged = merge_utils.dare_ties(tensors, weights, density, sign)
            case "magnitude_prune":
                merged = merge_utils.magnitude_prune(tensors, weights, density)
            case _:
                raise ValueError(f"{kind!r} is no combination type")
        return merged

    return merge


def _config(spec: Composition, ranks: dict[str, int]) -> dict[str, Any]:
    usual = max(set(ranks.values()), key=list(ranks.values()).count)
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.base_model,
        "target_modules": sorted(ranks),
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": others,
        "alpha_pattern": others,
        "bias": "none",
        "inference_mode": True,
    }


if __name__ == "__main__":
    try:
        compose(Composition.from_json(json.loads(Path(sys.argv[1]).read_text())))
    except ValueError as reason:
        print(reason, file=sys.stderr)
        sys.exit(3)
