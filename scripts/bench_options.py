"""The options of a serving measurement."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.load import Workload

WORKLOADS = "base,identical,distinct:8,uniform:64,zipf:64"

#: Option -> its value in a full run, and in a --quick one.
AMOUNTS: dict[str, tuple[Any, Any]] = {
    "requests": (24, 8),
    "rounds": (3, 1),
    "prompt": ((32, 256), (32, 64)),
    "output": ((32, 128), (16, 32)),
    "time_limit": (1800, 300),
}

REPORTED = ("url", "model", "server_flags", "clients", "rate", "seed", "timeout", *AMOUNTS)


def parse_options(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Every option settled: `adapters` are names. Exits with a message on a bad one (argparse)."""
    parser = _parser(description)
    options = parser.parse_args(argv)
    for name, (full, quick) in AMOUNTS.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    try:
        _settle_server(options)
    except (OSError, ValueError) as e:
        parser.error(str(e))
    return options


def adapters_used(options: argparse.Namespace) -> int:
    """How many adapters the workloads draw from."""
    workloads: Sequence[Workload] = options.workloads
    return max(workload.adapters for workload in workloads)


def title(options: argparse.Namespace) -> str:
    """What was asked for, in one line."""
    load = f"rate {options.rate:g}/s" if options.rate else f"clients {options.clients}"
    spans = {name: "–".join(map(str, getattr(options, name))) for name in ("prompt", "output")}
    return (
        f"rounds {options.rounds}, requests {options.requests} a run, {load}, prompt tokens "
        f"{spans['prompt']}, output tokens {spans['output']}, seed {options.seed}"
    )


def _settle_server(options: argparse.Namespace) -> None:
    """Turn --adapters into names. Raises ValueError for options that do not go together."""
    of_others = {name: getattr(options, name) for name in ("base_model", "adapters", "tokenizer")}
    of_ours = {"model": options.model, "server's own flags": options.server_flags}
    stray = [name for name, value in (of_ours if options.url else of_others).items() if value]
    if stray:
        clash = "not taken with --url" if options.url else "only taken with --url"
        raise ValueError(f"{', '.join(stray).replace('_', '-')}: {clash}")
    if options.url is None:
        return
    if options.base_model is None:
        raise ValueError("--url needs --base-model, the name that requests without adapter use")
    used, text = adapters_used(options), options.adapters or ""
    if Path(text).is_file():
        options.adapters = Path(text).read_text().split()
    elif "{" in text:
        try:
            options.adapters = [text.format(n) for n in range(used)]
        except (LookupError, ValueError) as e:
            raise ValueError(f"--adapters: {text!r} is no pattern such as r16-{{:02d}}") from e
    else:
        options.adapters = [text] if text else []
    if len(set(options.adapters)) < used:
        raise ValueError(
            f"--adapters names {len(set(options.adapters))} adapters, the workloads need {used}"
        )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_serving",
        description=description,
        usage="%(prog)s [options] [-- FLAGS OF scripts/serve]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(flag: str, help: str, **rest: Any) -> None:
        amounts = AMOUNTS.get(flag.removeprefix("--").replace("-", "_"))
        if amounts is not None:
            full, quick = (":".join(map(str, a)) if isinstance(a, tuple) else a for a in amounts)
            help += f" (default: {full}, quick: {quick})"
        elif rest.get("default") is not None:
            help += " (default: %(default)s)"
        parser.add_argument(flag, help=help, **rest)

    add(
        "--quick",
        "fewer and shorter requests: about five minutes on two CPU cores; a full run takes up to "
        "half an hour (--time-limit ends both)",
        action="store_true",
    )
    add(
        "--workloads",
        "base, identical, distinct:N, uniform:N, zipf:N, summed:N, with N the number of adapters",
        type=_workloads,
        default=WORKLOADS,
        metavar="LIST",
    )
    add("--clients", "that each send their next when one ends", type=_count, default=8, metavar="N")
    add("--rate", "send so many a second instead (Poisson)", type=_positive, metavar="R")
    add("--requests", "in one run of one workload", type=_count, metavar="N")
    add("--rounds", "runs of each workload", type=_count, metavar="N")
    add("--prompt", "tokens of a prompt", type=_range, metavar="LOW:HIGH")
    add("--output", "tokens of an answer", type=_range, metavar="LOW:HIGH")
    add("--seed", "equal seeds, equal requests", type=int, default=0, metavar="N")
    add("--time-limit", "seconds for all rounds", type=_positive, metavar="S")
    add("--timeout", "seconds for one request", type=_positive, default=300, metavar="S")
    add("--json", "write the figures of each run here too", type=Path, metavar="FILE")
    add("--model", "our own server's base (default: the demo base)", type=Path, metavar="FOLDER")
    add("--url", "measure the server at this root (without /v1)", metavar="URL")
    add("--base-model", "its name for the base", metavar="NAME")
    add(
        "--adapters", "its adapters: a file of names, or such as r16-{:02d}", metavar="FILE|PATTERN"
    )
    add("--tokenizer", "its tokenizer.json, for exact lengths", type=Path, metavar="FILE")
    parser.add_argument("server_flags", nargs="*", help=argparse.SUPPRESS)
    return parser


def _workloads(text: str) -> list[Workload]:
    try:
        found = [Workload.parse(part.strip()) for part in text.split(",")]
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text}: a workload comes twice")
    return found


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 100_000:
        raise argparse.ArgumentTypeError(f"{value} is not between 1 and 100000")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below 1000000")
    return value


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    span = _count(low), _count(high or low)
    if span[0] > span[1]:
        raise argparse.ArgumentTypeError(f"{text}: the low end comes first")
    return span
