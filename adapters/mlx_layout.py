"""What an adapter in MLX-LM's layout holds, told in PEFT's terms.

MLX-LM trains y + scale * (x lora_a) lora_b with lora_a [in, r] and lora_b [r, out], in a file of
its own name, and says so in the same `adapter_config.json` (`mlx_lm.tuner.lora`). PEFT has
y + alpha/r * (x Aᵀ) Bᵀ with A [r, in] and B [out, r]: the transposes. MLX-LM's DoRA of a linear,
m / ‖W + scale (lora_a lora_b)ᵀ‖ by output row, over all but the bias, is PEFT's too; its DoRA of an
embedding takes the norm over the other axis and is refused, as are stacks of experts.

What is transposed is told by the names alone: a square factor looks the same either way.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from adapters.errors import AdapterRejected, Violation
from adapters.key_names import PREFIX, module_path
from adapters.manifest import CONFIG_FILE, BaseSpec
from adapters.peft_files import TensorEntry, TensorTable

#: The dtypes converted, as safetensors spells them, and the bytes of one element.
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
#: Violations of one code that are listed one by one; the rest are counted.
MAX_LISTED = 16


@dataclass(frozen=True)
class MlxAdapter:
    """An MLX-LM adapter. `alpha` over `rank` is `scale`; `modules` are paths of the base; `tensors`
    pairs each tensor with the name PEFT has for its transpose."""

    rank: int
    scale: float
    alpha: float
    dora: bool
    modules: tuple[str, ...]
    tensors: tuple[tuple[TensorEntry, str], ...]


def read_mlx(config: dict[str, Any], table: TensorTable, base: BaseSpec) -> MlxAdapter:
    """The adapter of a config and a weights file that are both MLX-LM's.

    Raises AdapterRejected with what breaks its layout, or what PEFT's cannot express.
    """
    try:
        settings = msgspec.convert(config, _MlxConfig)
    except msgspec.ValidationError as error:
        message = "".join(char if char.isprintable() else "?" for char in str(error)[:300])
        raise AdapterRejected([Violation(_CONFIG, CONFIG_FILE, message)]) from None
    reader = _Reader(settings, base)
    alpha = reader.alpha()
    for tensor in table.tensors:
        reader.assign(tensor)
    if not reader.violations:
        reader.check_modules()
        reader.check_coverage()
    if reader.violations:
        raise AdapterRejected(_listed(reader.violations))
    rank, scale = settings.lora_parameters.rank, settings.lora_parameters.scale
    modules = tuple(sorted(reader.modules))
    return MlxAdapter(rank, scale, alpha, settings.dora, modules, tuple(reader.tensors))


_MLX_NAME = re.compile(r"(?P<module>.+)\.(?P<leaf>lora_a|lora_b|m)", re.DOTALL)
_CONFIG = "invalid_adapter_config"
_LEAVES = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "m": "lora_magnitude_vector",
}
_EMBEDDING_LEAVES = {
    "lora_a": "lora_embedding_A",
    "lora_b": "lora_embedding_B",
    "m": "lora_magnitude_vector",
}


class _LoraParameters(msgspec.Struct, forbid_unknown_fields=True):
    rank: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    scale: Annotated[float, msgspec.Meta(ge=0, le=float(np.finfo(np.float32).max))]
    keys: list[str] | None = None
    alpha: float | None = None
    dropout: float | None = None


class _MlxConfig(msgspec.Struct):
    """What of MLX-LM's config has a bearing on inference; the rest are settings of the training.

    Older versions write `lora_layers` and `use_dora` for `num_layers` and `fine_tune_type`.
    """

    lora_parameters: _LoraParameters
    fine_tune_type: Literal["lora", "dora"] | None = None
    use_dora: bool | None = None
    num_layers: int | None = None
    lora_layers: int | None = None

    @property
    def dora(self) -> bool:
        return self.fine_tune_type == "dora" or (
            self.fine_tune_type is None and bool(self.use_dora)
        )


class _Reader:
    """Reads one adapter and gathers what is wrong with it."""

    def __init__(self, config: _MlxConfig, base: BaseSpec) -> None:
        self._config = config
        self._base = base
        self._names: dict[str, str] = {}
        self.violations: list[Violation] = []
        self.tensors: list[tuple[TensorEntry, str]] = []
        self.modules: dict[str, set[str]] = {}

    def refuse(self, code: str, subject: str, message: str) -> None:
        self.violations.append(Violation(code, subject, message))

    def alpha(self) -> float:
        """PEFT's lora_alpha."""
        parameters = self._config.lora_parameters
        if parameters.alpha not in (None, parameters.rank):
            message = (
                "holds an alpha: older versions of MLX-LM multiply the scale by alpha / rank, "
                "newer ones ignore it; remove alpha and give the scale that was meant"
            )
            self.refuse("ambiguous_layout", "lora_parameters", message)
        alpha = _alpha(parameters.scale, parameters.rank)
        if alpha is None:
            message = (
                f"holds the scale {parameters.scale}, which is no lora_alpha over rank "
                f"{parameters.rank} in floating point"
            )
            self.refuse("unsupported_feature", "lora_parameters", message)
        return alpha or 0.0

    def assign(self, tensor: TensorEntry) -> None:
        """Find the tensor's name in PEFT's layout."""
        found = _MLX_NAME.fullmatch(tensor.name)
        if found is None:
            message = "is not named as MLX-LM names it, such as 'model.layers.0.<module>.lora_a'"
            self.refuse("unexpected_key", tensor.name, message)
        elif tensor.dtype not in ITEM_BYTES:
            message = f"has dtype {tensor.dtype}; {', '.join(ITEM_BYTES)} are served"
            self.refuse("unsupported_dtype", tensor.name, message)
        elif self._shape_is_right(tensor, found["leaf"]):
            module = module_path(found["module"], self._base) or found["module"]
            leaves = _EMBEDDING_LEAVES if module == self._base.embedding else _LEAVES
            name = f"{PREFIX}{module}.{leaves[found['leaf']]}"
            if name in self._names:
                message = f"means the same tensor as {self._names[name]!r}"
                self.refuse("duplicate_tensor", tensor.name, message)
            self._names[name] = tensor.name
            self.tensors.append((tensor, name))
            self.modules.setdefault(module, set()).add(found["leaf"])

    def _shape_is_right(self, tensor: TensorEntry, leaf: str) -> bool:
        shape, rank = list(tensor.shape), self._config.lora_parameters.rank
        if len(shape) == 3:
            message = f"has shape {shape}: LoRA of a stack of experts is not read from this layout"
            self.refuse("unsupported_tensor", tensor.name, message)
            return False
        right = {
            "lora_a": len(shape) == 2 and shape[1] == rank,
            "lora_b": len(shape) == 2 and shape[0] == rank,
            "m": len(shape) == 1,
        }[leaf]
        if not right:
            message = (
                f"has shape {shape}; with rank {rank}, MLX-LM has lora_a [in, {rank}], "
                f"lora_b [{rank}, out] and m [out]"
            )
            self.refuse("shape_mismatch", tensor.name, message)
        return right

    def check_modules(self) -> None:
        dora = self._config.dora
        wanted = {"lora_a", "lora_b", "m"} if dora else {"lora_a", "lora_b"}
        for module, leaves in self.modules.items():
            for leaf in sorted(wanted - leaves):
                self.refuse("incomplete_adapter", module, f"has no {leaf} in the file")
            if not dora and "m" in leaves:
                message = "has a DoRA magnitude m, but the config's fine_tune_type is not dora"
                self.refuse("unsupported_tensor", module, message)
        embedding = self._base.embedding
        if embedding in self.modules and dora:
            message = "has DoRA, which MLX-LM defines otherwise for embeddings than PEFT does"
            self.refuse("unsupported_feature", embedding, message)
        elif embedding in self.modules and self._base.tied_head:
            message = (
                "has LoRA, which MLX-LM also applies to the head where the two share weights; "
                "PEFT does not, so it cannot be converted"
            )
            self.refuse("unsupported_feature", embedding, message)

    def check_coverage(self) -> None:
        """Report modules that the config covers and the file lacks, or the reverse: MLX-LM adapts
        `keys` (all that is there, if absent) in the last `num_layers` layers (all, if not above 0),
        and `keys` that are whole paths anywhere."""
        layers, keys = self._config.num_layers, self._config.lora_parameters.keys
        layers = self._config.lora_layers if layers is None else layers
        if layers is None:
            self.refuse(_CONFIG, "num_layers", "is missing")
            return
        places = _places(self._base)
        depth = 1 + max((layer for layer, _ in places.values()), default=-1)
        first = depth - layers if layers > 0 else 0
        present = self.modules.keys() & places.keys()
        names = {places[path][1] for path in present} if keys is None else set(keys)
        whole = (module_path(name, self._base) for name in keys or ())
        covered = {path for path in whole if path is not None} | {
            path for path, (layer, name) in places.items() if layer >= first and name in names
        }
        for path in sorted(covered & places.keys() - present):
            message = "is covered by keys and num_layers, but has no tensors in the file"
            self.refuse("incomplete_adapter", path, message)
        for path in sorted(self.modules.keys() - covered):
            if module_path(path, self._base) is not None:
                message = "is in the file, but keys and num_layers do not cover it"
                self.refuse("module_not_targeted", path, message)


