"""Whether an upload is an adapter that this base serves exactly. Reports every violation at once.

The tensors are the truth and the config must agree with them: every tensor of the file is applied,
or known not to matter, or refused; all that the config means is there; and ranks, shapes and scales
are those PEFT would compute. Needs memory for one chunk of the file, whatever the file's size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adapters.errors import AdapterRejected, Violation
from adapters.expectation import Expectation, expectation
from adapters.full_tensors import FullTensors, find_full_tensors
from adapters.layout import layout
from adapters.lora_pairs import Loras, find_loras
from adapters.manifest import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterManifest,
    BaseSpec,
    OutputVectors,
)
from adapters.peft_config import PeftConfig
from adapters.peft_files import TensorTable, content_digest, read_config, read_header
from adapters.tensor_contents import Contents
from adapters.tensor_roles import Roles, find_roles
from adapters.terms import BaseParameters

#: Violations of one code that are listed one by one; the rest are counted.
MAX_LISTED = 16


@dataclass(frozen=True)
class Limits:
    """What an adapter may ask for.

    `max_rank` holds for each LoRA, that of an embedding or of one expert too. `max_pages_bytes` is
    the room of the device pool, whose elements have `element_bytes` each: an adapter that could
    never be resident is refused, as is one with values that the pool's `dtype` cannot hold.
    `max_scale` is the largest float16, so that every serving dtype can hold the scale.
    """

    max_rank: int = 256
    max_pages_bytes: int = 512 << 20
    element_bytes: int = 4
    dtype: str = "float32"
    max_scale: float = 65504.0


def validate(
    folder: Path,
    base: BaseSpec,
    limits: Limits,
    notes: Sequence[str] = (),
    *,
    parameters: BaseParameters | None = None,
) -> AdapterManifest:
    """The manifest of the adapter in `folder`, which holds CONFIG_FILE and WEIGHTS_FILE.

    `notes` go in front of the manifest's warnings. `parameters` are the resident base's: without
    them, copies of the base's weights that PEFT keeps beside LoRA of embedding and head are
    refused. Raises AdapterRejected with all violations.
    """
    report = _Report()
    config: PeftConfig | None = None
    table: TensorTable | None = None
    try:
        config = read_config(folder / CONFIG_FILE)
        report.extend(config.violations)
        report.extend(_layer_violations(config, base))
        report.extend(_invocation_violations(config, base))
    except AdapterRejected as error:
        report.extend(error.violations)
    try:
        table = read_header(folder / WEIGHTS_FILE)
    except AdapterRejected as error:
        report.extend(error.violations)
    if table is None:
        report.raise_if_any()
    assert table is not None
    contents = Contents(folder / WEIGHTS_FILE, parameters)
    roles = find_roles(table, base)
    report.extend(roles.violations)
    expected = expectation(config, base, roles) if config is not None else None
    loras = find_loras(roles, base, config, expected)
    full, twins = FullTensors(), list[tuple[str, str]]()
    try:
        twins = _equal_twins(roles, contents, report)
        if config is not None and expected is not None:
            full = find_full_tensors(roles, base, config, expected, loras, contents)
            report.extend(expected.violations)
            report.extend(_reach_violations(config, expected, full, base))
        report.extend((*loras.violations, *full.violations))
        report.extend(contents.non_finite(table, limits.dtype))
    except AdapterRejected as error:
        report.extend(error.violations)
    report.extend(_limit_violations(loras, limits))
    full.unused += twins
    manifest = _manifest(base, table, config or PeftConfig(), roles, loras, full)
    report.extend(_size_violations(manifest, base, limits))
    report.raise_if_any()
    assert config is not None
    return replace(
        manifest,
        digest=content_digest(folder),
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
            violations.append(
                Violation(code, WEIGHTS_FILE, f"and {count} more of this kind", count)
            )
        raise AdapterRejected(violations)


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


def _manifest(
    base: BaseSpec,
    table: TensorTable,
    config: PeftConfig,
    roles: Roles,
    loras: Loras,
    full: FullTensors,
) -> AdapterManifest:
    """Of what is valid, still without digest and warnings."""
    linears = {**loras.magnitudes, **loras.biases, **full.biases}
    vectors = (
        OutputVectors(
            path, *(keys.get(path) for keys in (loras.magnitudes, loras.biases, full.biases))
        )
        for path in sorted(linears, key=base.module_index.__getitem__)
    )
    return AdapterManifest(
        digest="",
        modules=tuple(loras.modules),
        parameters=sum(math.prod(tensor.shape) for tensor in table.tensors),
        weights_bytes=table.nbytes,
        dtypes=tuple(sorted({tensor.dtype for tensor in table.tensors})),
        max_rank=max(loras.ranks.values(), default=0),
        base_name=base.name,
        base_digest=base.digest,
        base_model=config.base_model,
        vectors=tuple(vectors),
        embeddings=tuple(loras.embeddings),
        replaced=tuple(full.parameters()),
        parameter_loras=tuple(loras.parameters),
        token_rows=tuple(full.token_rows),
        vocab_size=full.vocab_size,
        invocation=config.invocation,
        mapped=_joined((*roles.mapped, *loras.mapped)),
        unused=tuple(full.unused),
    )


def _equal_twins(roles: Roles, contents: Contents, report: _Report) -> list[tuple[str, str]]:
    """Tensors that say again what another says, as PEFT itself saves some."""
    unused = []
    for tensor, twin in roles.twins:
        if contents.same(tensor, twin):
            unused.append((tensor.name, f"says the same as {twin.name!r}"))
        else:
            message = f"means the same tensor as {twin.name!r}, but differs from it"
            report.extend([Violation("duplicate_tensor", tensor.name, message)])
    return unused


def _joined(notes: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """One note for each tensor."""
    by_name: dict[str, list[str]] = {}
    for name, note in notes:
        by_name.setdefault(name, []).append(note)
    return tuple((name, "; ".join(of_one)) for name, of_one in by_name.items())


def _limit_violations(loras: Loras, limits: Limits) -> Iterator[Violation]:
    # Several LoRAs of one module add up.
    summed: Counter[str] = Counter()
    for lora in loras.modules:
        summed[lora.module] += lora.rank
    for subject, rank in (summed | Counter(loras.ranks)).items():
        if rank > limits.max_rank:
            message = f"has rank {rank}; at most {limits.max_rank} is served"
            yield Violation("rank_over_limit", subject, message)
    for subject, scale in loras.scales.items():
        if scale > limits.max_scale:
            message = f"has the scale {scale:g}; at most {limits.max_scale:g} is served"
            yield Violation("scale_over_limit", subject, message)


def _size_violations(
    manifest: AdapterManifest, base: BaseSpec, limits: Limits
) -> Iterator[Violation]:
    placeable = [lora for lora in manifest.modules if lora.module in base.module_index]
    needed = layout(replace(manifest, modules=tuple(placeable)), base).elements
    if needed * limits.element_bytes > limits.max_pages_bytes:
        message = (
            f"needs {needed * limits.element_bytes} bytes on the device; "
            f"there are {limits.max_pages_bytes} for all adapters together"
        )
        yield Violation("adapter_too_large", WEIGHTS_FILE, message)


def _invocation_violations(config: PeftConfig, base: BaseSpec) -> Iterator[Violation]:
    for token in sorted(set(config.invocation)):
        if token >= base.vocab_size:
            message = f"names token {token}; the base has {base.vocab_size}"
            yield Violation("token_out_of_range", "alora_invocation_tokens", message)


def _reach_violations(
    config: PeftConfig, expected: Expectation, full: FullTensors, base: BaseSpec
) -> Iterator[Violation]:
    """What an activated LoRA would change before its invocation."""
    if not config.invocation:
        return
    message = "cannot belong to an activated LoRA (alora_invocation_tokens), which adapts linears"
    paths = [base.embedding] if expected.embedding else []
    for path in (*paths, *full.replaced):
        yield Violation("invalid_combination", path, message)


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
