"""Good uploads to spoil: PEFT's own, MLX-LM's, and one with a tokenizer, as names and bytes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.fuzz.uploads import Folder
from tests.tiny import VOCAB, make_adapter, save_tokenizer


def peft_uploads(base: Path, root: Path) -> list[Folder]:
    """Adapters of a Llama with biases, with most of what PEFT can save."""
    options: list[dict[str, Any]] = [
        {},
        {
            "target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj",
            "rank_pattern": {"q_proj": 2, r"layers\.1\..*v_proj": 3},
            "alpha_pattern": {"v_proj": 5},
        },
        {"use_dora": True, "modules_to_save": ["lm_head", "input_layernorm"]},
        {
            "target_modules": ["embed_tokens", "q_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
            "exclude_modules": ["k_proj"],
        },
        {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [7]}, "bias": "all"},
        {"lora_bias": True, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]},
        {"alora_invocation_tokens": [60, 61], "target_modules": "all-linear"},
        {"target_modules": ["embed_tokens", "lm_head"], "save_embedding_layers": True},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what cannot be merged
        return [
            contents(make_adapter(base, root / str(i), seed=i, **{"r": 2, **more}))
            for i, more in enumerate(options)
        ]


def expert_uploads(base: Path, root: Path) -> list[Folder]:
    """Adapters of a Mixtral."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    return [
        contents(make_adapter(base, root / "all", seed=1, r=2, target_parameters=names)),
        contents(make_adapter(base, root / "one", seed=2, r=2, target_parameters=names[:1])),
    ]


def mlx_uploads(base: Path, root: Path) -> list[Folder]:
    """An adapter as MLX-LM writes it, under its own name and under PEFT's."""
    adapter = make_adapter(base, root / "mlx", seed=1, target_modules=["q_proj", "up_proj"])
    tensors = {}
    for name, tensor in load_file(adapter / WEIGHTS_FILE).items():
        path = name.removeprefix("base_model.model.").removesuffix(".weight")
        path = path.replace("lora_A", "lora_a").replace("lora_B", "lora_b")
        tensors[path] = tensor.T.contiguous()
    save_file(tensors, root / "mlx.safetensors")
    keys = ["self_attn.q_proj", "mlp.up_proj"]
    config = {
        "fine_tune_type": "lora",
        "num_layers": 2,
        "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys},
    }
    weights = (root / "mlx.safetensors").read_bytes()
    text = json.dumps(config).encode()
    return [
        {CONFIG_FILE: text, "adapters.safetensors": weights},
        {CONFIG_FILE: text, WEIGHTS_FILE: weights},
    ]


def tokenizer_uploads(base: Path, root: Path) -> list[Folder]:
    """An adapter with more vocabulary and the tokenizer that knows it."""
    adapter = make_adapter(base, root / "vocabulary", seed=1, r=1, added_tokens=2)
    tokenizer = save_tokenizer(root / "tokenizer", pieces=[f"<p{i}>" for i in range(VOCAB - 261)])
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(root / "tokenizer")
    return [contents(adapter) | contents(root / "tokenizer")]


def contents(folder: Path) -> Folder:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
