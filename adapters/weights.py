"""Read a validated adapter from its folder into host memory, in the layout of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adapters.errors import AdapterUnavailable
from adapters.layout import Layout, Shape, layout, needs_shift, parameter_shape
from adapters.manifest import (
    PAGE_RANK,
    WEIGHTS_FILE,
    AdapterManifest,
    AdapterRef,
    BaseSpec,
    EmbeddingLora,
    ModuleLora,
    OutputVectors,
    ParameterLora,
    TargetSpec,
)
from adapters.pages import page_elements
from adapters.peft_files import content_digest
from adapters.terms import (
    Affine,
    BaseParameters,
    EmbeddingDelta,
    ParameterDelta,
    ReplacedRows,
    Replacement,
    Term,
    dora_gain,
)


@dataclass(frozen=True, eq=False)
class TargetWeights:
    """One target's weights: `pages` [num_pages, page_elements], laid out as on the device."""

    pages: Tensor
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter in host memory, never changed once read. `targets` is keyed by the base's index
    of a target, `terms` by module path, both in the order of the adapter's Layout; `nbytes` is
    what all of it takes on the device."""

    digest: str
    targets: Mapping[int, TargetWeights]
    nbytes: int
    terms: Mapping[str, tuple[Term, ...]] = field(default_factory=dict)


def load_weights(
    ref: AdapterRef, base: BaseSpec, dtype: torch.dtype, parameters: BaseParameters
) -> AdapterWeights:
    """Read, check and cast `ref`'s tensors to `dtype`, one tensor at a time.

    `parameters` is only asked for what a DoRA or a bias is relative to. Raises AdapterUnavailable
    when the files are missing, unreadable or not those of `ref.digest`, when they lack a tensor of
    the manifest or hold it in another shape, or when a value does not fit `dtype`.
    """
    try:
        digest = content_digest(ref.folder)
        if digest != ref.digest:
            raise AdapterUnavailable(f"stored files are damaged: digest {digest}, not {ref.digest}")
        plan = layout(ref.manifest, base)
        with safe_open(ref.folder / WEIGHTS_FILE, framework="pt") as file:
            tensors = _Tensors(file, dtype)
            targets = _targets(tensors, ref.manifest, base, plan)
            terms = _TermReader(tensors, ref.manifest, base, parameters, targets).read(plan)
    except AdapterUnavailable as error:
        raise AdapterUnavailable(f"adapter {ref.name!r}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise AdapterUnavailable(
            f"adapter {ref.name!r}: stored files cannot be read: {error}"
        ) from error
    return AdapterWeights(ref.digest, targets, plan.elements * dtype.itemsize, terms)


@dataclass(frozen=True)
class _Tensors:
    """The file's tensors, checked and cast."""

    file: Any
    dtype: torch.dtype

    def shape(self, key: str) -> list[int]:
        found: list[int] = self.file.get_slice(key).get_shape()
        return found

    def get(self, key: str, *shape: int) -> Tensor:
        """In the served dtype. It may lie in the mapped file, so it must not outlive it."""
        return self.cast(key, self._stored(key, shape))

    def own(self, key: str, *shape: int) -> Tensor:
        """In the served dtype and in memory of its own."""
        return self.cast(key, self._stored(key, shape), copy=True)

    def exact(self, key: str, *shape: int) -> Tensor:
        """As float32, to compute with."""
        return self._stored(key, shape).float()

    def cast(self, key: str, values: Tensor, *, copy: bool = False) -> Tensor:
        cast = values.to(self.dtype, copy=copy)
        if not torch.isfinite(cast).all():
            raise AdapterUnavailable(f"tensor {key!r} has values that {self.dtype} cannot hold")
        return cast

    def _stored(self, key: str, shape: tuple[int, ...]) -> Tensor:
        if (found := self.shape(key)) != list(shape):
            raise _misshapen(key, found, *shape)
        stored: Tensor = self.file.get_tensor(key)
        return stored


def _misshapen(key: str, found: list[int], *shape: int) -> AdapterUnavailable:
    return AdapterUnavailable(f"tensor {key!r} has shape {found}, not {list(shape)}")


