"""What PEFT's LoRA family can hold, feature by feature: adapters saved by PEFT itself (or written
as other tools write them), and the PEFT adapter that must compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.tiny import make_adapter

#: Tokens that activate the activated LoRA, and that every prompt of a parity run holds once.
INVOCATION = (60, 61, 62)


@dataclass(frozen=True)
class Served:
    """What a feature's adapter is asked as, and what it must equal.

    `parts` are the folders with their weights; `oracle` is the PEFT adapter that is right.
    """

    parts: tuple[tuple[Path, float], ...]
    oracle: Path


@dataclass(frozen=True)
class Feature:
    """`build(base, folder)` saves the adapter below `folder`. `refused` is the violation's code of
    what is not served; `vocab` how many ids the adapter adds."""

    name: str
    build: Callable[[Path, Path], Served]
    family: str = "llama"
    refused: str = ""


def saved(**options: Any) -> Callable[[Path, Path], Served]:
    """An adapter that PEFT saves with these options of its LoraConfig (see `make_adapter`)."""

    def build(base: Path, folder: Path) -> Served:
        adapter = make_adapter(base, folder / "adapter", seed=3, **options)
        return Served(((adapter, 1.0),), adapter)

    return build


def rewritten(
    change: Callable[[dict[str, Tensor], dict[str, Any]], tuple[dict[str, Tensor], dict[str, Any]]],
    weights_file: str = WEIGHTS_FILE,
    **options: Any,
) -> Callable[[Path, Path], Served]:
    """PEFT's adapter is the oracle; served is `change(tensors, config)` of it."""

    def build(base: Path, folder: Path) -> Served:
        oracle = make_adapter(base, folder / "oracle", seed=3, **options)
        tensors, config = change(
            load_file(oracle / WEIGHTS_FILE), json.loads((oracle / CONFIG_FILE).read_text())
        )
        return Served(((write(folder / "adapter", tensors, config, weights_file), 1.0),), oracle)

    return build


def write(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], file: str = WEIGHTS_FILE
) -> Path:
    """Save an adapter's two files as they are given."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def _config(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return config | changes


def _renamed(prefix: str) -> Callable[..., tuple[dict[str, Tensor], dict[str, Any]]]:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> Any:
        return {
            prefix + name.removeprefix("base_model.model."): tensor
            for name, tensor in tensors.items()
        }, config

    return change


def _infixed(tensors: dict[str, Tensor], config: dict[str, Any]) -> Any:
    return {name.replace(".weight", ".default.weight"): t for name, t in tensors.items()}, config


def _mlx(tensors: dict[str, Tensor], config: dict[str, Any]) -> Any:
    renamed = {}
    for name, tensor in tensors.items():
        path = name.removeprefix("base_model.model.").removesuffix(".weight")
        renamed[path.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = tensor.T
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    return renamed, {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}


def _fused(base: Path, folder: Path) -> Served:
    """One LoRA on qkv_proj and one on gate_up_proj, for a base that has the parts; the oracle has
    the same A on each part, and its share of B."""
    generator = torch.Generator().manual_seed(4)
    groups = {
        "self_attn.qkv_proj": (64, {"q_proj": 64, "k_proj": 32, "v_proj": 32}),
        "mlp.gate_up_proj": (64, {"gate_proj": 128, "up_proj": 128}),
    }
    whole: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    for layer in range(2):
        for name, (inner, sizes) in groups.items():
            prefix = f"base_model.model.model.layers.{layer}."
            a = torch.randn(4, inner, generator=generator) * 0.2
            b = torch.randn(sum(sizes.values()), 4, generator=generator) * 0.2
            whole |= {f"{prefix}{name}.lora_A.weight": a, f"{prefix}{name}.lora_B.weight": b}
            for part, rows in zip(sizes, torch.split(b, list(sizes.values())), strict=True):
                path = prefix + name.rpartition(".")[0] + "." + part
                parts |= {f"{path}.lora_A.weight": a.clone(), f"{path}.lora_B.weight": rows}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
    targets = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    oracle = write(folder / "oracle", parts, config | {"target_modules": targets})
    fused = {"target_modules": ["qkv_proj", "gate_up_proj"]}
    return Served(((write(folder / "adapter", whole, config | fused), 1.0),), oracle)


def _split(base: Path, folder: Path) -> Served:
    """LoRAs on q_proj (rank 3), v_proj (rank 5) and up_proj, for a base that holds qkv_proj and
    gate_up_proj; the oracle's A are stacked, its B block by block."""
    generator = torch.Generator().manual_seed(5)
    # Part: (whole, its outputs, first output, outputs, rank, alpha)
    places = {
        "self_attn.q_proj": ("self_attn.qkv_proj", 128, 0, 64, 3, 6),
        "self_attn.v_proj": ("self_attn.qkv_proj", 128, 96, 32, 5, 20),
        "mlp.up_proj": ("mlp.gate_up_proj", 256, 128, 128, 4, 8),
    }
    parts: dict[str, Tensor] = {}
    wholes: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}."
        for part, (name, outputs, start, size, rank, alpha) in places.items():
            a = torch.randn(rank, 64, generator=generator) * 0.2
            b = torch.randn(size, rank, generator=generator) * 0.2
            parts |= {f"{prefix}{part}.lora_A.weight": a, f"{prefix}{part}.lora_B.weight": b}
            placed = torch.zeros(outputs, rank)
            placed[start : start + size] = b * (alpha / rank)
            stacked = wholes.setdefault(prefix + name, ([], []))
            stacked[0].append(a)
            stacked[1].append(placed)
    tensors = {}
    for path, (left, right) in wholes.items():
        tensors[f"{path}.lora_A.weight"] = torch.cat(left)
        tensors[f"{path}.lora_B.weight"] = torch.cat(right, 1)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    oracle_config = config | {
        "r": 8,
        "lora_alpha": 8,
        "rank_pattern": {"gate_up_proj": 4},
        "alpha_pattern": {"gate_up_proj": 4},
        "target_modules": ["qkv_proj", "gate_up_proj"],
    }
    own_config = config | {
        "r": 3,
        "lora_alpha": 6,
        "rank_pattern": {"v_proj": 5, "up_proj": 4},
        "alpha_pattern": {"v_proj": 20, "up_proj": 8},
        "target_modules": ["q_proj", "v_proj", "up_proj"],
    }
    oracle = write(folder / "oracle", tensors, oracle_config)
    return Served(((write(folder / "adapter", parts, own_config), 1.0),), oracle)


