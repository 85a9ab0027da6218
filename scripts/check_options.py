"""The options of a check."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from adapters.pickles import PICKLE_FILE
from api.archives import ARCHIVE_SUFFIXES
from api.settings import Settings, parse_size


def parse_options(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """What to check and how; exits with a message and status 2 on a bad value."""
    return _parser(description).parse_args(argv)


def _parser(description: str | None) -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="scripts/check_adapter",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "folder",
        type=Path,
        metavar="FOLDER",
        help=f"with {CONFIG_FILE} and {WEIGHTS_FILE}, or a {', '.join(ARCHIVE_SUFFIXES)} of it",
    )
    add(
        "--model",
        metavar="BASE",
        help=f"Hugging Face id or folder of the base (default: {default.model})",
    )
    add("--model-name", metavar="TEXT", help="the base's public name, if not the id or folder")
    add(
        "--convert",
        action="store_true",
        help=f"first write the folder's {PICKLE_FILE} as {WEIGHTS_FILE}, running nothing that is "
        "in it; without --model that is all",
    )
    add("--no-run", dest="run", action="store_false", help="check the files only, try nothing out")
    add("--allow-noop", action="store_true", help="accept an adapter that changes no output")
    add("--json", action="store_true", help="print the server's report as JSON")
    add("--tensors", action="store_true", help="list every tensor, not one line for all layers")
    add("--device", default=default.device, help=f"such as cuda:0 (default: {default.device})")
    add(
        "--dtype",
        default=default.dtype,
        choices=("float32", "bfloat16", "float16"),
        help=f"type of the base's weights, as the server has it (default: {default.dtype})",
    )
    add(
        "--max-rank",
        type=int,
        default=default.max_rank,
        metavar="N",
        help=f"largest rank that the server takes (default: {default.max_rank})",
    )
    add(
        "--adapter-memory",
        type=parse_size,
        default=default.adapter_memory,
        metavar="SIZE",
        help="device memory that the server has for adapters (default: 512MiB)",
    )
    return parser
