"""Small adapters written straight to disk, and what their pages must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.manifest import (
    CONFIG_FILE,
    PAGE_RANK,
    WEIGHTS_FILE,
    AdapterManifest,
    AdapterRef,
    BaseSpec,
    ModuleLora,
    TargetSpec,
)
from adapters.pages import ResidentAdapter

LAYERS = 3
BASE = BaseSpec(
    name="tiny",
    vocab_size=32,
    max_positions=64,
    targets=tuple(
        TargetSpec(name, wide, out, tuple(f"layers.{i}.{name}" for i in range(LAYERS)))
        for name, wide, out in (
            ("q_proj", 16, 16),
            ("k_proj", 16, 8),
            ("up_proj", 16, 40),
            ("down_proj", 40, 16),
        )
    ),
)


def every_module(rank: int, *names: str) -> dict[str, int]:
    """Module path -> `rank`, for all layers of the targets called `names` (default: all)."""
    return {
        path: rank
        for target in BASE.targets
        if not names or target.name in names
        for path in target.modules
    }


def write_adapter(
    folder: Path,
    name: str,
    ranks: Mapping[str, int],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> AdapterRef:
    """Random A and B for each module of `ranks`, in a new folder of its own."""
    path = folder / f"{name}-{seed}"
    path.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    modules: list[ModuleLora] = []
    for module, rank in ranks.items():
        t, _ = BASE.module_index[module]
        a_key, b_key = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        a = torch.randn(rank, BASE.targets[t].in_features, generator=generator)
        b = torch.randn(BASE.targets[t].out_features, rank, generator=generator)
        tensors[a_key], tensors[b_key] = a.to(dtype), b.to(dtype)
        modules.append(ModuleLora(module, rank, 1.0 / (rank + len(modules)), a_key, b_key))
    save_file(tensors, path / WEIGHTS_FILE)
    (path / CONFIG_FILE).write_text(f'{{"peft_type": "LORA", "name": "{name}", "seed": {seed}}}')
    return reference(path, name, tuple(modules))


def reference(path: Path, name: str, modules: tuple[ModuleLora, ...]) -> AdapterRef:
    """A reference whose digest is that of the files as they are now."""
    lines = "".join(
        f"{hashlib.sha256((path / file).read_bytes()).hexdigest()}  {file}\n"
        for file in (CONFIG_FILE, WEIGHTS_FILE)
    )
    digest = hashlib.sha256(lines.encode()).hexdigest()
    manifest = AdapterManifest(
        digest=digest,
        modules=modules,
        parameters=0,
        weights_bytes=(path / WEIGHTS_FILE).stat().st_size,
        dtypes=("F32",),
        max_rank=max((m.rank for m in modules), default=0),
    )
    return AdapterRef(digest, name, path, manifest)


def device_bytes(ref: AdapterRef, itemsize: int = 4) -> int:
    """Bytes of the pages of `ref`: whole pages of all layers for every target it touches."""
    largest: dict[int, int] = {}
    for lora in ref.manifest.modules:
        t, _ = BASE.module_index[lora.module]
        largest[t] = max(largest.get(t, 0), lora.rank)
    return itemsize * sum(
        (rank + PAGE_RANK - 1) // PAGE_RANK * page_size(t) for t, rank in largest.items()
    )


def page_size(t: int) -> int:
    return LAYERS * PAGE_RANK * (BASE.targets[t].in_features + BASE.targets[t].out_features)


def assert_exact(buffer: Tensor, adapter: ResidentAdapter, ref: AdapterRef) -> None:
    """Every page of `adapter`, whole, is bit for bit what the file and zeros make of it."""
    assert adapter.digest == ref.digest
    tensors = load_file(ref.folder / WEIGHTS_FILE)
    expected = {
        t: torch.zeros(len(target.pages), page_size(t), dtype=buffer.dtype)
        for t, target in adapter.targets.items()
    }
    adapted = set()
    for lora in ref.manifest.modules:
        t, layer = BASE.module_index[lora.module]
        spec = BASE.targets[t]
        target = adapter.targets[t]
        assert target.ranks[layer] == lora.rank
        assert target.scales[layer] == lora.scale
        adapted.add((t, layer))
        b_start = LAYERS * PAGE_RANK * spec.in_features
        for row in range(lora.rank):
            page = expected[t][row // PAGE_RANK]
            at = layer * PAGE_RANK + row % PAGE_RANK
            a_row = page[at * spec.in_features : (at + 1) * spec.in_features]
            a_row.copy_(tensors[lora.a_key][row])
            b_row = page[b_start + at * spec.out_features :][: spec.out_features]
            b_row.copy_(tensors[lora.b_key][:, row])
    for t, target in adapter.targets.items():
        for layer in range(LAYERS):
            assert (target.ranks[layer] > 0) == ((t, layer) in adapted)
        for offset, page in zip(target.pages, expected[t], strict=True):
            assert torch.equal(buffer[offset : offset + page_size(t)], page)
    assert {t for t, _ in adapted} == set(adapter.targets)


def ranges(adapter: ResidentAdapter) -> list[range]:
    """The elements that each page of `adapter` covers."""
    return [
        range(offset, offset + page_size(t))
        for t, target in adapter.targets.items()
        for offset in target.pages
    ]
