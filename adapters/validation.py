"""Whether an upload is an adapter that this base serves exactly. Reports every violation at once.

The tensors are the truth and the config must agree with them: every tensor in the file belongs to
the LoRA pair of one linear of the base, every linear the config means has its pair, and ranks,
shapes and scales are those PEFT would compute. Needs memory for one chunk of the file, whatever the
file's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapters.errors import AdapterRejected, Violation
from adapters.lora_pairs import LoraPair, find_pairs
from adapters.manifest import (
    CONFIG_FILE,
    PAGE_RANK,
    WEIGHTS_FILE,
    AdapterManifest,
    BaseSpec,
    ModuleLora,
)
from adapters.pages import page_elements
from adapters.peft_config import PeftConfig
from adapters.peft_files import TensorTable, content_digest, read_config, read_header

#: Violations of one code that are listed one by one; the rest are counted.
MAX_LISTED = 16
READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Limits:
    """What an adapter may ask for.

    `max_pages_bytes` is the room of the device pool, whose elements have `element_bytes` each: an
    adapter that could never be resident is refused, as is one with values that the pool's `dtype`
    cannot hold. `max_scale` is the largest float16, so that every serving dtype can hold the scale.
    """

    max_rank: int = 256
    max_pages_bytes: int = 512 << 20
    element_bytes: int = 4
    dtype: str = "float32"
    max_scale: float = 65504.0


def validate(
    folder: Path, base: BaseSpec, limits: Limits, notes: Sequence[str] = ()
) -> AdapterManifest:
    """The manifest of the adapter in `folder`, which holds CONFIG_FILE and WEIGHTS_FILE.

    `notes` go in front of the manifest's warnings. Raises AdapterRejected with all violations.
    """
    report = _Report()
    config: PeftConfig | None = None
    table: TensorTable | None = None
    pairs: list[LoraPair] = []
    try:
        config = read_config(folder / CONFIG_FILE)
        report.extend(config.violations)
        report.extend(_layer_violations(config, base))
    except AdapterRejected as error:
        report.extend(error.violations)
    try:
        table = read_header(folder / WEIGHTS_FILE)
        pairs, violations = find_pairs(table, base)
        report.extend(violations)
        report.extend(_size_violations(pairs, base, limits))
        report.extend(_non_finite(folder / WEIGHTS_FILE, table, limits.dtype))
    except AdapterRejected as error:
        report.extend(error.violations)
    if config is not None and table is not None:
        report.extend(_target_violations(config, base, pairs))
        report.extend(_rank_violations(config, pairs))
        report.extend(_scale_violations(config, pairs, limits))
    report.raise_if_any()
    assert config is not None and table is not None
    modules = tuple(_module(pair, config) for pair in pairs)
    return AdapterManifest(
        digest=content_digest(folder),
        modules=modules,
        parameters=sum(math.prod(tensor.shape) for tensor in table.tensors),
        weights_bytes=table.nbytes,
        dtypes=tuple(sorted({tensor.dtype for tensor in table.tensors})),
        max_rank=max(module.rank for module in modules),
        base_name=base.name,
        base_digest=base.digest,
        base_model=config.base_model,
        warnings=(*notes, *config.warnings, *_warnings(config, base)),
    )


class _Report:
    """Violations in the order found, at most MAX_LISTED of one code."""

    def __init__(self) -> None:
        self._found: dict[str, list[Violation]] = {}
        self._omitted: dict[str, int] = {}

    def extend(self, violations: Iterable[Violation]) -> None:
        for violation in violations:
            listed = self._found.setdefault(violation.code, [])
            if len(listed) < MAX_LISTED:
                listed.append(violation)
            else:
                self._omitted[violation.code] = self._omitted.get(violation.code, 0) + 1

    def raise_if_any(self) -> None:
        if not self._found:
            return
        violations = [violation for listed in self._found.values() for violation in listed]
        for code, count in self._omitted.items():
            violations.append(Violation(code, WEIGHTS_FILE, f"and {count} more of this kind"))
        raise AdapterRejected(violations)


# For each stored dtype, its bits as an unsigned integer; for each served one, the least bits (but
# for the sign) that are NaN, infinite, or round to infinity in it.
_BITS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<u4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
}
_TOO_LARGE = {
    "float32": {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80},
    "bfloat16": {"F32": 0x7F7F_8000, "F16": 0x7C00, "BF16": 0x7F80},
    "float16": {"F32": 0x477F_F000, "F16": 0x7C00, "BF16": 0x4780},
}


def _non_finite(path: Path, table: TensorTable, served: str) -> Iterator[Violation]:
    """One violation for each tensor of a served dtype with a value that `served` cannot hold."""
    with open(path, "rb", buffering=0) as file:
        for tensor in table.tensors:
            if tensor.dtype not in _BITS:
                continue
            dtype = _BITS[tensor.dtype]
            magnitude, least = np.iinfo(dtype).max >> 1, _TOO_LARGE[served][tensor.dtype]
            file.seek(tensor.offset)
            left, bad = tensor.nbytes, 0
            while left:
                chunk = file.read(min(left, READ_BYTES))
                if not chunk or len(chunk) % dtype.itemsize:
                    message = "was cut while it was read"
                    raise AdapterRejected([Violation("corrupt_adapter", path.name, message)])
                bits = np.frombuffer(chunk, dtype)
                bad += int(np.count_nonzero((bits & magnitude) >= least))
                left -= len(chunk)
            if bad:
                message = f"holds {bad} values that are NaN, infinite or too large for {served}"
                yield Violation("non_finite_weights", tensor.name, message)


def _size_violations(pairs: list[LoraPair], base: BaseSpec, limits: Limits) -> Iterator[Violation]:
    ranks: dict[int, int] = {}
    for pair in pairs:
        rank = pair.rank or 0
        ranks[pair.target] = max(ranks.get(pair.target, 0), rank)
        if rank > limits.max_rank:
            message = f"has rank {rank}; at most {limits.max_rank} is served"
            yield Violation("rank_over_limit", pair.module, message)
    pages = {target: -(-rank // PAGE_RANK) for target, rank in ranks.items()}
    elements = sum(count * page_elements(base.targets[t]) for t, count in pages.items())
    if elements * limits.element_bytes > limits.max_pages_bytes:
        message = (
            f"needs {elements * limits.element_bytes} bytes on the device; "
            f"there are {limits.max_pages_bytes} for all adapters together"
        )
        yield Violation("adapter_too_large", WEIGHTS_FILE, message)


def _layer_violations(config: PeftConfig, base: BaseSpec) -> Iterator[Violation]:
    if config.targets is None or config.targets.layers is None:
        return
    layers = config.targets.layers
    numbers = (layers.layer_of(path) for path in base.module_index)
    known = {number for number in numbers if number is not None}
    span = f"{min(known)} to {max(known)}" if known else "of another name"
    for layer in sorted(layers.layers - known):
        message = f"names layer {layer}; the base has layers {span}"
        yield Violation("layer_out_of_range", "layers_to_transform", message)


def _target_violations(
    config: PeftConfig, base: BaseSpec, pairs: list[LoraPair]
) -> Iterator[Violation]:
    """Where the config's targets and the file's modules differ."""
    if config.targets is None:
        return
    targeted = config.targets.select(base.module_index, base.output_module)
    present = {pair.module for pair in pairs}
    for pair in pairs:
        if pair.module not in targeted:
            message = "is in the file, but the config's targets do not cover it"
            yield Violation("module_not_targeted", pair.module, message)
    for path in base.module_index:
        if path in targeted and path not in present:
            message = "is targeted by the config, but has no tensors in the file"
            yield Violation("incomplete_adapter", path, message)


def _rank_violations(config: PeftConfig, pairs: list[LoraPair]) -> Iterator[Violation]:
    if config.rank is None or config.rank_pattern is None:
        return
    for pair in pairs:
        rank = config.rank_pattern.get(pair.module, config.rank)
        if pair.rank not in (None, rank):
            message = f"has rank {pair.rank} in the file, but {rank} in the config"
            yield Violation("rank_mismatch", pair.module, message)


def _scale_violations(
    config: PeftConfig, pairs: list[LoraPair], limits: Limits
) -> Iterator[Violation]:
    for pair in pairs:
        scale = _scale(pair, config)
        if scale is not None and scale > limits.max_scale:
            message = f"has the scale {scale:g}; at most {limits.max_scale:g} is served"
            yield Violation("scale_over_limit", pair.module, message)


def _scale(pair: LoraPair, config: PeftConfig) -> float | None:
    """alpha / rank, or alpha / sqrt(rank) under rank-stabilised LoRA, as PEFT has it."""
    if pair.rank is None or config.alpha is None or config.alpha_pattern is None:
        return None
    alpha = config.alpha_pattern.get(pair.module, config.alpha)
    return alpha / (math.sqrt(pair.rank) if config.use_rslora else pair.rank)


def _module(pair: LoraPair, config: PeftConfig) -> ModuleLora:
    scale = _scale(pair, config)
    assert pair.rank is not None and scale is not None
    a, b = pair.tensors["A"].name, pair.tensors["B"].name
    return ModuleLora(module=pair.module, rank=pair.rank, scale=scale, a_key=a, b_key=b)


def _warnings(config: PeftConfig, base: BaseSpec) -> Iterator[str]:
    trained_on = (config.base_model or "").rstrip("/")
    same = trained_on.rsplit("/", 1)[-1].lower() == base.name.rsplit("/", 1)[-1].lower()
    if trained_on and not same:
        yield f"the config names the base {trained_on!r}, but the base served is {base.name!r}"
    for field, values in (
        ("rank_pattern", config.rank_pattern),
        ("alpha_pattern", config.alpha_pattern),
    ):
        for key in values.unused[:MAX_LISTED] if values else ():
            yield f"the entry {key[:100]!r} of {field} applies to no module"
