"""What a step's adapters do besides LoRA, applied at the modules and to the rows concerned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adapters.manifest import BaseSpec
from adapters.pages import ResidentAdapter
from adapters.terms import (
    Affine,
    EmbeddingDelta,
    ParameterDelta,
    ReplacedRows,
    Replacement,
    Term,
)
from base_engine.exchange import forward_exchanged
from base_engine.kernels.segments import Run, Segments
from base_engine.lora_linear import LoraBinding, LoraLinear
from base_engine.model import Decoder
from base_engine.row_layout import widened


class StepTerms:
    """The terms of one step's adapters, by module.

    While `attached`, hooks sit on exactly the modules that an adapter of the step has terms for,
    and each changes the rows of those adapters alone.
    """

    def __init__(
        self, base: BaseSpec, rows: Mapping[str, list[_Rows]], head: Sequence[_Rows], width: int
    ) -> None:
        """`head` are the adapters of the logit rows, terms or not; `width` that of the logits."""
        self._base = base
        self._rows = rows
        self._head = head
        self._width = width

    @classmethod
    def build(
        cls, runs: Iterable[Run], head_runs: Iterable[Run], base: BaseSpec
    ) -> StepTerms | None:
        """The terms of a step's runs over its tokens and over its logit rows, each in row order.

        None: no adapter of the step has terms.
        """
        tokens = _adapter_rows(runs)
        if not any(rows.adapter.terms for rows in tokens):
            return None
        head = _adapter_rows(head_runs)
        by_module: dict[str, list[_Rows]] = {}
        for seen, is_head in ((tokens, False), (head, True)):
            for rows in seen:
                for path in rows.adapter.terms:
                    if (path == base.output_module) == is_head:
                        by_module.setdefault(path, []).append(rows)
        width = max([base.vocab_size, *(rows.adapter.vocab_size for rows in head)])
        return cls(base, by_module, head, width)

    @contextmanager
    def attached(self, decoder: Decoder) -> Iterator[None]:
        """The decoder's next forward is this step's. Raises KeyError for terms at a module that
        does not see the batch row by row."""
        with ExitStack() as hooks:
            for path, rows in self._rows.items():
                width = self._width if path == self._base.output_module else 0
                touched = _Touched(path, rows, decoder, width)
                module = decoder.model.get_submodule(path)
                if path == self._base.embedding:
                    before = module.register_forward_pre_hook(touched.before, with_kwargs=True)
                    hooks.callback(before.remove)
                after = module.register_forward_hook(touched.after, with_kwargs=True)
                hooks.callback(after.remove)
            yield

    def hide_foreign_tokens(self, logits: Tensor) -> None:
        """Sets logits [R, width] beyond each row's own vocabulary to -inf, in place."""
        if self._width == self._base.vocab_size:
            return
        own = torch.full((len(logits),), self._base.vocab_size)
        for rows in self._head:
            if rows.adapter.vocab_size:
                own[rows.start : rows.end] = rows.adapter.vocab_size
        beyond = torch.arange(logits.shape[1])[None, :] >= own[:, None]
        logits.masked_fill_(beyond.to(logits.device), -torch.inf)


@dataclass
class _Rows:
    """Rows [start, end) of a step, which go through one adapter."""

    start: int
    end: int
    adapter: ResidentAdapter
    alone: LoraBinding | None = None

    def binding(self, decoder: Decoder) -> LoraBinding:
        """What a linear reads that is fed these rows alone."""
        if self.alone is None:
            run = Run(0, self.end - self.start, ((self.adapter, 1.0),))
            segments = Segments.build([run], decoder.spec, decoder.device)
            self.alone = LoraBinding(decoder.binding.buffer, segments, segments)
        return self.alone


def _adapter_rows(runs: Iterable[Run]) -> list[_Rows]:
    """Adapter by adapter, adjacent rows in one; compositions have no terms, and are left out."""
    found: list[_Rows] = []
    for run in runs:
        if len(run.adapters) == 1 and run.end > run.start:
            adapter = run.adapters[0][0]
            if found and found[-1].adapter is adapter and found[-1].end == run.start:
                found[-1].end = run.end
            else:
                found.append(_Rows(run.start, run.end, adapter))
    return found


