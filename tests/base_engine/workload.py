"""Adapters laid out in a buffer whose unused memory is NaN, beside their dense weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adapters.manifest import PAGE_RANK, BaseSpec, TargetSpec
from adapters.pages import PagedTarget, ResidentAdapter, page_elements
from base_engine.kernels.segments import Run


@dataclass(frozen=True)
class Dense:
    """One layer's LoRA: a [rank, in_features], b [out_features, rank], float32."""

    a: Tensor
    b: Tensor
    scale: float


def one_target(in_features: int, out_features: int, layers: int = 1) -> BaseSpec:
    modules = tuple(f"layers.{i}.proj" for i in range(layers))
    target = TargetSpec("proj", in_features, out_features, modules)
    return BaseSpec("base", vocab_size=32, max_positions=64, targets=(target,))


@dataclass
class Layout:
    """A pool in miniature: page slots of each target in random order, a gap after each page.

    Everything but the adapters' own numbers is NaN, the rows of a page past the layer's rank too
    (the pool zeroes those), so that whatever a kernel reads too much spoils its result.
    """

    base: BaseSpec
    dtype: torch.dtype = torch.float32
    slots: int = 64
    seed: int = 0
    buffer: Tensor = field(init=False)
    dense: dict[ResidentAdapter, dict[tuple[int, int], Dense]] = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        shuffle = random.Random(self.seed)
        self._free: list[list[int]] = []
        end = 3
        for target in self.base.targets:
            stride = page_elements(target) + 5
            offsets = [end + i * stride for i in range(self.slots)]
            end += self.slots * stride
            shuffle.shuffle(offsets)
            self._free.append(offsets)
        self.buffer = torch.full((end,), torch.nan, dtype=self.dtype)
        self.dense = {}

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers that the layout's dtype holds exactly, as float32."""
        return torch.randn(shape, generator=self._generator).to(self.dtype).float()

    def add(
        self, ranks: Sequence[int], scales: Sequence[float], target: int = 0
    ) -> ResidentAdapter:
        """A random adapter of one target, with a rank and a scale for each layer."""
        spec = self.base.targets[target]
        return self.add_dense(
            {
                (target, layer): Dense(
                    self.randn(rank, spec.in_features) * spec.in_features**-0.5,
                    self.randn(spec.out_features, rank),
                    scale,
                )
                for layer, (rank, scale) in enumerate(zip(ranks, scales, strict=True))
            }
        )

    def add_dense(self, modules: dict[tuple[int, int], Dense]) -> ResidentAdapter:
        """An adapter of the given (target, layer) weights, kept as the pool's dtype rounds them."""
        rounded = {
            at: Dense(d.a.to(self.dtype).float(), d.b.to(self.dtype).float(), d.scale)
            for at, d in modules.items()
        }
        targets = {}
        for index in sorted({target for target, _ in modules}):
            spec = self.base.targets[index]
            layers = [rounded.get((index, layer)) for layer in range(len(spec.modules))]
            ranks = tuple(0 if d is None else len(d.a) for d in layers)
            pages = tuple(self._free[index].pop() for _ in range(-(-max(ranks) // PAGE_RANK)))
            for number, page in enumerate(pages):
                self._fill(spec, page, number, layers)
            scales = tuple(0.0 if d is None else d.scale for d in layers)
            targets[index] = PagedTarget(pages, ranks, scales)
        adapter = ResidentAdapter(f"{len(self.dense):064x}", len(self.dense), targets)
        self.dense[adapter] = rounded
        return adapter

    def delta(self, runs: Sequence[Run], x: Tensor, target: int, layer: int) -> Tensor:
        """The dense formula, float64 [T, out_features]."""
        delta = torch.zeros(len(x), self.base.targets[target].out_features, dtype=torch.float64)
        for run in runs:
            rows = x[run.start : run.end].double()
            for adapter, weight in run.adapters:
                d = self.dense[adapter].get((target, layer))
                if d is not None:
                    product = (rows @ d.a.T.double()) @ d.b.T.double()
                    delta[run.start : run.end] += weight * d.scale * product
        return delta

    def _fill(self, spec: TargetSpec, page: int, number: int, layers: list[Dense | None]) -> None:
        sides = torch.split(
            self.buffer[page : page + page_elements(spec)],
            [len(layers) * PAGE_RANK * f for f in (spec.in_features, spec.out_features)],
        )
        for layer, d in enumerate(layers):
            for side, features in zip(sides, (spec.in_features, spec.out_features), strict=True):
                rows = side.view(len(layers), PAGE_RANK, features)[layer]
                if d is not None:
                    matrix = d.a if side is sides[0] else d.b.T
                    part = matrix[number * PAGE_RANK : (number + 1) * PAGE_RANK]
                    rows[: len(part)] = part


def alone(adapter: ResidentAdapter | None) -> tuple[tuple[ResidentAdapter, float], ...]:
    """What a run of one adapter with weight 1, or of the base, goes through."""
    return () if adapter is None else ((adapter, 1.0),)


def lengths_to_runs(parts: Sequence[tuple[int, ResidentAdapter | None]]) -> list[Run]:
    """Runs side by side from row 0 on."""
    runs, start = [], 0
    for rows, adapter in parts:
        runs.append(Run(start, start + rows, alone(adapter)))
        start += rows
    return runs