def _alpha(scale: float, rank: int) -> float | None:
    """The lora_alpha whose quotient by `rank` is `scale` in float64, or, where there is none, at
    least in float32, in which MLX multiplies; else None."""
    product = scale * rank
    near = (product, math.nextafter(product, 0), math.nextafter(product, math.inf))
    best = min(near, key=lambda alpha: abs(alpha / rank - scale))
    return best if np.float32(best / rank) == np.float32(scale) else None


def _places(base: BaseSpec) -> dict[str, tuple[int, str]]:
    """The number of its layer and its name within it, of each linear in a numbered layer."""
    parts = (path for held in base.fused.values() for path, _ in held)
    found = {}
    for path in (*base.module_index, *base.fused, *parts):
        inside = _IN_LAYER.fullmatch(path)
        if inside is not None:
            found[path] = (int(inside["layer"]), inside["name"])
    return found


_IN_LAYER = re.compile(r"(?:[^.]+\.)*?(?P<layer>[0-9]+)\.(?P<name>.+)")


def _listed(violations: list[Violation]) -> list[Violation]:
    counts: Counter[str] = Counter()
    listed = []
    for violation in violations:
        counts[violation.code] += 1
        if counts[violation.code] <= MAX_LISTED:
            listed.append(violation)
    for code, count in counts.items():
        if count > MAX_LISTED:
            more = f"and {count - MAX_LISTED} more of this kind"
            listed.append(Violation(code, CONFIG_FILE, more, count - MAX_LISTED))
    return listed