class _Touched:
    """One module during a step in which some rows get from it what the base does not give."""

    def __init__(self, path: str, rows: Sequence[_Rows], decoder: Decoder, width: int) -> None:
        self._path = path
        self._rows = rows
        self._decoder = decoder
        self._width = width
        self._layout = decoder.layouts[path]
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Ids that only an adapter has never reach the base's table."""
        self._inputs = args, kwargs
        last = self._decoder.spec.vocab_size - 1
        return tuple(ids.clamp(max=last) for ids in args), kwargs

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        args, kwargs = self._inputs or (args, kwargs)
        if self._width:
            output = widened(output, self._width)
        for rows in self._rows:
            inputs = self._layout.narrowed(args, kwargs, rows.start, rows.end)
            self._change(module, rows, inputs, output)
        return output

    def _change(
        self,
        module: nn.Module,
        rows: _Rows,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        output: Any,
    ) -> None:
        args, kwargs = inputs
        terms = rows.adapter.terms[self._path]
        weights: list[Replacement | ParameterDelta] = []
        outputs: list[Term] = []
        for term in terms:
            if isinstance(term, Replacement | ParameterDelta) and not _adds_up(term, module):
                weights.append(term)
            else:
                outputs.append(term)
        if weights:
            binding = rows.binding(self._decoder) if isinstance(module, LoraLinear) else None
            result = forward_exchanged(module, weights, args, kwargs, binding)
            self._layout.write(output, result, rows.start)
        if outputs:
            y = self._layout.rows_of(output, rows.start, rows.end)
            for term in outputs:
                if isinstance(module, nn.Embedding):
                    _change_embedded(term, module, args[0], y)
                else:
                    _change_projected(term, module, args[0], y)


def _adds_up(term: Term, module: nn.Module) -> bool:
    """Whether it is the change of a weight that can be added to the output, at less cost."""
    linear = isinstance(module, LoraLinear) and not module.transposed
    return isinstance(term, ParameterDelta) and (linear or isinstance(module, nn.Embedding))


def _change_embedded(term: Term, embedding: nn.Embedding, ids: Tensor, y: Tensor) -> None:
    """Changes the embeddings y [..., hidden] of `ids` [...] in place."""
    match term:
        case EmbeddingDelta(scale, a, b, gain):
            y.add_((functional.embedding(ids, a) @ b) * scale * _factor(embedding, y.dtype))
            if gain is not None:
                y.mul_(gain)
        case ParameterDelta(_, scale, _, a, b):
            # The rows of B belong to the ids.
            _change_embedded(EmbeddingDelta(scale, b[0], a[0]), embedding, ids, y)
        case ReplacedRows(indices, rows):
            same = ids[..., None] == torch.tensor(indices, device=ids.device)
            own = rows[same.byte().argmax(-1)] * _factor(embedding, y.dtype)
            y.copy_(torch.where(same.any(-1, keepdim=True), own, y))


def _change_projected(term: Term, linear: nn.Module, x: Tensor, y: Tensor) -> None:
    """Changes a linear's output y [..., out] for x [..., in] in place; a term of fewer outputs
    than y (whose width is that of the step's largest vocabulary) changes the first."""
    match term:
        case Affine(gain, shift):
            if gain is not None:
                y[..., : len(gain)].mul_(gain)
            if shift is not None:
                y[..., : len(shift)].add_(shift)
        case ParameterDelta(_, scale, _, a, b):
            y[..., : b.shape[1]].add_((x @ a[0].T) @ b[0].T, alpha=scale)
        case ReplacedRows(indices, rows):
            # PEFT multiplies by the head's weight alone, whatever bias the head has.
            bias = getattr(linear, "bias", None)
            if bias is not None:
                y[..., : len(bias)].sub_(bias)
            y.index_copy_(-1, torch.tensor(indices, device=y.device), functional.linear(x, rows))


def _factor(embedding: nn.Module, dtype: torch.dtype) -> Tensor | float:
    """What an embedding multiplies its output by, as Gemma's does."""
    factor: Tensor | float = getattr(embedding, "embed_scale", 1.0)
    return factor.to(dtype) if isinstance(factor, Tensor) else factor
