"""Read a validated adapter from its folder into host memory, in the layout of the device pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adapters.errors import AdapterUnavailable
from adapters.manifest import (
    PAGE_RANK,
    WEIGHTS_FILE,
    AdapterRef,
    BaseSpec,
    TargetSpec,
)
from adapters.pages import page_elements
from adapters.peft_files import content_digest


@dataclass(frozen=True)
class TargetLayout:
    """What an adapter puts on one target: a rank (0: not adapted) and a scale for each layer."""

    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def num_pages(self) -> int:
        return -(-max(self.ranks) // PAGE_RANK)


@dataclass(frozen=True, eq=False)
class TargetWeights:
    """One target's weights: `pages` [num_pages, page_elements], laid out as on the device."""

    pages: Tensor
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter in host memory, never changed once read. `targets` is keyed by the base's index
    of a target; `nbytes` is what all pages take."""

    digest: str
    targets: Mapping[int, TargetWeights]
    nbytes: int


def layout(ref: AdapterRef, base: BaseSpec) -> dict[int, TargetLayout]:
    """Index of each adapted target in `base` -> its ranks and scales; from the manifest alone.

    Raises AdapterUnavailable when the manifest names a module the base does not have, or twice.
    """
    ranks: dict[int, list[int]] = {}
    scales: dict[int, list[float]] = {}
    for lora in ref.manifest.modules:
        if lora.module not in base.module_index:
            raise _unavailable(ref, f"base {base.name!r} has no module {lora.module!r}")
        t, layer = base.module_index[lora.module]
        unadapted = len(base.targets[t].modules) * [0]
        target_ranks = ranks.setdefault(t, unadapted)
        if target_ranks[layer]:
            raise _unavailable(ref, f"the manifest names module {lora.module!r} twice")
        target_ranks[layer] = lora.rank
        scales.setdefault(t, [0.0] * len(unadapted))[layer] = lora.scale
    return {t: TargetLayout(tuple(ranks[t]), tuple(scales[t])) for t in sorted(ranks)}


def page_sizes(targets: Mapping[int, TargetLayout], base: BaseSpec) -> list[int]:
    """Elements of each of an adapter's pages, in the order of `targets`, then of rank."""
    return [
        page_elements(base.targets[t]) for t, plan in targets.items() for _ in range(plan.num_pages)
    ]


def load_weights(ref: AdapterRef, base: BaseSpec, dtype: torch.dtype) -> AdapterWeights:
    """Read, check and cast `ref`'s tensors to `dtype`, one tensor at a time.

    Raises AdapterUnavailable when the files are missing, unreadable or not those of `ref.digest`,
    when they lack a tensor of the manifest or hold it in another shape, or when a value does not
    fit `dtype`.
    """
    try:
        digest = content_digest(ref.folder)
        if digest != ref.digest:
            raise _unavailable(ref, f"stored files are damaged: digest {digest}, not {ref.digest}")
        with safe_open(ref.folder / WEIGHTS_FILE, framework="pt") as file:
            return _read(file, ref, base, dtype)
    except (OSError, SafetensorError) as error:
        raise _unavailable(ref, f"stored files cannot be read: {error}") from error


def _unavailable(ref: AdapterRef, reason: str) -> AdapterUnavailable:
    return AdapterUnavailable(f"adapter {ref.name!r}: {reason}")


def _read(file: Any, ref: AdapterRef, base: BaseSpec, dtype: torch.dtype) -> AdapterWeights:
    targets = {
        t: TargetWeights(
            torch.zeros(target.num_pages, page_elements(base.targets[t]), dtype=dtype),
            target.ranks,
            target.scales,
        )
        for t, target in layout(ref, base).items()
    }

    def tensor(key: str, shape: list[int]) -> Tensor:
        found = file.get_slice(key).get_shape()
        if found != shape:
            raise _unavailable(ref, f"tensor {key!r} has shape {found}, not {shape}")
        cast: Tensor = file.get_tensor(key).to(dtype)
        if not torch.isfinite(cast).all():
            raise _unavailable(ref, f"tensor {key!r} has values that {dtype} cannot hold")
        return cast

    for lora in ref.manifest.modules:
        t, layer = base.module_index[lora.module]
        spec = base.targets[t]
        a = tensor(lora.a_key, [lora.rank, spec.in_features])
        b = tensor(lora.b_key, [spec.out_features, lora.rank])
        _place(targets[t].pages, spec, layer, a, b)
    return AdapterWeights(ref.digest, targets, sum(t.pages.nbytes for t in targets.values()))


def _place(pages: Tensor, spec: TargetSpec, layer: int, a: Tensor, b: Tensor) -> None:
    """Spread A [rank, in] and B [out, rank] of one layer over `pages` [num_pages, elements]."""
    layers = len(spec.modules)
    split = layers * PAGE_RANK * spec.in_features
    a_rows = pages[:, :split].view(-1, layers, PAGE_RANK, spec.in_features)
    b_rows = pages[:, split:].view(-1, layers, PAGE_RANK, spec.out_features)
    for page, start in enumerate(range(0, a.shape[0], PAGE_RANK)):
        rows = min(PAGE_RANK, a.shape[0] - start)
        a_rows[page, layer, :rows] = a[start : start + rows]
        b_rows[page, layer, :rows] = b[:, start : start + rows].T
