"""What an adapter does at one module besides paged LoRA: extra terms for the rows that have it.

A term holds tensors: on the host once read, views of the pool's buffer once resident, always in
the pool's dtype. Modules that no adapter of a step has terms for pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Affine:
    """y = gain * y + shift over a linear's whole output (base and LoRA), each [out] or None.

    DoRA, bias of B and a replaced bias come down to it.
    """

    gain: Tensor | None
    shift: Tensor | None


@dataclass(frozen=True, eq=False)
class Replacement:
    """The module's own parameters, by their names within the module, exchanged for these.

    On a linear that has LoRA too, the LoRA comes on top.
    """

    parameters: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class ParameterDelta:
    """`parameter` (name within the module) W[e] += scale * B_e A_e for each expert e.

    a [experts, rank, in], b [experts, out, rank]; the parameter is [experts, out, in] (or without
    the first dimension, which then is 1 here) unless `transposed`: [experts, in, out].
    """

    parameter: str
    scale: float
    transposed: bool
    a: Tensor
    b: Tensor


@dataclass(frozen=True, eq=False)
class EmbeddingDelta:
    """y += scale * factor * (a[id] b), a [vocab, rank], b [rank, hidden]; `factor` is the
    embedding's own scaling of its output. With `gain` [hidden] (DoRA): y = gain * y after that."""

    scale: float
    a: Tensor
    b: Tensor
    gain: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ReplacedRows:
    """Rows `indices` of an embedding or of a head are `rows` [len(indices), hidden] instead."""

    indices: tuple[int, ...]
    rows: Tensor


Term = Affine | Replacement | ParameterDelta | EmbeddingDelta | ReplacedRows


def tensors(term: Term) -> Iterator[Tensor]:
    """All tensors of a term in a fixed order."""
    for field in fields(term):
        value: Any = getattr(term, field.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from value.values()


def mapped(term: Term, place: Callable[[Tensor], Tensor]) -> Term:
    """The term with `place(tensor)` for each of its tensors, called in the order of `tensors`."""
    new: dict[str, Any] = {}
    for field in fields(term):
        value: Any = getattr(term, field.name)
        if isinstance(value, Tensor):
            new[field.name] = place(value)
        elif isinstance(value, Mapping):
            new[field.name] = {name: place(tensor) for name, tensor in value.items()}
    return replace(term, **new)