def _targets(
    tensors: _Tensors, manifest: AdapterManifest, base: BaseSpec, plan: Layout
) -> dict[int, TargetWeights]:
    targets = {
        t: TargetWeights(
            torch.zeros(target.num_pages, page_elements(base.targets[t]), dtype=tensors.dtype),
            target.ranks,
            target.scales,
        )
        for t, target in plan.targets.items()
    }
    filled: dict[str, int] = {}  # ranks of a module that are in place
    for lora in manifest.modules:
        t, layer = base.module_index[lora.module]
        spec = base.targets[t]
        a = tensors.get(lora.a_key, lora.rank, spec.in_features)
        b = _read_b(tensors, lora, spec, base, plan.targets[t].scales[layer])
        start = filled.get(lora.module, 0)
        filled[lora.module] = start + lora.rank
        _place(targets[t].pages, spec, layer, a, b, start, lora.out_start)
    return targets


def _read_b(
    tensors: _Tensors, lora: ModuleLora, spec: TargetSpec, base: BaseSpec, scale: float
) -> Tensor:
    """The rows of B that are meant, so that they are right with the layer's `scale`."""
    found = tensors.shape(lora.b_key)
    rows = found[0] if found else 0
    if lora.b_rows is None:
        first, last = 0, rows
        fits = rows in _features_at(lora, spec, base)
    else:
        first, last = lora.b_rows
        fits = first < last <= rows and lora.out_start + last - first <= spec.out_features
    if not fits:
        raise _misshapen(lora.b_key, found, spec.out_features, lora.rank)
    if lora.scale == scale:
        return tensors.get(lora.b_key, rows, lora.rank)[first:last]
    folded = tensors.exact(lora.b_key, rows, lora.rank)[first:last] * (lora.scale / scale)
    return tensors.cast(lora.b_key, folded)


def _features_at(lora: ModuleLora, spec: TargetSpec, base: BaseSpec) -> set[int]:
    """How many outputs a whole B can have that begins at `out_start`: all, or a fused part's."""
    allowed = set() if lora.out_start else {spec.out_features}
    start = 0
    for _, features in base.fused.get(lora.module, ()):
        if start == lora.out_start:
            allowed.add(features)
        start += features
    return allowed


def _views(pages: Tensor, spec: TargetSpec) -> tuple[Tensor, Tensor]:
    """A and Bᵀ in `pages` [num_pages, elements]: [num_pages, layers, PAGE_RANK, features]."""
    layers = len(spec.modules)
    split = layers * PAGE_RANK * spec.in_features
    a_rows = pages[:, :split].view(-1, layers, PAGE_RANK, spec.in_features)
    return a_rows, pages[:, split:].view(-1, layers, PAGE_RANK, spec.out_features)


def _place(
    pages: Tensor, spec: TargetSpec, layer: int, a: Tensor, b: Tensor, start: int, out_start: int
) -> None:
    """Spread A [rank, in] and B [some out, rank] of one layer over `pages` from rank `start` on;
    B's outputs begin at `out_start`."""
    a_rows, b_rows = _views(pages, spec)
    outputs = slice(out_start, out_start + b.shape[0])
    done = 0
    while done < a.shape[0]:
        page, row = divmod(start + done, PAGE_RANK)
        count = min(PAGE_RANK - row, a.shape[0] - done)
        rows = slice(row, row + count)
        a_rows[page, layer, rows] = a[done : done + count]
        b_rows[page, layer, rows, outputs] = b[:, done : done + count].T
        done += count


