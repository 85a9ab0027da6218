"""Adapters in other layouts than PEFT's, rewritten as PEFT's two files without changing what they
compute: see `adapters.mlx_layout`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adapters.errors import AdapterRejected, Violation
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, BaseSpec
from adapters.mlx_layout import ITEM_BYTES, MlxAdapter, read_mlx
from adapters.peft_files import TensorEntry, TensorTable, read_config, read_header

#: What MLX-LM calls its weights file.
MLX_WEIGHTS_FILE = "adapters.safetensors"


def convert(folder: Path, base: BaseSpec) -> list[str]:
    """Rewrite an adapter in MLX-LM's layout as PEFT's files, in place; what was done, for people.

    An adapter in PEFT's layout is left alone ([]), but for the name of its weights file, and so is
    what neither can be read as: `adapters.validation` says what is wrong with it. The bytes written
    depend on nothing but the adapter. Memory for two copies of the largest tensor is needed.

    Raises AdapterRejected with every violation found where the layout is MLX-LM's but broken, or
    where names and config contradict each other.
    """
    source = folder / MLX_WEIGHTS_FILE
    own = folder / WEIGHTS_FILE
    renamed = os.path.lexists(source)
    if renamed and os.path.lexists(own):
        raise _reject(MLX_WEIGHTS_FILE, f"comes beside {WEIGHTS_FILE}; send one of the two")
    if not renamed:
        source = own
    try:
        read_config(folder / CONFIG_FILE)
        table = read_header(source)
    except AdapterRejected:
        if renamed:
            raise
        return []
    config = json.loads((folder / CONFIG_FILE).read_bytes())
    if not _is_mlx(config, table, source.name):
        if renamed:
            os.replace(source, own)
            return [f"{MLX_WEIGHTS_FILE} is in PEFT's layout and was read as {WEIGHTS_FILE}"]
        return []
    adapter = read_mlx(config, table, base)
    _write_weights(source, own, adapter.tensors)
    _write_config(folder / CONFIG_FILE, config, adapter)
    return [
        f"converted from MLX-LM's layout: lora_a and lora_b of {len(adapter.modules)} modules "
        f"transposed, scale {adapter.scale:g} kept as lora_alpha {adapter.alpha:g} over rank "
        f"{adapter.rank}"
    ]


_HINT = (
    "export it with PEFT's names and config, or send MLX-LM's own adapter_config.json "
    f"and {MLX_WEIGHTS_FILE}"
)


def _is_mlx(config: dict[str, Any], table: TensorTable, file: str) -> bool:
    """Whether names and config are both MLX-LM's; raises AdapterRejected where only one is."""
    named = [t.name for t in table.tensors if t.name.endswith((".lora_a", ".lora_b"))]
    if "peft_type" in config:
        if named:
            raise _reject(named[0], f"is named as MLX-LM does, but the config is PEFT's; {_HINT}")
        return False
    configured = "lora_parameters" in config or "fine_tune_type" in config
    if configured and config.get("fine_tune_type") == "full":
        message = 'is "full": the file holds whole weights, not LoRA; serve it as a base instead'
        raise AdapterRejected([Violation("unsupported_feature", "fine_tune_type", message)])
    if configured != bool(named):
        has, lacks = ("config", "tensors") if configured else ("tensors", "config")
        raise _reject(file, f"has MLX-LM's {has}, but {lacks} of another layout; {_HINT}")
    return configured


def _write_weights(source: Path, target: Path, tensors: Sequence[tuple[TensorEntry, str]]) -> None:
    """The safetensors file `target` with the transposes of the tensors of `source`, under their new
    names. It takes the place of `source`."""
    ordered = sorted(tensors, key=lambda pair: (-ITEM_BYTES[pair[0].dtype], pair[1]))
    header: dict[str, Any] = {}
    end = 0
    for tensor, name in ordered:
        begin, end = end, end + tensor.nbytes
        shape = list(reversed(tensor.shape))
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = target.with_name(f"{target.name}.converted")
    try:
        with open(source, "rb") as file, open(written, "xb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor, _ in ordered:
                file.seek(tensor.offset)
                raw = file.read(tensor.nbytes)
                if len(raw) != tensor.nbytes:
                    message = "was cut while it was read"
                    raise AdapterRejected([Violation("corrupt_adapter", source.name, message)])
                bits = np.frombuffer(raw, f"<u{ITEM_BYTES[tensor.dtype]}").reshape(tensor.shape)
                out.write(bits.T.tobytes())
        os.replace(written, target)
    finally:
        written.unlink(missing_ok=True)
    if source != target:
        source.unlink()


def _write_config(path: Path, config: dict[str, Any], adapter: MlxAdapter) -> None:
    model = config.get("model")
    fields = {
        "base_model_name_or_path": model if isinstance(model, str) else None,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapter.rank,
        "target_modules": list(adapter.modules),
        "task_type": "CAUSAL_LM",
        "use_dora": adapter.dora,
    }
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _reject(subject: str, message: str) -> AdapterRejected:
    return AdapterRejected([Violation("ambiguous_layout", subject, message)])
