"""One change to a good adapter's two files, as a strategy of hypothesis."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.fuzz.mutations import drawn
from tests.fuzz.uploads import Folder


@dataclass(frozen=True)
class Spoilt:
    """The files of the adapter `name` after the change, and what was done, in words."""

    name: str
    files: Folder
    how: str

    def __repr__(self) -> str:
        return f"{self.name}: {self.how}"


@drawn
def spoilt(draw: st.DrawFn, good: dict[str, Folder]) -> Spoilt:
    """One of `good` with one change: to a tensor, to its name, to the bytes, or to the config."""
    name = draw(st.sampled_from(sorted(good)))
    files = good[name]
    kind = draw(st.sampled_from(["tensor"] * 5 + ["config"] * 3 + ["bytes"] * 2))
    if kind == "config":
        text, how = _config(draw, json.loads(files[CONFIG_FILE]))
        return Spoilt(name, files | {CONFIG_FILE: text}, how)
    if kind == "bytes":
        file = draw(st.sampled_from([WEIGHTS_FILE, WEIGHTS_FILE, CONFIG_FILE]))
        data, how = _bytes(draw, files[file])
        return Spoilt(name, files | {file: data}, f"{file}: {how}")
    tensors = load(files[WEIGHTS_FILE])
    how = _tensor(draw, tensors)
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return Spoilt(name, files | {WEIGHTS_FILE: data}, how)


def _tensor(draw: st.DrawFn, tensors: dict[str, Tensor]) -> str:
    """Change `tensors` in place; says how."""
    name, other = (draw(st.sampled_from(sorted(tensors))) for _ in range(2))
    change = draw(st.sampled_from([_name, _name, _name, _two, _shape, _shape, _values]))
    return change(draw, tensors, name, other)


def _name(draw: st.DrawFn, tensors: dict[str, Tensor], name: str, other: str) -> str:
    kind = draw(st.sampled_from(["drop", "rename", "rename", "copy"]))
    tensor = tensors[name]
    if kind != "copy":
        del tensors[name]
    if kind == "drop":
        return f"drop {name}"
    new = _renamed(draw, name)
    tensors[new] = tensor.clone()
    return f"{kind} {name} to {new}"


def _two(draw: st.DrawFn, tensors: dict[str, Tensor], name: str, other: str) -> str:
    if draw(st.booleans()):
        tensors[name], tensors[other] = tensors[other], tensors[name]
        return f"swap {name} and {other}"
    tensors[name] = tensors[other].clone()
    return f"overwrite {name} by {other}"


def _shape(draw: st.DrawFn, tensors: dict[str, Tensor], name: str, other: str) -> str:
    tensor = tensors[name]
    axis = draw(st.integers(0, tensor.dim() - 1))
    shape = tuple(tensor.shape)
    shapes = [shape[::-1], (tensor.numel(),), (1, *shape), (*shape, 1), (2, tensor.numel() // 2)]
    kind = draw(st.sampled_from(["reshape", "transpose", "pad", "cut"]))
    if kind == "reshape":
        tensors[name] = tensor.reshape(draw(st.sampled_from(shapes)))
    elif kind == "transpose":
        tensors[name] = tensor.permute(*reversed(range(tensor.ndim)))
    elif kind == "pad":
        tensors[name] = torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis)
    else:
        tensors[name] = tensor.narrow(axis, 0, max(1, tensor.shape[axis] - 1))
    return f"{kind} {name} to {list(tensors[name].shape)}"


def _values(draw: st.DrawFn, tensors: dict[str, Tensor], name: str, other: str) -> str:
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(_DTYPES))
        tensors[name] = tensors[name].to(dtype)
        return f"retype {name} to {dtype}"
    value = draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 0.0, 1.0]))
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[draw(st.integers(0, tensors[name].numel() - 1))] = value
    return f"set a value of {name} to {value}"


_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.bool),
    torch.float8_e4m3fn,
)
#: Parts of names and what may come in their place.
_PARTS = {
    ".0.": (".1.", ".2.", ".00.", ".-1."),
    ".1.": (".0.", ".7."),
    "lora_A": ("lora_B", "lora_C", "lora_a", "lora_A.default", "lora_down", "lora_embedding_A"),
    "lora_B": ("lora_A", "lora_b", "lora_B.default", "lora_up", "lora_embedding_B"),
    "lora_magnitude_vector": ("lora_magnitude_vector.weight", "magnitude", "lora_A"),
    "q_proj": ("k_proj", "v_proj", "q", "qkv_proj", "q_proj.base_layer"),
    "k_proj": ("v_proj", "q_proj"),
    "up_proj": ("gate_proj", "gate_up_proj"),
    "down_proj": ("up_proj", "down_proj.original_module"),
    "self_attn": ("attn", "mlp", "self_attn.module"),
    "base_model.model.": ("", "base_model.", "base_model.model.base_model.model.", "model."),
    "model.layers": ("layers", "model.language_model.layers", "transformer.layers"),
    "lm_head": ("model.lm_head", "embed_tokens", "lm_head.modules_to_save.default"),
    "embed_tokens": ("lm_head", "tokens", "embed_tokens.base_layer"),
    "weight": ("bias", "default.weight", "weight.weight", "base_layer.weight"),
}


def _renamed(draw: st.DrawFn, name: str) -> str:
    parts = [part for part in _PARTS if part in name]
    part = draw(st.sampled_from(parts))
    return name.replace(part, draw(st.sampled_from(_PARTS[part])), 1)


def _config(draw: st.DrawFn, config: dict[str, Any]) -> tuple[bytes, str]:
    field = draw(st.sampled_from(sorted(_VALUES)))
    value = draw(st.sampled_from(_VALUES[field]))
    if field == "target_modules" and value == "one less":
        names = config["target_modules"]
        value = sorted(names)[1:] if isinstance(names, list) else ["q_proj"]
    if draw(st.integers(1, 8)) == 4:
        config.pop(field, None)
        return json.dumps(config).encode(), f"config without {field}"
    return json.dumps(config | {field: value}).encode(), f"config with {field} {value!r}"


_VALUES: dict[str, list[Any]] = {
    "r": [1, 2, 3, 8, 0, -1, 4.0, "4", None, 10**9],
    "lora_alpha": [0, 1, 8.5, 16, -8, "16", 1e308, None],
    "rank_pattern": [{"q_proj": 2}, {"nothing": 2}, {".*": 3}, {"(": 2}, [], {"q_proj": 4}],
    "alpha_pattern": [{"q_proj": 3}, {"proj": 3}, {r"layers\.0\..*": 3}, {".*": 5}, {"x": 1}],
    "target_modules": [
        "one less",
        ["q_proj"],
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "all-linear",
        ".*_proj",
        r".*layers\.0\..*",
        ["proj"],
        [],
        None,
        ["model.layers.0.self_attn.q_proj"],
    ],
    "exclude_modules": [["q_proj"], r".*\.0\..*", ["nothing"], "", ["lm_head"]],
    "layers_to_transform": [0, [1], [0, 1], [5], []],
    "layers_pattern": ["layers", "h", [], ["layers", "h"]],
    "use_rslora": [True, False, 1],
    "use_dora": [True, False, "yes"],
    "lora_bias": [True, False],
    "bias": ["all", "lora_only", "none", "some"],
    "fan_in_fan_out": [True, False],
    "modules_to_save": [["lm_head"], ["norm"], ["embed_tokens", "lm_head"], ["q_proj"], []],
    "trainable_token_indices": [[1], {"embed_tokens": [5]}, {"lm_head": [1]}, []],
    "alora_invocation_tokens": [[60, 61, 62], [], [400]],
    "init_lora_weights": [False, "gaussian", "pissa", "olora", "eva", "loftq", "nothing"],
    "lora_dropout": [0.5, 1.0],
    "peft_type": ["LORA", "lora", "ADALORA", "NOPE", None],
    "task_type": ["CAUSAL_LM", "SEQ_CLS", None],
    "inference_mode": [True, False],
    "base_model_name_or_path": ["other", None, "../../x"],
    "layer_replication": [[[0, 2]], None],
    "target_parameters": [["q_proj.weight"], ["norm.weight"], ["lm_head.weight"], []],
    "use_qalora": [True],
    "future": [1, None],
}


def _bytes(draw: st.DrawFn, data: bytes) -> tuple[bytes, str]:
    at = draw(st.integers(0, len(data) - 1))
    if draw(st.booleans()):
        at = draw(st.integers(0, min(len(data) - 1, 2000)))  # where the header is
    kind = draw(st.sampled_from(["flip", "flip", "flip", "cut", "drop", "append", "double"]))
    if kind == "flip":
        bit = draw(st.integers(0, 7))
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], f"flip bit {bit} at {at}"
    if kind == "cut":
        return data[:at], f"cut at {at}"
    if kind == "drop":
        return data[:at] + data[at + 1 :], f"drop byte {at}"
    if kind == "append":
        return data + bytes(draw(st.integers(1, 64))), "append zeros"
    return data[:at] + data[at : at + 1] + data[at:], f"double byte {at}"