class _TermReader:
    """Reads the terms of one adapter, whose pages are in `targets` already."""

    def __init__(
        self,
        tensors: _Tensors,
        manifest: AdapterManifest,
        base: BaseSpec,
        parameters: BaseParameters,
        targets: Mapping[int, TargetWeights],
    ) -> None:
        self._tensors = tensors
        self._manifest = manifest
        self._base = base
        self._parameters = parameters
        self._targets = targets
        self._replaced: dict[str, dict[str, Tensor]] = {}  # module path -> name in it -> tensor

    @torch.inference_mode()
    def read(self, plan: Layout) -> dict[str, tuple[Term, ...]]:
        """By module path in the order of `plan`, each module's in the order in which they apply."""
        found: dict[str, list[Term]] = {module: [] for module in plan.terms}
        for own in self._manifest.replaced:
            module, _, name = own.parameter.rpartition(".")
            tensor = self._tensors.own(own.key, *self._shape(own.parameter))
            self._replaced.setdefault(module, {})[name] = tensor
        for module, replaced in self._replaced.items():
            found[module].append(Replacement(replaced))
        for lora in self._manifest.parameter_loras:
            module, _, name = lora.parameter.rpartition(".")
            found[module].append(self._parameter_delta(lora, name))
        for delta in self._manifest.embeddings:
            found[delta.module].append(self._embedding_delta(delta))
        for tokens in self._manifest.token_rows:
            hidden = self._shape(f"{tokens.module}.weight")[1]
            rows = self._tensors.own(tokens.key, len(tokens.indices), hidden)
            found[tokens.module].append(ReplacedRows(tokens.indices, rows))
        for vectors in self._manifest.vectors:
            if vectors.module in found:
                found[vectors.module].append(self._affine(vectors))
        return {module: tuple(terms) for module, terms in found.items()}

    def _parameter_delta(self, lora: ParameterLora, name: str) -> ParameterDelta:
        first, second = self._shape(lora.parameter)[-2:]
        wide, out = (first, second) if lora.transposed else (second, first)
        a = self._tensors.own(lora.a_key, lora.experts * lora.rank, wide)
        b = self._tensors.own(lora.b_key, out, lora.rank * lora.experts)
        # PEFT's columns of B have the expert as the faster index, its rows of A as the slower one.
        per_expert = b.view(out, lora.rank, lora.experts).permute(2, 0, 1).contiguous()
        a = a.view(lora.experts, lora.rank, wide)
        return ParameterDelta(name, lora.scale, lora.transposed, a, per_expert)

    def _embedding_delta(self, delta: EmbeddingLora) -> EmbeddingDelta:
        rows, hidden = self._shape(f"{delta.module}.weight")
        a = self._tensors.own(delta.a_key, delta.rank, rows)
        b = self._tensors.own(delta.b_key, hidden, delta.rank)
        gain = None
        if delta.magnitude_key:
            weight = self._parameter(f"{delta.module}.weight")
            magnitude = self._tensors.exact(delta.magnitude_key, hidden)
            exact = dora_gain(magnitude, weight, a, b, delta.scale, transposed=True)
            gain = self._tensors.cast(delta.magnitude_key, exact)
        return EmbeddingDelta(delta.scale, a.T.contiguous(), b.T.contiguous(), gain)

    def _affine(self, vectors: OutputVectors) -> Affine:
        """From y = Wx + old + s·BAx to PEFT's gain·(y − old) + new + s·(bias of B), where `old` is
        the bias that y has and `new` the adapter's."""
        t, layer = self._base.module_index[vectors.module]
        out = self._base.targets[t].out_features
        gain = self._gain(vectors, t, layer) if vectors.magnitude_key else None
        if not needs_shift(vectors, self._base):
            return Affine(gain, None)
        old = torch.zeros(out)
        if f"{vectors.module}.bias" in self._base.parameters:
            old = self._parameter(f"{vectors.module}.bias").to("cpu", torch.float32)
        new = self._tensors.exact(vectors.bias_key, out) if vectors.bias_key else old
        shift = new - old if gain is None else new - gain.float() * old
        if vectors.lora_bias_key:
            scale = self._targets[t].scales[layer] if t in self._targets else 0.0
            shift = shift + scale * self._tensors.exact(vectors.lora_bias_key, out)
        key = vectors.bias_key or vectors.lora_bias_key or f"{vectors.module}.bias"
        return Affine(gain, self._tensors.cast(key, shift))

    def _gain(self, vectors: OutputVectors, t: int, layer: int) -> Tensor:
        assert vectors.magnitude_key is not None
        spec = self._base.targets[t]
        a, b, scale = torch.zeros(0, spec.in_features), torch.zeros(spec.out_features, 0), 0.0
        if t in self._targets:
            a_rows, b_rows = _views(self._targets[t].pages, spec)
            a = a_rows[:, layer].reshape(-1, spec.in_features)
            b = b_rows[:, layer].reshape(-1, spec.out_features).T
            scale = self._targets[t].scales[layer]
        path = f"{vectors.module}.weight"
        gain = dora_gain(
            self._tensors.exact(vectors.magnitude_key, spec.out_features),
            self._parameter(path),
            a,
            b,
            scale,
            transposed=path in self._base.transposed,
        )
        return self._tensors.cast(vectors.magnitude_key, gain)

    def _shape(self, path: str) -> Shape:
        return parameter_shape(path, self._manifest, self._base)

    def _parameter(self, path: str) -> Tensor:
        """The adapter's own parameter, or the base's."""
        module, _, name = path.rpartition(".")
        own = self._replaced.get(module, {}).get(name)
        return self._parameters(path) if own is None else own