def weighted(base: Path, folder: Path) -> Served:
    """Three adapters of different ranks and targets with weights, one of them negative; the oracle
    is what PEFT's add_weighted_adapter concatenates."""
    weights = [0.6, -0.4, 1.5]
    options: list[dict[str, Any]] = [
        {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        {"r": 2, "target_modules": ["q_proj", "down_proj"]},
        {"r": 9, "lora_alpha": 3, "target_modules": ["up_proj"]},
    ]
    names = ["first", "second", "third"]
    folders = [
        make_adapter(base, folder / name, seed=10 + i, **options[i]) for i, name in enumerate(names)
    ]
    model = AutoModelForCausalLM.from_pretrained(base)
    peft_model = PeftModel.from_pretrained(model, str(folders[0]), names[0])
    for name, adapter in zip(names[1:], folders[1:], strict=True):
        peft_model.load_adapter(str(adapter), name)
    peft_model.add_weighted_adapter(names, weights, "all", combination_type="cat")
    peft_model.save_pretrained(
        str(folder / "oracle"), selected_adapters=["all"], save_embedding_layers=False
    )
    return Served(tuple(zip(folders, weights, strict=True)), folder / "oracle" / "all")


def _pickled(base: Path, folder: Path) -> Served:
    adapter = make_adapter(base, folder / "adapter", seed=3)
    torch.save(load_file(adapter / WEIGHTS_FILE), adapter / "adapter_model.bin")
    (adapter / WEIGHTS_FILE).unlink()
    return Served(((adapter, 1.0),), adapter)


def _configured(**changes: Any) -> Callable[[Path, Path], Served]:
    """A plain adapter whose config says something else than PEFT saved."""
    return rewritten(lambda tensors, config: (tensors, _config(config, **changes)))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = "mlp.gate.weight"
HEADS = ["embed_tokens", "lm_head"]
ATTENTION = ["q_proj", "v_proj"]

FEATURES: tuple[Feature, ...] = (
    Feature("LoRA on every projection", saved()),
    Feature("targets as a pattern", saved(target_modules=r".*layers\.1\..*(q|v)_proj")),
    Feature("targets all-linear", saved(target_modules="all-linear")),
    Feature(
        "layers_to_transform, layers_pattern",
        saved(target_modules=ATTENTION, layers_to_transform=[1], layers_pattern="layers"),
    ),
    Feature("exclude_modules", saved(exclude_modules=r".*layers\.0\..*")),
    Feature("rank 1", saved(r=1)),
    Feature("rank 37", saved(r=37)),
    Feature(
        "rank_pattern, alpha_pattern",
        saved(rank_pattern={"layers.1.self_attn.q_proj": 16}, alpha_pattern={"down_proj": 3}),
    ),
    Feature("rsLoRA", saved(r=16, lora_alpha=16, use_rslora=True)),
    Feature("float16 weights", saved(dtype=torch.float16)),
    Feature("bfloat16 weights", saved(dtype=torch.bfloat16)),
    Feature("trained on a quantised base", _configured(base_model_name_or_path="tiny-bnb-4bit")),
    Feature("fan_in_fan_out on linear layers", _configured(fan_in_fan_out=True)),
    Feature("DoRA", saved(use_dora=True)),
    Feature("DoRA, base with biases", saved(use_dora=True, bias="all"), "llama-bias"),
    Feature("DoRA on the embedding", saved(target_modules=["embed_tokens"], use_dora=True)),
    Feature("lora_bias", saved(lora_bias=True)),
    Feature("bias lora_only", saved(target_modules=ATTENTION, bias="lora_only"), "llama-bias"),
    Feature("bias all", saved(target_modules=ATTENTION, bias="all"), "llama-bias"),
    Feature("LoRA on embedding and head", saved(target_modules=HEADS)),
    Feature("LoRA on embedding and head, tied", saved(target_modules=HEADS), "llama-tied"),
    Feature(
        "LoRA on embedding and head, with PEFT's copies",
        saved(target_modules=HEADS, save_embedding_layers=True),
    ),
    Feature("LoRA on a scaled embedding", saved(target_modules=[*HEADS, "q_proj"]), "gemma2"),
    Feature("modules_to_save: lm_head", saved(modules_to_save=["lm_head"])),
    Feature("modules_to_save: lm_head, tied", saved(modules_to_save=["lm_head"]), "llama-tied"),
    Feature("modules_to_save: embed_tokens, lm_head", saved(modules_to_save=HEADS)),
    Feature("modules_to_save: embed_tokens, tied", saved(modules_to_save=HEADS[:1]), "llama-tied"),
    Feature(
        "modules_to_save: norms",
        saved(modules_to_save=["input_layernorm", "norm"], target_modules=ATTENTION),
    ),
    Feature("modules_to_save: mlp", saved(modules_to_save=["mlp"], target_modules=ATTENTION)),
    Feature("modules_to_save: q_norm", saved(modules_to_save=["q_norm"]), "qwen3"),
    Feature("trainable_token_indices", saved(trainable_token_indices=[60, 75, 5])),
    Feature("trainable_token_indices, tied", saved(trainable_token_indices=[60, 75]), "llama-tied"),
    Feature(
        "trainable_token_indices of two modules",
        saved(trainable_token_indices={"embed_tokens": [60, 3], "lm_head": [7]}),
    ),
    Feature("added vocabulary", saved(added_tokens=4)),
    Feature("added vocabulary, tied", saved(added_tokens=4), "llama-tied"),
    Feature("LoRA on Conv1D", saved(), "gpt2"),
    Feature("DoRA on Conv1D", saved(use_dora=True), "gpt2"),
    Feature("bias all on Conv1D and LayerNorm", saved(bias="all"), "gpt2"),
    Feature("LoRA on fused projections", saved(), "phi3"),
    Feature("fused names on split modules", _fused),
    Feature("split names on fused modules, ranks differ", _split, "phi3"),
    Feature("experts (Mixtral)", saved(target_parameters=EXPERTS), "mixtral"),
    Feature("experts by their old names", saved(target_modules=["w1", "w2", "w3"]), "mixtral"),
    Feature(
        "experts and router", saved(target_parameters=[*EXPERTS, "mlp.gate.weight"]), "mixtral"
    ),
    Feature("experts (Qwen2-MoE)", saved(target_parameters=EXPERTS), "qwen2-moe"),
    Feature("experts (Qwen3-MoE)", saved(target_parameters=EXPERTS[:1]), "qwen3-moe"),
    Feature(
        "linear weights as target_parameters",
        saved(target_modules=[], target_parameters=["q_proj.weight"]),
    ),
    Feature("aLoRA", saved(alora_invocation_tokens=list(INVOCATION))),
    Feature("several weighted adapters in one row", weighted),
    Feature("names without base_model.model", rewritten(_renamed(""))),
    Feature("names with the adapter's name", rewritten(_infixed)),
    Feature("MLX-LM", rewritten(_mlx, "adapters.safetensors", target_modules=["q_proj"])),
    Feature("PiSSA", saved(init_lora_weights="pissa"), refused="unsupported_feature"),
    Feature("OLoRA", saved(init_lora_weights="olora"), refused="unsupported_feature"),
    Feature(
        "layer_replication",
        _configured(layer_replication=[[0, 2], [1, 2]]),
        refused="unsupported_feature",
    ),
    Feature("QALoRA", _configured(use_qalora=True), refused="unsupported_feature"),
    Feature("AdaLoRA", _configured(peft_type="ADALORA"), refused="unsupported_peft_type"),
    Feature("pickled weights", _pickled, refused="missing_file"),
)
