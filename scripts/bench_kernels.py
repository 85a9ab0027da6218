"""Times the LoRA kernel beside the base's linears and beside a plain loop, in one interleaved run.

    scripts/bench_kernels --rank 16 --threads 2

Each line is one step over every adapted linear of a model: the base's products alone, one pair of
multiplications per page and segment, and `add_lora`. The floor is the time that reading the
adapters' weights once takes at the read speed measured in the same rounds. Ratios within one run
hold on a busy machine; milliseconds do not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from adapters.manifest import PAGE_RANK, BaseSpec, TargetSpec
from adapters.pages import PagedTarget, ResidentAdapter, page_elements
from base_engine.kernels.dispatch import add_lora
from base_engine.kernels.segments import Run, Segments

#: SmolLM2-135M's adapted linears: name -> (in_features, out_features).
LINEARS = {
    "q_proj": (576, 576),
    "k_proj": (576, 192),
    "v_proj": (576, 192),
    "o_proj": (576, 576),
    "gate_proj": (576, 1536),
    "up_proj": (576, 1536),
    "down_proj": (1536, 576),
}
WORKLOADS = ("identical", "distinct", "half-base")


@dataclass(frozen=True)
class Bench:
    """Weights of one base and a buffer full of adapters, on one device in one dtype."""

    base: BaseSpec
    weights: list[Tensor]
    buffer: Tensor
    adapters: list[ResidentAdapter]

    @classmethod
    def build(cls, layers: int, rank: int, count: int, dtype: torch.dtype, device: str) -> Bench:
        base = BaseSpec(
            "bench",
            vocab_size=1,
            max_positions=1,
            targets=tuple(
                TargetSpec(name, *sizes, tuple(f"{name}.{i}" for i in range(layers)))
                for name, sizes in LINEARS.items()
            ),
        )
        weights = [
            torch.randn(layers, t.out_features, t.in_features, dtype=dtype, device=device)
            for t in base.targets
        ]
        adapters, end = [], 0
        for number in range(count):
            targets = {}
            for index, target in enumerate(base.targets):
                size = page_elements(target)
                pages = tuple(end + i * size for i in range(-(-rank // PAGE_RANK)))
                end += len(pages) * size
                targets[index] = PagedTarget(pages, (rank,) * layers, (0.5,) * layers)
            adapters.append(ResidentAdapter(str(number), number, targets))
        return cls(base, weights, torch.randn(end, dtype=dtype, device=device), adapters)

    def runs(self, workload: str, rows: int, prompt: int) -> list[Run]:
        """`rows` sequences of `prompt` tokens each, sorted by adapter, base rows last."""
        own = {"identical": [0] * rows, "distinct": range(rows), "half-base": range(rows // 2)}
        numbers: list[int | None] = [*own[workload]]
        numbers += [None] * (rows - len(numbers))
        return [
            Run(i * prompt, (i + 1) * prompt, () if n is None else ((self.adapters[n], 1.0),))
            for i, n in enumerate(numbers)
        ]

    def linears(self, xs: list[Tensor]) -> None:
        for x, weights in zip(xs, self.weights, strict=True):
            for weight in weights:
                functional.linear(x, weight)

    def loop(self, runs: list[Run], xs: list[Tensor], ys: list[Tensor]) -> None:
        segments = Segments.build(runs, self.base, xs[0].device)
        for index, (target,) in enumerate(segments.targets.values()):
            x, y, spec = xs[index], ys[index], target.spec
            for layer in range(len(spec.modules)):
                for s in target.segments:
                    for page in s.pages.pages:
                        a = self._rows(page + target.a_offset(layer), spec.in_features)
                        b = self._rows(page + target.b_offset(layer), spec.out_features)
                        rows = slice(s.start, s.end)
                        y[rows].addmm_(x[rows] @ a.T, b, alpha=s.pages.scales[layer])

    def ours(self, runs: list[Run], xs: list[Tensor], ys: list[Tensor]) -> None:
        for index, (target,) in Segments.build(runs, self.base, xs[0].device).targets.items():
            for layer in range(len(target.spec.modules)):
                add_lora(ys[index], xs[index], self.buffer, target, layer)

    def _rows(self, offset: int, features: int) -> Tensor:
        return self.buffer[offset : offset + PAGE_RANK * features].view(PAGE_RANK, features)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    bench = Bench.build(options.layers, options.rank, max(options.rows), dtype, options.device)
    adapter_bytes = bench.buffer.nbytes / len(bench.adapters)
    print(
        f"{options.layers} layers, rank {options.rank}, {options.dtype}, {options.threads} threads"
        f", {options.prompt} rows a sequence; median ms of {options.rounds} rounds"
    )
    print(
        f"{'sequences':>9} {'workload':>10} {'base':>8} {'loop':>8} {'ours':>8} {'floor':>8} "
        f"{'loop/ours':>9} {'ours/floor':>10} {'ours/base':>9}"
    )
    for rows in options.rows:
        tokens = rows * options.prompt
        xs, ys = (
            [torch.randn(tokens, n, dtype=dtype, device=options.device) for n in sizes]
            for sizes in zip(*LINEARS.values(), strict=True)
        )
        for workload in WORKLOADS:
            runs = bench.runs(workload, rows, options.prompt)
            distinct = len({run.adapters for run in runs} - {()})
            base, loop, ours, read = _interleaved(
                options.rounds,
                lambda xs=xs: bench.linears(xs),  # type: ignore[misc]
                lambda runs=runs, xs=xs, ys=ys: bench.loop(runs, xs, ys),  # type: ignore[misc]
                lambda runs=runs, xs=xs, ys=ys: bench.ours(runs, xs, ys),  # type: ignore[misc]
                lambda: bench.buffer.sum(),
            )
            floor = read * distinct * adapter_bytes / bench.buffer.nbytes
            print(
                f"{rows:>9} {workload:>10} {base:8.1f} {loop:8.1f} {ours:8.1f} {floor:8.1f} "
                f"{loop / ours:9.2f} {_ratio(ours, floor)} {ours / base:9.2f}",
                flush=True,
            )


def _interleaved(rounds: int, *steps: Callable[[], object]) -> list[float]:
    """Median milliseconds of each step, after one round to warm up."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds + 1):
        for step, taken in zip(steps, times, strict=True):
            _wait()
            started = time.perf_counter()
            step()
            _wait()
            taken.append(1e3 * (time.perf_counter() - started))
    return [median(taken[1:]) for taken in times]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _ratio(ours: float, floor: float) -> str:
    return f"{ours / floor:10.2f}" if floor else f"{'-':>10}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32], help="sequences")
    parser.add_argument("--prompt", type=int, default=1, help="rows a sequence (1: decode)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    for name in ("prompt", "rank", "layers", "rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(options, name)}")
    if min(options.rows) < 1:
        parser.error(f"--rows must be at least 1, not {min(options.rows)}")
    return options


if __name__ == "__main__":
    with torch.inference_mode():
        main()
