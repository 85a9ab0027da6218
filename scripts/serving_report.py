"""What a measurement of serving found: medians over its rounds, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, quantiles
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scripts.load import Outcome

BASE = "base"

_REASONS_SHOWN = 5


@dataclass(frozen=True)
class Figures:
    """One run in numbers; failed requests count in `failures` alone. None: nothing to tell from."""

    requests: int
    failures: int
    seconds: float
    output_rate: float  # tokens/s
    total_rate: float  # tokens/s, prompts included
    ttft_p50: float | None  # this and what follows in seconds
    ttft_p95: float | None
    gap_p50: float | None
    gap_p95: float | None
    gap_p99: float | None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], seconds: float) -> Figures:
        good = [o for o in outcomes if o.error is None]
        output, prompt = sum(o.output_tokens for o in good), sum(o.prompt_tokens for o in good)
        ttfts = [o.ttft for o in good]
        gaps = [gap for o in good for gap in o.gaps]
        return cls(
            requests=len(outcomes),
            failures=len(outcomes) - len(good),
            seconds=seconds,
            output_rate=output / seconds,
            total_rate=(output + prompt) / seconds,
            ttft_p50=_percentile(ttfts, 50),
            ttft_p95=_percentile(ttfts, 95),
            gap_p50=_percentile(gaps, 50),
            gap_p95=_percentile(gaps, 95),
            gap_p99=_percentile(gaps, 99),
        )


@dataclass(frozen=True)
class StepFigures:
    """A run's forward passes: how many there are records of, how many different adapters one held
    on average (the base is none), and the median time of one in seconds."""

    steps: int
    adapters: float
    seconds: float

    @classmethod
    def of(cls, steps: Sequence[dict[str, Any]]) -> StepFigures | None:
        """From records as GET /v1/engine/steps has them; None without any."""
        if not steps:
            return None
        held = [len(step["tokens"].keys() - {BASE}) for step in steps]
        return cls(len(steps), fmean(held), median(step["seconds"] for step in steps))


@dataclass
class Report:
    """Filled run by run; `workloads` are the rows. `cut` names the run that the time limit ended,
    which counts for nothing but its failures."""

    workloads: Sequence[str]
    cut: str | None = None
    failures: Counter[str] = field(default_factory=Counter)
    _runs: dict[str, list[tuple[Figures, StepFigures | None]]] = field(default_factory=dict)

    def add(self, workload: str, figures: Figures, steps: StepFigures | None) -> None:
        self._runs.setdefault(workload, []).append((figures, steps))

    def add_failures(self, workload: str, outcomes: Sequence[Outcome]) -> None:
        self.failures.update(f"{workload}: {o.error}" for o in outcomes if o.error)

    @property
    def complete(self) -> bool:
        """Whether no request failed and every workload was run at least once."""
        return not self.failures and all(self._runs.get(name) for name in self.workloads)

    def row(self, workload: str) -> dict[str, float | None]:
        """Medians over the runs of `workload`; None where there is nothing to tell from.

        `ratio` is the median of the output rate over the base's in the same round.
        """
        runs = self._runs.get(workload, [])
        names = [name for name in Figures.__dataclass_fields__ if name != "failures"]
        row = {name: _median([getattr(figures, name) for figures, _ in runs]) for name in names}
        pairs = zip(runs, self._runs.get(BASE, []), strict=False)
        ratios = [f.output_rate / b.output_rate for (f, _), (b, _) in pairs if b.output_rate]
        return row | {
            "ratio": _median(ratios),
            "failures": sum(figures.failures for figures, _ in runs),
            "adapters_per_step": _median([s.adapters for _, s in runs if s]),
            "step_seconds": _median([s.seconds for _, s in runs if s]),
        }

    def to_json(self) -> dict[str, Any]:
        """Rows of medians, every run, and failures with their counts. Times are in seconds."""
        return {
            "rows": [
                {
                    "workload": name,
                    **self.row(name),
                    "runs": [
                        asdict(figures) | {"steps": steps and asdict(steps)}
                        for figures, steps in self._runs.get(name, [])
                    ],
                }
                for name in self.workloads
            ],
            "cut_by_time_limit": self.cut,
            "failures": dict(self.failures),
        }

    def print(self, title: str) -> None:
        """The table and what went wrong, to standard output."""
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 120
        table = Table(title=escape(title), title_justify="left")
        for heading in _HEADINGS:
            table.add_column(heading, justify="left" if heading == "workload" else "right")
        for name in self.workloads:
            table.add_row(name, *_cells(self.row(name)))
        console.print(table)
        if self.cut is not None:
            runs = len(self._runs.get(self.workloads[-1], []))
            text = f"The time limit ended the run of {self.cut}; there are {runs} whole rounds."
            console.print(text, style="yellow", markup=False)
        for reason, count in self.failures.most_common(_REASONS_SHOWN):
            console.print(f"failed ({count}×): {reason}", style="red", markup=False)
        if (more := len(self.failures) - _REASONS_SHOWN) > 0:
            console.print(f"… and {more} other reasons", style="red", markup=False)


_HEADINGS = (
    "workload",
    "output\ntok/s",
    "total\ntok/s",
    "ratio\nto base",
    "TTFT, ms\np50 / p95",
    "between tokens, ms\np50 / p95 / p99",
    "adapters\nper step",
    "step,\nms",
    "failed",
)


def _cells(row: dict[str, float | None]) -> list[str]:
    def number(name: str, digits: int, factor: float = 1.0) -> str:
        value = row[name]
        return "–" if value is None else f"{value * factor:.{digits}f}"

    return [
        number("output_rate", 1),
        number("total_rate", 1),
        number("ratio", 2),
        " / ".join(number(f"ttft_p{p}", 0, 1000) for p in (50, 95)),
        " / ".join(number(f"gap_p{p}", 0, 1000) for p in (50, 95, 99)),
        number("adapters_per_step", 2),
        number("step_seconds", 1, 1000),
        number("failures", 0),
    ]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """Interpolated between the closest ranks."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]
