"""The torch kernel against the fp32 reference, and the reference against the dense formula."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adapters.manifest import BaseSpec, TargetSpec
from adapters.pages import ResidentAdapter
from base_engine.kernels.cpu import add_lora_cpu
from base_engine.kernels.dispatch import add_lora
from base_engine.kernels.reference import add_lora_reference
from base_engine.kernels.segments import Run, Segments, TargetSegments
from tests.base_engine.workload import Layout, alone, lengths_to_runs, one_target

RANKS = [1, 2, 3, 5, 7, 8, 16, 17, 31, 32, 48, 64]
#: (atol, rtol): one rounding of y to its dtype, beside sums of a few thousand products.
TOLERANCE = {
    torch.float32: (2e-5, 1e-5),
    torch.bfloat16: (2e-2, 8e-3),
    torch.float16: (2e-3, 1e-3),
}
Kernel = Callable[[Tensor, Tensor, Tensor, TargetSegments, int], None]


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)


def assigned(popularity: str, rows: int, adapters: list[ResidentAdapter]) -> list[Run]:
    """One run per row, its adapter drawn as the workload's name says, sorted by adapter."""
    draw = random.Random(rows)
    count = len(adapters)
    numbers = {
        "identical": [0] * rows,
        "distinct": [i % count for i in range(rows)],
        "uniform": draw.choices(range(count), k=rows),
        "zipf": draw.choices(range(count), [1 / (i + 1) ** 1.5 for i in range(count)], k=rows),
        "skewed": [0] * (rows - 1) + [count - 1],
    }[popularity]
    return [Run(i, i + 1, alone(adapters[n])) for i, n in enumerate(sorted(numbers))]


def mixed(layout: Layout) -> list[tuple[int, ResidentAdapter | None]]:
    """Every rank in one batch, base rows between, segments of equal shape apart from each other."""
    draw = random.Random(1)
    parts: list[tuple[int, ResidentAdapter | None]] = [(3, None)]
    for rank in RANKS:
        adapter = layout.add([rank], [draw.uniform(-2, 2)])
        parts += [(draw.choice([1, 1, 2, 6]), adapter), (draw.choice([0, 1]), None)]
        parts += [(1, layout.add([rank], [0.5]))]
    return parts


@pytest.mark.parametrize("kernel", [add_lora_reference, add_lora_cpu])
@pytest.mark.parametrize("rows", [1, 3, 7, 63, 133])
@pytest.mark.parametrize("popularity", ["identical", "distinct", "uniform", "zipf", "skewed"])
def test_each_row_gets_its_own_adapter(kernel: Kernel, popularity: str, rows: int) -> None:
    layout = Layout(one_target(40, 24))
    adapters = [layout.add([rank], [0.5 + rank / 8]) for rank in RANKS]
    runs = assigned(popularity, rows, adapters)
    x, y = layout.randn(rows, 40), layout.randn(rows, 24)
    expected = y.double() + layout.delta(runs, x, 0, 0)
    target = Segments.build(runs, layout.base, "cpu").targets[0][0]
    kernel(y, x, layout.buffer, target, 0)
    assert_close(y, expected, torch.float32)


