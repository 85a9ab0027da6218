"""The options of a training."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

DEMO_BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class TrainingOptions:
    """`targets` are module names or ("all-linear",); `layers` None means every layer."""

    rank: int = 8
    alpha: int = 16
    targets: tuple[str, ...] = ("all-linear",)
    layers: tuple[int, ...] | None = None
    epochs: int = 6
    lr: float = 2e-3
    batch: int = 8
    seed: int = 0
    max_tokens: int = 512
    dtype: str = "bf16"


def parse_options(
    argv: Sequence[str] | None, description: str | None
) -> tuple[argparse.Namespace, TrainingOptions]:
    """`data`, `out`, `force` and `model`, and the options. Exits with a message on a bad one."""
    args = _parser(description).parse_args(argv)
    names = [field.name for field in fields(TrainingOptions)]
    return args, TrainingOptions(**{name: getattr(args, name) for name in names})


def _parser(description: str | None) -> argparse.ArgumentParser:
    default = TrainingOptions()
    parser = argparse.ArgumentParser(
        prog="scripts/train_persona",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(flag: str, help: str, shown: str = "", **rest: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        if hasattr(default, name):
            rest["default"] = getattr(default, name)
            help += f" (default: {shown or rest['default']})"
        parser.add_argument(flag, help=help, **rest)

    add("--data", "chats, JSONL", type=Path, required=True, metavar="FILE")
    add(
        "--out",
        "where the adapter goes; one that is there is replaced",
        type=Path,
        required=True,
        metavar="FOLDER",
    )
    add("--force", "take an --out that holds other files too", action="store_true")
    add("--model", f"Hugging Face id or folder of the base (default: {DEMO_BASE})", metavar="BASE")
    add("--rank", "of the adapter", type=_positive, metavar="N")
    add("--alpha", "the update is scaled by alpha / rank", type=_positive, metavar="N")
    add(
        "--targets",
        "linear layers to adapt, such as q_proj,v_proj, or all-linear",
        shown=",".join(default.targets),
        type=_names,
        metavar="NAMES",
    )
    add("--layers", "such as 10-29 or 0,5,7", shown="all", type=_layers, metavar="N-M")
    add("--epochs", "times that each chat is seen", type=_positive, metavar="N")
    add("--lr", "learning rate, above 0 and below 1", type=_rate, metavar="R")
    add("--batch", "chats in one step", type=_positive, metavar="N")
    add("--seed", "equal seeds, equal adapters", type=_seed, metavar="N")
    add("--max-tokens", "a longer chat is refused", type=_positive, metavar="N")
    add("--dtype", "of the saved weights: bf16, fp16 or fp32", choices=DTYPES, metavar="TYPE")
    return parser


def _positive(text: str) -> int:
    value = _whole(text)
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def _seed(text: str) -> int:
    value = _whole(text)
    if value is None or not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return value


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*-?[0-9]{1,19}\s*", text) else None


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and below 1")
    return value


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if "" in names:
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return names


def _layers(text: str) -> tuple[int, ...]:
    """`10-29`, `0,5,7` or both mixed."""
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not such as 10-29 or 0,5,7")
        span = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not span:
            raise argparse.ArgumentTypeError(f"{part} is an empty range")
        chosen.update(span)
    return tuple(sorted(chosen))
