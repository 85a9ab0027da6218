"""LoRA of projections that the base holds in another cut: q, k, v and gate, up, apart or in one.

A fused projection's weight is its parts' weights one below the other, so rows of its output are
rows of theirs. LoRA of the whole, B A, is LoRA of each part with the part's rows of B and the whole
A; LoRA of a part is LoRA of the whole whose B is zero in the others' rows. Neither loses anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adapters.errors import Violation
from adapters.manifest import BaseSpec, ModuleLora


def placed(
    loras: Sequence[ModuleLora], shapes: Mapping[str, tuple[int, ...]], base: BaseSpec
) -> tuple[list[ModuleLora], list[Violation], list[tuple[str, str]]]:
    """`loras`, each taking all of its B, on the modules that `base` has; with what is wrong with
    those that had to move, and (tensor name, how it was read) for both tensors of each.

    `shapes` is by tensor name. The result is in the base's order, then in that of the outputs. What
    fits neither way, because the base has no such module, comes unchanged at the end.
    """
    parts = {part.path: part for part in _parts(base)}
    adapted = {lora.module for lora in loras}
    moved: list[ModuleLora] = []
    violations: list[Violation] = []
    notes: list[tuple[str, str]] = []
    for lora in loras:
        cut = _cut(lora, base, parts)
        if cut is None:
            moved.append(lora)
            continue
        wrong = _wrong_shapes(lora, cut, shapes, base) + _twice(lora, adapted, base)
        violations += wrong
        if not wrong:
            moved += cut.loras
            notes += [(lora.a_key, cut.a_note), (lora.b_key, cut.b_note)]
    order = base.module_index
    nowhere = (len(base.targets), 0)
    moved.sort(key=lambda lora: (*order.get(lora.module, nowhere), lora.out_start))
    return moved, violations, notes


@dataclass(frozen=True)
class _Part:
    """Output features `start` to `stop` of the projection `whole`."""

    path: str
    whole: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Cut:
    """What one LoRA becomes, the rows that its B must have, and how its tensors were read."""

    loras: list[ModuleLora]
    rows: int
    a_note: str
    b_note: str


def _parts(base: BaseSpec) -> list[_Part]:
    found = []
    for whole, held in base.fused.items():
        start = 0
        for path, size in held:
            found.append(_Part(path, whole, start, start + size))
            start += size
    return found


def _cut(lora: ModuleLora, base: BaseSpec, parts: Mapping[str, _Part]) -> _Cut | None:
    """None where the LoRA stays: its module is there, or nothing that could stand in for it is."""
    if lora.module in base.module_index:
        return None
    if (part := parts.get(lora.module)) is not None and part.whole in base.module_index:
        on_whole = replace(lora, module=part.whole, out_start=part.start)
        return _Cut(
            [on_whole],
            part.stop - part.start,
            f"applied to the input of {part.whole!r}",
            f"applied to outputs {part.start} to {part.stop - 1} of {part.whole!r}",
        )
    held = [parts[path] for path, _ in base.fused.get(lora.module, ())]
    if not held or any(part.path not in base.module_index for part in held):
        return None
    on_parts = [replace(lora, module=p.path, b_rows=(p.start, p.stop)) for p in held]
    names = ", ".join(part.path.rpartition(".")[2] for part in held)
    spans = ", ".join(
        f"rows {part.start} to {part.stop - 1} on {part.path.rpartition('.')[2]}" for part in held
    )
    return _Cut(on_parts, held[-1].stop, f"applied to the input of {names}", f"split: {spans}")


def _wrong_shapes(
    lora: ModuleLora, cut: _Cut, shapes: Mapping[str, tuple[int, ...]], base: BaseSpec
) -> list[Violation]:
    place, _ = base.module_index[cut.loras[0].module]
    columns = base.targets[place].in_features
    expected = {
        lora.a_key: ("lora_A", (lora.rank, columns)),
        lora.b_key: ("lora_B", (cut.rows, lora.rank)),
    }
    return [
        Violation(
            "shape_mismatch",
            key,
            f"has shape {list(shapes[key])}; on this base {side} of {lora.module!r} must be "
            f"{list(shape)}",
        )
        for key, (side, shape) in expected.items()
        if tuple(shapes[key]) != shape
    ]


def _twice(lora: ModuleLora, adapted: set[str], base: BaseSpec) -> list[Violation]:
    """No model has a projection both whole and in parts."""
    for whole, held in base.fused.items():
        both = {whole, *(path for path, _ in held)} & adapted
        if whole in both and lora.module in both and len(both) > 1:
            other = min(both - {lora.module})
            message = f"adapts {lora.module!r}; {other!r}, of the same outputs, is in the file too"
            return [Violation("duplicate_tensor", lora.a_key, message)]
    return []
