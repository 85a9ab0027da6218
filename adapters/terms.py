"""What an adapter does at one module besides paged LoRA: extra terms for the rows that have it.

A term holds tensors: on the host once read, views of the pool's buffer once resident, always in
the pool's dtype. Modules that no adapter of a step has terms for pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

#: Full path of a parameter of the base -> its resident tensor, which must not be written to.
BaseParameters = Callable[[str], Tensor]

#: Elements of a weight that `dora_gain` works on at a time.
_AT_ONCE = 1 << 24


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
    embedding's own scaling of its output, which y has already. With `gain` [hidden] (DoRA):
    y = gain * y after that; the factor has no part in the norm that `gain` divides by."""

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


@torch.inference_mode()
def dora_gain(
    magnitude: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, *, transposed: bool
) -> Tensor:
    """magnitude / ‖weight + scale * b a‖, a norm for each output: float32 [out] on the CPU.

    weight [out, in], or [in, out] if `transposed`, on any device; magnitude [out], a [rank, in],
    b [out, rank]. An embedding is a transposed weight [vocab, hidden], with one norm for each of
    the hidden features. As in `peft.tuners.lora.dora`.
    """
    factors = (a.T, b.T) if transposed else (b, a)
    left, right = (f.to(weight.device, torch.float32) for f in factors)
    rows = max(1, _AT_ONCE // weight.shape[1])
    squares = []
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].to(torch.float32, copy=True)
        part.addmm_(left[start : start + rows], right, alpha=scale)
        squares.append(part.square_().sum(0 if transposed else 1))
    norms = (torch.stack(squares).sum(0) if transposed else torch.cat(squares)).sqrt()
    return magnitude.float() / norms.cpu()


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
