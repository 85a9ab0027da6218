"""What an adapter takes on the device, known from its manifest alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from adapters.errors import AdapterUnavailable
from adapters.manifest import (
    PAGE_RANK,
    AdapterManifest,
    AdapterRef,
    BaseSpec,
    OutputVectors,
)
from adapters.pages import page_elements

#: Elements that a term's tensor is rounded up to, so that what lies behind it stays aligned.
ALIGNMENT = 64

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TargetLayout:
    """What an adapter puts on one target: a rank (0: not adapted) and a scale for each layer.

    Where a module has several LoRAs, the rank is their sum, and the scale that of the largest
    absolute value, which B makes up for in the others.
    """

    ranks: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def num_pages(self) -> int:
        return -(-max(self.ranks) // PAGE_RANK)


@dataclass(frozen=True)
class Layout:
    """`targets` maps the base's index of a target to what is on it, in ascending order. `terms`
    maps a module's path to the shapes of its terms' tensors, in the order in which the terms apply
    and `adapters.terms.tensors` yields them. `page_sizes` are the elements of each page, in the
    order of `targets`, then of rank.
    """

    targets: Mapping[int, TargetLayout]
    terms: Mapping[str, tuple[Shape, ...]]
    page_sizes: tuple[int, ...]

    @cached_property
    def allocations(self) -> tuple[int, ...]:
        """Elements of each range of the pool's buffer that it takes: all pages, then all terms."""
        shapes = (shape for shapes in self.terms.values() for shape in shapes)
        return self.page_sizes + tuple(-(-prod(s) // ALIGNMENT) * ALIGNMENT for s in shapes)

    @property
    def elements(self) -> int:
        return sum(self.allocations)


def layout(manifest: AdapterManifest, base: BaseSpec) -> Layout:
    """Raises AdapterUnavailable when the manifest names a module or a parameter that the base does
    not have, or gives a linear's vectors twice."""
    targets = _targets(manifest, base)
    pages = tuple(
        page_elements(base.targets[t]) for t, plan in targets.items() for _ in range(plan.num_pages)
    )
    return Layout(targets, _term_shapes(manifest, base), pages)


def layout_of(ref: AdapterRef, base: BaseSpec) -> Layout:
    """`layout` of its manifest, with errors that name the adapter."""
    try:
        return layout(ref.manifest, base)
    except AdapterUnavailable as error:
        raise AdapterUnavailable(f"adapter {ref.name!r}: {error}") from None


def place_of(module: str, base: BaseSpec) -> tuple[int, int]:
    """The index of a linear's target and its layer there. Raises AdapterUnavailable."""
    if module not in base.module_index:
        raise AdapterUnavailable(f"base {base.name!r} has no module {module!r}")
    return base.module_index[module]


def parameter_shape(path: str, manifest: AdapterManifest, base: BaseSpec) -> Shape:
    """The shape in which an adapter brings its own parameter `path`: the base's, with more rows
    in embedding and head if its vocabulary is larger. Raises AdapterUnavailable."""
    shape = base.parameters.get(path)
    if shape is None and base.tied_head and path == f"{base.output_module}.weight":
        shape = base.parameters.get(f"{base.embedding}.weight")
    if shape is None:
        raise AdapterUnavailable(f"base {base.name!r} has no parameter {path!r}")
    if manifest.vocab_size and path.rpartition(".")[0] in (base.embedding, base.output_module):
        return (manifest.vocab_size, *shape[1:])
    return shape


def needs_shift(vectors: OutputVectors, base: BaseSpec) -> bool:
    """Whether the linear's Affine adds something: a bias of the adapter's own, or the base's, which
    a gain on the whole output must not scale."""
    own = vectors.bias_key or vectors.lora_bias_key
    return bool(own or (vectors.magnitude_key and f"{vectors.module}.bias" in base.parameters))


def _targets(manifest: AdapterManifest, base: BaseSpec) -> dict[int, TargetLayout]:
    ranks: dict[int, list[int]] = {}
    scales: dict[int, list[float]] = {}
    for lora in manifest.modules:
        t, layer = place_of(lora.module, base)
        if t not in ranks:
            ranks[t] = len(base.targets[t].modules) * [0]
            scales[t] = len(ranks[t]) * [0.0]
        ranks[t][layer] += lora.rank
        if abs(lora.scale) > abs(scales[t][layer]):
            scales[t][layer] = lora.scale
    return {t: TargetLayout(tuple(ranks[t]), tuple(scales[t])) for t in sorted(ranks)}


def _term_shapes(manifest: AdapterManifest, base: BaseSpec) -> dict[str, tuple[Shape, ...]]:
    shapes: dict[str, list[Shape]] = {}

    def add(module: str, *added: Shape) -> None:
        shapes.setdefault(module, []).extend(added)

    for replaced in manifest.replaced:
        module = replaced.parameter.rpartition(".")[0]
        add(module, parameter_shape(replaced.parameter, manifest, base))
    for lora in manifest.parameter_loras:
        first, second = parameter_shape(lora.parameter, manifest, base)[-2:]
        wide, out = (first, second) if lora.transposed else (second, first)
        module = lora.parameter.rpartition(".")[0]
        add(module, (lora.experts, lora.rank, wide), (lora.experts, out, lora.rank))
    for delta in manifest.embeddings:
        rows, hidden = parameter_shape(f"{delta.module}.weight", manifest, base)
        add(delta.module, (rows, delta.rank), (delta.rank, hidden))
        if delta.magnitude_key:
            add(delta.module, (hidden,))
    for tokens in manifest.token_rows:
        hidden = parameter_shape(f"{tokens.module}.weight", manifest, base)[1]
        add(tokens.module, (len(tokens.indices), hidden))
    seen: set[str] = set()
    for vectors in manifest.vectors:
        if vectors.module in seen:
            raise AdapterUnavailable(f"the manifest gives {vectors.module!r} vectors twice")
        seen.add(vectors.module)
        t, _ = place_of(vectors.module, base)
        count = bool(vectors.magnitude_key) + needs_shift(vectors, base)
        if count:
            add(vectors.module, *count * [(base.targets[t].out_features,)])
    return {module: tuple(of_module) for module, of_module in shapes.items()}
