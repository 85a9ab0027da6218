"""Small adapters written straight to disk, and what their pages must hold."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapters.layout import layout
from adapters.manifest import (
    CONFIG_FILE,
    PAGE_RANK,
    WEIGHTS_FILE,
    AdapterManifest,
    AdapterRef,
    BaseSpec,
    EmbeddingLora,
    ModuleLora,
    OutputVectors,
    ParameterLora,
    ReplacedParameter,
    TargetSpec,
    TokenRows,
)
from adapters.pages import ResidentAdapter
from adapters.terms import Term
from adapters.terms import tensors as tensors_of
from adapters.weights import load_weights

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
    output_module="head",
    embedding="embed",
    parameters={
        "embed.weight": (32, 16),
        "head.weight": (32, 16),
        "norm.weight": (16,),
        "experts.down": (3, 16, 10),
        "experts.up": (3, 16, 10),
        "layers.0.q_proj.weight": (16, 16),
        "layers.0.q_proj.bias": (16,),
        "layers.0.k_proj.weight": (8, 16),
    },
    transposed=frozenset({"experts.up"}),
)


@lru_cache
def base_parameter(path: str) -> Tensor:
    """The base's parameter: random, another for each path."""
    generator = torch.Generator().manual_seed(sum(path.encode()))
    return torch.randn(BASE.parameters[path], generator=generator)


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
    terms: Mapping[str, Any] | None = None,
) -> AdapterRef:
    """Random A and B for each module of `ranks`, in a new folder of its own.

    `terms` are further fields of the manifest, whose tensors are written too.
    """
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
    for key, shape in _keys(terms or {}):
        tensors[key] = torch.randn(shape, generator=generator).to(dtype)
    save_file(tensors, path / WEIGHTS_FILE)
    (path / CONFIG_FILE).write_text(f'{{"peft_type": "LORA", "name": "{name}", "seed": {seed}}}')
    return reference(path, name, tuple(modules), **(terms or {}))


#: Fields of a manifest with one of each kind of term, on modules that LoRA may be on too.
EVERY_TERM: dict[str, Any] = {
    "replaced": (ReplacedParameter("norm.weight", "norm"), ReplacedParameter("embed.weight", "e")),
    "parameter_loras": (
        ParameterLora("experts.down", 2, 3, 0.5, "down.a", "down.b"),
        ParameterLora("experts.up", 1, 3, 0.25, "up.a", "up.b", transposed=True),
    ),
    "embeddings": (EmbeddingLora("embed", 5, 2.0, "embed.a", "embed.b", "embed.m"),),
    "token_rows": (TokenRows("head", (3, 7, 30), "rows"),),
    "vectors": (
        OutputVectors("layers.0.q_proj", "q.m", None, "q.bias"),
        OutputVectors("layers.0.k_proj", None, "k.lora_bias", "k.bias"),
    ),
    "vocab_size": 35,
}


def _keys(fields: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that such fields name, with their shapes in PEFT's files."""
    vocab = fields.get("vocab_size") or BASE.vocab_size
    for own in fields.get("replaced", ()):
        shape = BASE.parameters[own.parameter]
        yield own.key, (vocab, *shape[1:]) if own.parameter == "embed.weight" else shape
    for lora in fields.get("parameter_loras", ()):
        yield lora.a_key, (lora.rank * 3, 16 if lora.transposed else 10)
        yield lora.b_key, (10 if lora.transposed else 16, lora.rank * 3)
    for delta in fields.get("embeddings", ()):
        yield delta.a_key, (delta.rank, vocab)
        yield delta.b_key, (16, delta.rank)
        yield delta.magnitude_key, (16,)
    for rows in fields.get("token_rows", ()):
        yield rows.key, (len(rows.indices), 16)
    for vectors in fields.get("vectors", ()):
        out, _ = BASE.parameters[f"{vectors.module}.weight"]
        for key in (vectors.magnitude_key, vectors.lora_bias_key, vectors.bias_key):
            if key:
                yield key, (out,)


def reference(path: Path, name: str, modules: tuple[ModuleLora, ...], **fields: Any) -> AdapterRef:
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
        **fields,
    )
    return AdapterRef(digest, name, path, manifest)


def device_bytes(ref: AdapterRef, itemsize: int = 4) -> int:
    """Bytes of the pages of `ref`, whole pages of all layers for every target it touches, and of
    its terms' tensors."""
    largest: dict[int, int] = {}
    for lora in ref.manifest.modules:
        t, _ = BASE.module_index[lora.module]
        largest[t] = max(largest.get(t, 0), lora.rank)
    pages = sum((rank + PAGE_RANK - 1) // PAGE_RANK * page_size(t) for t, rank in largest.items())
    shapes = (s for of_module in layout(ref.manifest, BASE).terms.values() for s in of_module)
    return itemsize * (pages + sum((math.prod(shape) + 63) // 64 * 64 for shape in shapes))


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
    assert_exact_terms(buffer, adapter, ref)


def assert_exact_terms(buffer: Tensor, adapter: ResidentAdapter, ref: AdapterRef) -> None:
    """Every term of `adapter` lies in the buffer and is bit for bit what was read."""
    read = {} if ref.manifest.plain else _read_terms(ref, buffer.dtype)
    assert list(adapter.terms) == list(read)
    assert adapter.vocab_size == ref.manifest.vocab_size
    for module, terms in read.items():
        for mine, theirs in zip(adapter.terms[module], terms, strict=True):
            assert type(mine) is type(theirs)
            for placed, tensor in zip(tensors_of(mine), tensors_of(theirs), strict=True):
                assert placed.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                assert torch.equal(placed, tensor)


@lru_cache
def _read_terms(ref: AdapterRef, dtype: torch.dtype) -> Mapping[str, tuple[Term, ...]]:
    return load_weights(ref, BASE, dtype, base_parameter).terms


def ranges(adapter: ResidentAdapter) -> list[range]:
    """The elements that each page and each term's tensor of `adapter` covers."""
    pages = [
        range(offset, offset + page_size(t))
        for t, target in adapter.targets.items()
        for offset in target.pages
    ]
    placed = (
        tensor for terms in adapter.terms.values() for term in terms for tensor in tensors_of(term)
    )
    starts = ((tensor.storage_offset(), tensor.numel()) for tensor in placed)
    return pages + [range(start, start + count) for start, count in starts]
