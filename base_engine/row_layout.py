"""Where a module's tensors carry the rows of a step, learned from a trial run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

#: Experts kept as modules of their own are fed the tokens that are routed to them: by chance all.
_EXPERT = re.compile(r"\.experts\.\d+(\.|$)")


@dataclass(frozen=True)
class RowLayout:
    """The dimension along which each positional input, keyword input and output of a module
    carries the step's rows in order; None where it is no tensor. `flat`: the first input is
    [..., features], its leading dimensions flattening to the rows."""

    inputs: tuple[int | None, ...]
    keywords: Mapping[str, int | None]
    outputs: tuple[int | None, ...]
    flat: bool

    def narrowed(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], start: int, end: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's inputs for rows [start, end) alone."""
        inputs = zip(args, self.inputs, strict=True)
        return (
            tuple(_narrow(value, dim, start, end) for value, dim in inputs),
            {key: _narrow(value, self.keywords[key], start, end) for key, value in kwargs.items()},
        )

    def rows_of(self, output: Any, start: int, end: int) -> Tensor:
        """Rows [start, end) of the first output: a view."""
        rows: Tensor = _narrow(_as_tuple(output)[0], self.outputs[0], start, end)
        return rows

    def write(self, output: Any, rows: Any, start: int) -> None:
        """Writes what a call with narrowed inputs gave over the same rows of a whole call's.

        Where it is narrower in its last dimension, as another head's logits, it fills the front.
        """
        for whole, part, dim in zip(_as_tuple(output), _as_tuple(rows), self.outputs, strict=True):
            if dim is not None:
                target = whole.narrow(dim, start, part.shape[dim])
                target[..., : part.shape[-1]].copy_(part)


@contextmanager
def learned_layouts(
    model: nn.Module, tokens: int, head: nn.Module | None, logit_rows: int
) -> Iterator[dict[str, RowLayout]]:
    """The layouts of the modules that see the batch row by row, complete once a trial run of
    `tokens` tokens and `logit_rows` logit rows has ended.

    Those are modules with parameters and none below them, whose tensors all carry the tokens (the
    head's: the logit rows), and that compute each row from that row alone. `tokens` must be the
    size of nothing else in the model.
    """
    found: dict[str, RowLayout | None] = {}
    layouts: dict[str, RowLayout] = {}
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if _is_leaf(module) and not _EXPERT.search(path):
                rows = logit_rows if module is head else tokens

                def note(
                    module: nn.Module,
                    args: tuple[Any, ...],
                    kwargs: dict[str, Any],
                    output: Any,
                    path: str = path,
                    rows: int = rows,
                ) -> None:
                    layout = _layout(args, kwargs, output, rows)
                    if layout is not None and not _row_by_row(
                        module, layout, args, kwargs, output, rows
                    ):
                        layout = None
                    # A module that is called again must be called alike.
                    found[path] = layout if found.get(path, layout) == layout else None

                hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        yield layouts
        layouts.update({path: layout for path, layout in found.items() if layout is not None})


def widened(output: Tensor, features: int) -> Tensor:
    """The output with its last dimension filled up to `features` with zeros."""
    missing = features - output.shape[-1]
    return functional.pad(output, (0, missing)) if missing > 0 else output


def _is_leaf(module: nn.Module) -> bool:
    children = any(True for child in module.children() for _ in child.parameters())
    return not children and any(True for _ in module.parameters(recurse=False))


def _layout(
    args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, rows: int
) -> RowLayout | None:
    outputs = _as_tuple(output)
    values = [*args, *kwargs.values(), *outputs]
    dims = [_row_dim(value, rows) for value in values]
    tensors = [isinstance(value, Tensor) for value in values]
    if not any(tensors[: len(values) - len(outputs)]) or not tensors[-len(outputs)]:
        return None
    if any(is_tensor and dim is None for is_tensor, dim in zip(tensors, dims, strict=True)):
        return None
    named = dims[len(args) : len(args) + len(kwargs)]
    first = next(value for value in values if isinstance(value, Tensor))
    return RowLayout(
        inputs=tuple(dims[: len(args)]),
        keywords=dict(zip(kwargs, named, strict=True)),
        outputs=tuple(dims[len(values) - len(outputs) :]),
        flat=first.numel() == rows * first.shape[-1],
    )


def _row_dim(value: Any, rows: int) -> int | None:
    """The dimension of size `rows`, if there is exactly one."""
    if not isinstance(value, Tensor):
        return None
    dims = [dim for dim, size in enumerate(value.shape) if size == rows]
    return dims[0] if len(dims) == 1 else None


def _row_by_row(
    module: nn.Module,
    layout: RowLayout,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    rows: int,
) -> bool:
    """Whether the last row alone gives what it gave among the others."""
    inputs, named = layout.narrowed(args, kwargs, rows - 1, rows)
    try:
        alone = _as_tuple(module.forward(*inputs, **named))
    except (RuntimeError, ValueError, IndexError):
        return False  # It takes as many rows as there were, and no fewer.
    among = _as_tuple(output)
    if len(alone) != len(among):
        return False
    for part, whole, dim in zip(alone, among, layout.outputs, strict=True):
        if dim is None or not whole.is_floating_point():
            continue
        expected = whole.narrow(dim, rows - 1, 1).float()
        if part.shape != expected.shape:
            return False
        # Wide enough for any dtype's rounding; rows that look at others are off by far more.
        tolerance = 0.05 * expected.abs().max().clamp_min(1e-6)
        if not bool(((part.float() - expected).abs() <= tolerance).all()):
            return False
    return True


def _narrow(value: Any, dim: int | None, start: int, end: int) -> Any:
    return value if dim is None else value.narrow(dim, start, end - start)


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)