@pytest.mark.parametrize("kernel", [add_lora_reference, add_lora_cpu])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_all_ranks_in_one_batch_beside_base_rows(kernel: Kernel, dtype: torch.dtype) -> None:
    layout = Layout(one_target(72, 40), dtype, slots=128)
    runs = lengths_to_runs(mixed(layout))
    x, y = (layout.randn(runs[-1].end, n).to(dtype) for n in (72, 40))
    before = y.clone()
    expected = y.double() + layout.delta(runs, x, 0, 0)
    target = Segments.build(runs, layout.base, "cpu").targets[0][0]
    kernel(y, x, layout.buffer, target, 0)
    assert_close(y, expected, dtype)
    base_rows = [r for run in runs if not run.adapters for r in range(run.start, run.end)]
    assert torch.equal(y[base_rows], before[base_rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_the_sum_once(dtype: torch.dtype) -> None:
    """Adding page by page, or rounding the delta first, drifts away from the exact sum."""
    layout = Layout(one_target(64, 64), dtype)
    adapter = layout.add([64], [1.0])
    for runs in (
        [Run(0, 9, alone(adapter))],
        [Run(0, 4, alone(adapter)), Run(5, 9, alone(adapter))],
    ):
        x, y = layout.randn(9, 64).to(dtype), layout.randn(9, 64).to(dtype)
        exact = (y.double() + layout.delta(runs, x, 0, 0)).to(dtype)
        target = Segments.build(runs, layout.base, "cpu").targets[0][0]
        add_lora_cpu(y, x, layout.buffer, target, 0)
        assert (y != exact).float().mean() < 0.01  # fp32 sums next to a rounding boundary


def test_activations_and_pool_may_differ_in_dtype() -> None:
    layout = Layout(one_target(16, 24), torch.bfloat16)
    runs = [Run(0, 5, alone(layout.add([11], [1.5])))]
    x, y = torch.randn(5, 16), torch.randn(5, 24)
    expected = y.double() + layout.delta(runs, x, 0, 0)
    target = Segments.build(runs, layout.base, "cpu").targets[0][0]
    add_lora_cpu(y, x, layout.buffer, target, 0)
    assert_close(y, expected, torch.float32)


@pytest.mark.parametrize("kernel", [add_lora_reference, add_lora_cpu])
def test_each_layer_has_its_own_rank_scale_and_weights(kernel: Kernel) -> None:
    layout = Layout(one_target(24, 32, layers=5))
    first = layout.add([17, 0, 3, 8, 8], [0.5, 9.0, -2.0, 0.0, 6.0])
    second = layout.add([2, 5, 0, 8, 8], [1.0, 2.0, 3.0, 4.0, 5.0])
    runs = lengths_to_runs([(2, first), (2, second), (1, None)])
    target = Segments.build(runs, layout.base, "cpu").targets[0][0]
    for layer in range(5):
        x, y = layout.randn(5, 24), layout.randn(5, 32)
        expected = y.double() + layout.delta(runs, x, 0, layer)
        kernel(y, x, layout.buffer, target, layer)
        assert_close(y, expected, torch.float32)


def test_order_of_adapters_changes_no_row() -> None:
    """Equal adapters only partly adjacent, in every order, against each one alone."""
    layout = Layout(one_target(32, 48))
    a, b, c = (layout.add([rank], [scale]) for rank, scale in ((8, 1.0), (8, 2.0), (5, 0.5)))
    requests = [(1, a), (17, a), (4, b), (9, None), (4, c)]
    inputs = [layout.randn(rows, 32) for rows, _ in requests]
    outputs = [layout.randn(rows, 48) for rows, _ in requests]
    solo = [y.clone() for y in outputs]
    for (rows, adapter), x, y in zip(requests, inputs, solo, strict=True):
        segments = Segments.build([Run(0, rows, alone(adapter))], layout.base, "cpu")
        if adapter is not None:
            add_lora(y, x, layout.buffer, segments.targets[0][0], 0)
    for order in itertools.permutations(range(len(requests))):
        runs = lengths_to_runs([requests[i] for i in order])
        x, y = torch.cat([inputs[i] for i in order]), torch.cat([outputs[i] for i in order])
        add_lora(y, x, layout.buffer, Segments.build(runs, layout.base, "cpu").targets[0][0], 0)
        for i, part in zip(order, torch.split(y, [requests[i][0] for i in order]), strict=True):
            torch.testing.assert_close(part, solo[i], atol=1e-5, rtol=1e-5)
            if requests[i][1] is None:
                assert torch.equal(part, outputs[i])


def test_rows_of_a_long_prompt_do_not_depend_on_how_it_is_cut() -> None:
    layout = Layout(one_target(64, 32))
    adapter, mate = layout.add([16], [2.0]), layout.add([16], [-1.0])
    x, y = layout.randn(100, 64), layout.randn(100, 32)
    whole = y.clone()
    runs = [Run(0, 100, alone(adapter))]
    add_lora(whole, x, layout.buffer, Segments.build(runs, layout.base, "cpu").targets[0][0], 0)
    start = 0
    for rows in (15, 16, 17, 33, 1, 18):
        runs = lengths_to_runs([(rows, mate), (rows, adapter)])
        chunk = y[start : start + rows]
        step = torch.cat([chunk, chunk])
        inputs = x[start : start + rows].repeat(2, 1)
        target = Segments.build(runs, layout.base, "cpu").targets[0][0]
        add_lora(step, inputs, layout.buffer, target, 0)
        torch.testing.assert_close(step[rows:], whole[start : start + rows], atol=1e-5, rtol=1e-5)
        start += rows


def test_adjacent_runs_of_one_adapter_are_one_segment() -> None:
    layout = Layout(one_target(8, 8))
    a, b = layout.add([4], [1.0]), layout.add([4], [1.0])
    runs = [
        Run(4, 6, alone(b)),
        Run(0, 1, alone(a)),
        Run(1, 4, alone(a)),
        Run(6, 6, alone(a)),
        Run(6, 7, alone(b)),
        Run(9, 10, alone(b)),
    ]
    segments = Segments.build(runs, layout.base, "cpu").targets[0][0].segments
    assert [(s.start, s.end) for s in segments] == [(0, 4), (4, 7), (9, 10)]


def test_targets_that_no_row_adapts_are_absent() -> None:
    specs = tuple(TargetSpec(name, 8, 8, (f"{name}.0",)) for name in ("q", "k", "v"))
    layout = Layout(BaseSpec("base", 32, 64, specs))
    adapter = layout.add([4], [1.0], target=2)
    runs = lengths_to_runs([(2, None), (1, adapter)])
    assert list(Segments.build(runs, layout.base, "cpu").targets) == [2]
    assert not Segments.build([Run(0, 5, ())], layout.base, "cpu").targets
    assert not Segments.build([], layout.base, "cpu").targets


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((0, 4), (3, 5), r"runs \[0, 4\) and \[3, 5\) share rows"),
        ((0, 4), (5, 4), r"\[5, 4\) is not a range"),
        ((-1, 4), (4, 5), r"\[-1, 4\) is not a range"),
    ],
)
def test_impossible_runs_are_refused(
    first: tuple[int, int], second: tuple[int, int], message: str
) -> None:
    layout = Layout(one_target(8, 8))
    adapter = layout.add([4], [1.0])
    with pytest.raises(ValueError, match=message):
        Segments.build([Run(*first, alone(adapter)), Run(*second, ())], layout.base, "cpu")


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ((3, 8), (3, 6), "reach row 4, but there are 3 rows"),
        ((4, 7), (4, 6), r"takes x \[rows, 8\]"),
        ((4, 8), (4, 8), r"y \[rows, 6\]"),
        ((5, 8), (4, 6), r"not \[5, 8\] and \[4, 6\]"),
    ],
)
def test_tensors_that_do_not_fit_the_target_are_refused(
    x: tuple[int, int], y: tuple[int, int], message: str
) -> None:
    layout = Layout(one_target(8, 6))
    target = Segments.build([Run(0, 4, alone(layout.add([4], [1.0])))], layout.base, "cpu").targets[
        0
    ][0]
    with pytest.raises(ValueError, match=message):
        add_lora(torch.zeros(y), torch.zeros(x), layout.buffer, target, 0)


def test_device_tables_describe_the_segments() -> None:
    layout = Layout(one_target(8, 8, layers=2))
    a, b = layout.add([9, 0], [1.0, 0.0]), layout.add([3, 4], [0.5, 2.0])
    runs = lengths_to_runs([(1, None), (100, a), (2, b)])
    tables = Segments.build(runs, layout.base, "cpu").targets[0][0].tables
    pages = [list(a.targets[0].pages), [b.targets[0].pages[0], -1]]
    assert tables.pages.tolist() == pages and tables.pages.dtype == torch.int64
    assert tables.tile_rows == 64
    assert tables.tiles.tolist() == [[0, 1, 101], [0, 65, 101], [1, 101, 103]]
    assert tables.ranks.tolist() == [[9, 0], [3, 4]]
    assert tables.scales.tolist() == [[1.0, 0.0], [0.5, 2.0]]
