"""What a loaded base offers to adapters."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from adapters.manifest import BaseSpec, TargetSpec
from base_engine.row_layout import RowLayout

log = logging.getLogger(__name__)

#: Rotary embeddings whose frequencies depend on the longest sequence of the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")

#: Values of each parameter that a base is told by.
_SIGNS = 4096

#: What some bases hold in one piece, and its parts in order.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

#: Architectures whose fused linears are their parts one after the other; others interleave them.
_FUSED_IN_ORDER = {
    "phi3": ("qkv_proj", "gate_up_proj"),
    "glm": ("gate_up_proj",),
    "glm4": ("gate_up_proj",),
}


def base_spec(model: PreTrainedModel, name: str, layouts: Mapping[str, RowLayout]) -> BaseSpec:
    """`layouts` are those of the modules that see a batch row by row (see `learned_layouts`)."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    linears = {
        path: sizes
        for path, module in modules.items()
        if path in layouts and layouts[path].flat and (sizes := linear_sizes(module))
    }
    return BaseSpec(
        name=name,
        vocab_size=weight.shape[0],
        max_positions=_max_positions(text_config(model)),
        targets=_targets(linears),
        output_module=_path_of(head, modules),
        tied_head=head is not None and head.weight is weight,
        digest=_digest(model),
        embedding=_path_of(embedding, modules) or "",
        parameters={
            f"{path}.{parameter_name}": tuple(parameter.shape)
            for path in layouts
            for parameter_name, parameter in modules[path].named_parameters(recurse=False)
        },
        model_type=text_config(model).model_type,
        fused=dict(_fused(linears, text_config(model))),
        transposed=frozenset(_transposed(modules, layouts)),
    )


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear that can be adapted, None for anything else.

    Exact types: a subclass may compute something else than the plain product.
    """
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module) is Conv1D:
        return module.nx, module.nf
    return None


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    config: PretrainedConfig = model.config.get_text_config(decoder=True)
    return config


def _path_of(wanted: nn.Module | None, modules: Mapping[str, nn.Module]) -> str | None:
    return next((path for path, module in modules.items() if module is wanted), None)


def _targets(linears: Mapping[str, tuple[int, int]]) -> tuple[TargetSpec, ...]:
    groups: dict[tuple[str, int, int], list[str]] = {}
    for path, sizes in linears.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", path)
        groups.setdefault((pattern, *sizes), []).append(path)
    return tuple(
        TargetSpec(pattern.rpartition("*.")[2], in_features, out_features, tuple(paths))
        for (pattern, in_features, out_features), paths in groups.items()
    )


def _fused(
    linears: Mapping[str, tuple[int, int]], config: PretrainedConfig
) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
    for path, (_, out_features) in linears.items():
        parent, _, name = path.rpartition(".")
        for whole, names in _FUSED.items():
            parts = [f"{parent}.{part}" for part in names]
            if name == names[0] and all(part in linears for part in parts):
                yield f"{parent}.{whole}", tuple((part, linears[part][1]) for part in parts)
            elif name == whole and whole in _FUSED_IN_ORDER.get(config.model_type, ()):
                sizes = _part_sizes(whole, out_features, config)
                yield path, tuple(zip(parts, sizes, strict=True))


def _part_sizes(whole: str, out_features: int, config: PretrainedConfig) -> tuple[int, ...]:
    if whole == "gate_up_proj":
        return out_features // 2, out_features // 2
    heads: int = config.num_attention_heads
    kv_heads: int = config.num_key_value_heads
    head = out_features // (heads + 2 * kv_heads)
    return heads * head, kv_heads * head, kv_heads * head


def _transposed(modules: Mapping[str, nn.Module], layouts: Iterable[str]) -> Iterator[str]:
    for path in layouts:
        if type(modules[path]) is Conv1D:
            yield f"{path}.weight"
        # Set by transformers on every expert stack that goes through its experts interface.
        if getattr(modules[path], "is_transposed", False):
            for name, parameter in modules[path].named_parameters(recurse=False):
                if parameter.ndim == 3:
                    yield f"{path}.{name}"


def _digest(model: PreTrainedModel) -> str:
    """Hex sha256 of the signs of up to _SIGNS values spread over each parameter.

    Signs are the same in every dtype; and any training flips many of those near zero.
    """
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(f"{name} {list(parameter.shape)}\n".encode())
        stride = max(1, parameter.numel() // _SIGNS)
        signs = torch.signbit(parameter.flatten()[::stride][:_SIGNS])
        found.update(np.packbits(signs.cpu().numpy()).tobytes())
    return found.hexdigest()


def _max_positions(config: PretrainedConfig) -> int:
    limit: int = config.max_position_embeddings
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
    for parameters in kinds:
        if parameters.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            original: int = (
                parameters.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or limit
            )
            if original < limit:
                log.warning(
                    "rope type %r changes with the longest sequence of a batch; the context is "
                    "limited to the original %d tokens, where it does not",
                    parameters["rope_type"],
                    original,
                )
            limit = min(limit, original)
    return limit
