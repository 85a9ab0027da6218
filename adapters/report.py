"""What a tenant is told about an upload, tensor by tensor, as plain data for JSON.

Both kinds of report have the same fields in the same order; what is not known is null:

status           "accepted" or "refused"
digest           of the content, 64 hexadecimal digits (null: refused)
base             public name of the base it was validated for (null: refused)
effect           largest change of a logit in the smoke check (null: it did not run)
parameters       numbers in the file's tensors (null: the file cannot be read, as for the next two)
bytes            of the file's tensors
dtypes           of the file's tensors, in safetensors' spelling
device_bytes     what it takes on the device while it is resident (null: refused)
pages            pages of the device pool among these (null: refused)
features         what it has beside LoRA on linears of the layers, such as "dora"; see FEATURES
modules          for each name of adapted modules: {name, kind, count, rank: {min, max},
                 scale: {min, max}}, kind "linear", "embedding" or "parameter"
non_finite       tensors with values that are NaN, infinite or too large for the dtype served; of a
                 refused adapter, those that `violations` names
tokenizer        what was found in its tokenizer files
warnings         what was accepted but is worth telling
violations       why it is refused: {code, subject, message}
tensor_counts    status -> number of tensors, of all STATUSES
tensors          {name, shape, dtype, status, as, reason} of at most MAX_LISTED tensors, by status
                 in the order of STATUSES, then as they lie in the file; `as` says what the tensor
                 is to the base (null: nothing), `reason` why its status is not "applied"
tensors_left_out tensors beyond those listed

Characters that cannot be printed are escaped in every text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from adapters.errors import AdapterRejected, Violation, printable
from adapters.layout import layout
from adapters.manifest import WEIGHTS_FILE, AdapterManifest, BaseSpec
from adapters.peft_files import TensorEntry, TensorTable

Report = dict[str, Any]

#: Tensors that a report lists one by one; the rest are counted.
MAX_LISTED = 2000

#: refused: a violation names it. mapped: applied, but not by its name as PEFT reads it. unused:
#: need not be applied. not applied: refused with the whole upload. applied: as PEFT does.
STATUSES = ("refused", "mapped", "unused", "not applied", "applied")

#: Name of a feature -> whether a manifest has it.
FEATURES: Mapping[str, Callable[[AdapterManifest, BaseSpec], bool]] = {
    "dora": lambda m, _: (
        any(part.magnitude_key for part in m.vectors)
        or any(part.magnitude_key for part in m.embeddings)
    ),
    "lora_bias": lambda m, _: any(part.lora_bias_key for part in m.vectors),
    "bias": lambda m, _: any(part.bias_key for part in m.vectors),
    "embedding": lambda m, _: bool(m.embeddings),
    "head": lambda m, base: any(lora.module == base.output_module for lora in m.modules),
    "saved_modules": lambda m, _: bool(m.replaced),
    "parameters": lambda m, _: bool(m.parameter_loras),
    "trained_tokens": lambda m, _: bool(m.token_rows),
    "fused_projections": lambda m, _: any(lora.b_rows or lora.out_start for lora in m.modules),
    "added_vocabulary": lambda m, _: m.vocab_size > 0,
    "activated": lambda m, _: bool(m.invocation),
    "added_tokens": lambda m, _: bool(m.added_tokens),
    "chat_template": lambda m, _: m.chat_template is not None,
}


def accepted_report(
    manifest: AdapterManifest, table: TensorTable, base: BaseSpec, element_bytes: int
) -> Report:
    """The report on an accepted adapter whose weights file holds `table`.

    `element_bytes` are those of one element of the device pool. Raises AdapterRejected where
    manifest and file do not agree on the tensors, AdapterUnavailable where the base lacks what the
    manifest names.
    """
    place = layout(manifest, base)
    return _report(
        status="accepted",
        digest=manifest.digest,
        base=manifest.base_name,
        effect=manifest.effect,
        table=table,
        device_bytes=place.elements * element_bytes,
        pages=len(place.page_sizes),
        features=[name for name, has in FEATURES.items() if has(manifest, base)],
        modules=_modules(manifest),
        tokenizer=manifest.tokenizer,
        warnings=manifest.warnings,
        tensors=_judged(manifest, table),
    )


def refused_report(
    violations: Sequence[Violation],
    table: TensorTable | None,
    *,
    effect: float | None = None,
    tokenizer: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Report:
    """The report on a refused upload; `table` is None where its weights file cannot be read."""
    return _report(
        status="refused",
        effect=effect,
        table=table,
        tokenizer=tokenizer,
        warnings=warnings,
        violations=violations,
        tensors=_refused(violations, table) if table is not None else [],
    )


def _report(
    *,
    status: str,
    table: TensorTable | None,
    tensors: list[Report],
    digest: str | None = None,
    base: str | None = None,
    effect: float | None = None,
    device_bytes: int | None = None,
    pages: int | None = None,
    features: Sequence[str] = (),
    modules: Sequence[Report] = (),
    tokenizer: Sequence[str] = (),
    warnings: Sequence[str] = (),
    violations: Sequence[Violation] = (),
) -> Report:
    counts = Counter(tensor["status"] for tensor in tensors)
    tensors.sort(key=lambda tensor: STATUSES.index(tensor["status"]))
    spoiled = {v.subject for v in violations if v.code == "non_finite_weights"} - {WEIGHTS_FILE}
    return {
        "status": status,
        "digest": digest,
        "base": base,
        "effect": effect,
        "parameters": sum(math.prod(t.shape) for t in table.tensors) if table else None,
        "bytes": table.nbytes if table else None,
        "dtypes": sorted({tensor.dtype for tensor in table.tensors}) if table else None,
        "device_bytes": device_bytes,
        "pages": pages,
        "features": list(features),
        "modules": list(modules),
        "non_finite": len(spoiled),
        "tokenizer": [printable(text) for text in tokenizer],
        "warnings": [printable(text) for text in warnings],
        "violations": [
            {name: printable(text) for name, text in violation.to_json().items()}
            for violation in violations
        ],
        "tensor_counts": {name: counts[name] for name in STATUSES},
        "tensors": tensors[:MAX_LISTED],
        "tensors_left_out": max(0, len(tensors) - MAX_LISTED),
    }


def _tensor(entry: TensorEntry, status: str, role: str | None, reason: str | None) -> Report:
    return {
        "name": printable(entry.name),
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "status": status,
        "as": role and printable(role),
        "reason": reason and printable(reason),
    }


def _judged(manifest: AdapterManifest, table: TensorTable) -> list[Report]:
    """Each tensor of an accepted file. Raises AdapterRejected for one without a part in it."""
    roles: dict[str, list[str]] = {}
    for key, role in _roles(manifest):
        roles.setdefault(key, []).append(role)
    unused = dict(manifest.unused)
    mapped: dict[str, list[str]] = {}
    for key, reading in manifest.mapped:
        mapped.setdefault(key, []).append(reading)
    absent = roles.keys() - {entry.name for entry in table.tensors}
    if absent:
        raise _disagreement(min(absent), "is named by the manifest, but is not in the file")
    tensors = []
    for entry in table.tensors:
        role = "; ".join(roles.get(entry.name, ()))
        if role and entry.name in mapped:
            tensors.append(_tensor(entry, "mapped", role, "; ".join(mapped[entry.name])))
        elif role:
            tensors.append(_tensor(entry, "applied", role, None))
        elif entry.name in unused:
            tensors.append(_tensor(entry, "unused", None, unused[entry.name]))
        else:
            raise _disagreement(entry.name, "is in the file, but the manifest has no part for it")
    return tensors


def _disagreement(name: str, message: str) -> AdapterRejected:
    return AdapterRejected([Violation("manifest_mismatch", name, message)])


def _roles(manifest: AdapterManifest) -> Iterator[tuple[str, str]]:
    """Each use of a tensor: its name, and what it is to the base. A tensor may have several."""
    for lora in manifest.modules:
        start, stop = lora.b_rows or (0, 0)
        rows = f"rows {start} to {stop - 1} as " if lora.b_rows else ""
        outputs = f", outputs from {lora.out_start} on" if lora.out_start else ""
        yield lora.a_key, f"LoRA A of {lora.module}{outputs}"
        yield lora.b_key, f"{rows}LoRA B of {lora.module}{outputs}"
    for vectors in manifest.vectors:
        for key, what in (
            (vectors.magnitude_key, "DoRA magnitude of"),
            (vectors.lora_bias_key, "bias of LoRA B of"),
            (vectors.bias_key, "bias of"),
        ):
            if key is not None:
                yield key, f"{what} {vectors.module}"
    for embedding in manifest.embeddings:
        yield embedding.a_key, f"LoRA A of the embedding {embedding.module}"
        yield embedding.b_key, f"LoRA B of the embedding {embedding.module}"
        if embedding.magnitude_key is not None:
            yield embedding.magnitude_key, f"DoRA magnitude of the embedding {embedding.module}"
    for replaced in manifest.replaced:
        yield replaced.key, f"in place of {replaced.parameter}"
    for delta in manifest.parameter_loras:
        of = f"the parameter {delta.parameter}"
        of += f" for each of {delta.experts} experts" if delta.experts > 1 else ""
        yield delta.a_key, f"LoRA A of {of}"
        yield delta.b_key, f"LoRA B of {of}"
    for rows_of in manifest.token_rows:
        yield rows_of.key, f"in place of {len(rows_of.indices)} rows of {rows_of.module}"


def _modules(manifest: AdapterManifest) -> list[Report]:
    """One entry for each kind and last part of the names of modules with LoRA."""
    groups: dict[tuple[str, str], list[tuple[str, int, float]]] = {}
    for kind, path, rank, scale in (
        *(("linear", m.module, m.rank, m.scale) for m in manifest.modules),
        *(("embedding", m.module, m.rank, m.scale) for m in manifest.embeddings),
        *(("parameter", m.parameter, m.rank, m.scale) for m in manifest.parameter_loras),
    ):
        parts = path.split(".")[-2 if kind == "parameter" else -1 :]
        groups.setdefault((".".join(parts), kind), []).append((path, rank, scale))
    return [
        {
            "name": name,
            "kind": kind,
            "count": len({path for path, _, _ in loras}),
            "rank": _span([rank for _, rank, _ in loras]),
            "scale": _span([scale for _, _, scale in loras]),
        }
        for (name, kind), loras in groups.items()
    ]


def _span(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "max": max(values)}


#: What the names of an adapter's tensors begin with, before the module's path.
_PREFIXES = ("base_model.model.", "base_model.model.model.", "")
#: Parts of a module's path that are looked at; hostile names have hundreds.
_DEEPEST = 12


def _refused(violations: Sequence[Violation], table: TensorTable) -> list[Report]:
    """Each tensor of a refused file, with what is said of it or of its module."""
    said: dict[str, list[str]] = {}
    for violation in violations:
        said.setdefault(violation.subject, []).append(violation.message)
    rest = "refused with the whole upload; no violation listed names it"
    tensors = []
    for entry in table.tensors:
        reasons = list(said.get(entry.name, ()))
        for module in _modules_of(entry.name):
            reasons += (f"{module} {message}" for message in said.get(module, ()))
        if reasons:
            tensors.append(_tensor(entry, "refused", None, "; ".join(reasons)))
        else:
            tensors.append(_tensor(entry, "not applied", None, rest))
    return tensors


def _modules_of(name: str) -> Iterator[str]:
    """The paths that a tensor of this name may lie under, as violations name modules."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            path, *parts = name.removeprefix(prefix).split(".", _DEEPEST)
            for part in parts:
                yield path
                path = f"{path}.{part}"
