"""An adapter's report for people, on a terminal or in a log."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from adapters.report import Report

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def show_report(report: Report, console: Console, *, all_tensors: bool = False) -> None:
    """The summary, why it is refused, and the tensors: one line for those that differ in the layer
    only, or for each one."""
    summary = Table.grid(padding=(0, 2))
    for name, value in _summary(report):
        summary.add_row(name, Text(value))
    console.print(summary)
    for violation in report["violations"]:
        line = f"refused  {violation['subject']}: {violation['message']} [{violation['code']}]"
        _print(console, line, "red")
    for warning in report["warnings"]:
        _print(console, f"warning  {warning}", "yellow")
    for finding in report["tokenizer"]:
        _print(console, f"tokenizer  {finding}")
    for line in _tensors(report, all_tensors):
        _print(console, line)
    if report["tensors_left_out"]:
        _print(console, f"and {report['tensors_left_out']} more tensors")


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _summary(report: Report) -> Iterator[tuple[str, str]]:
    """The rows of the summary; what is not known has none."""
    for module in report["modules"]:
        rank, scale = _span(module["rank"]), _span(module["scale"])
        yield "modules", f"{module['count']} × {module['name']}, rank {rank}, scale {scale}"
    if report["features"]:
        yield "features", ", ".join(report["features"])
    if report["bytes"] is not None:
        dtypes = ", ".join(report["dtypes"])
        yield "file", f"{report['parameters']} parameters, {_size(report['bytes'])}, {dtypes}"
    if report["device_bytes"] is not None:
        pages = f"{report['pages']} page{'s' if report['pages'] != 1 else ''}"
        yield "on the device", f"{_size(report['device_bytes'])} with {pages}"
    if report["effect"] is not None:
        yield "effect", f"changes a logit by up to {report['effect']:.4g}"
    counts = report["tensor_counts"].items()
    yield "tensors", ", ".join(f"{count} {status}" for status, count in counts if count) or "none"


def _span(span: dict[str, float]) -> str:
    low, high = f"{span['min']:g}", f"{span['max']:g}"
    return low if low == high else f"{low} to {high}"


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 10_000 else f"{count} bytes"


def _tensors(report: Report, each: bool) -> Iterator[str]:
    lines = Counter(_line(tensor, each) for tensor in report["tensors"])
    for line, count in lines.items():
        yield line if each else f"{count:4} × {line}"


def _line(tensor: Report, whole: bool) -> str:
    line = f"{tensor['name']} {tensor['shape']} {tensor['dtype']}  {tensor['status']}"
    if whole:
        return ": ".join(filter(None, (line, tensor["as"], tensor["reason"])))
    # An applied tensor is what its name says, and why one is refused stands above.
    if tensor["status"] in ("mapped", "unused"):
        line = ": ".join(filter(None, (line, tensor["as"], tensor["reason"])))
    return _NUMBER.sub("*", line)
