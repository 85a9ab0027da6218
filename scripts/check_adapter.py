"""Check an adapter as the server does when it is uploaded, and tell tensor by tensor.

It is checked against the base, then tried out on a few prompts. Exit status: 0 it would be
accepted, 1 it would be refused, 2 it could not be checked.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from adapters.errors import AdapterError, AdapterRejected, Violation
from adapters.foreign import MLX_WEIGHTS_FILE
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from adapters.peft_files import read_header
from adapters.pickles import PICKLE_FILE, convert_pickle
from adapters.report import Report, refused_report
from adapters.tokenizer_files import TOKENIZER_FILES
from api.archives import ARCHIVE_SUFFIXES, unpack
from api.members import Members
from api.settings import Settings, SettingsError
from base_engine.errors import EngineError
from scripts.check_options import parse_options
from scripts.demo_model import DemoModelError, ensure_demo_model
from scripts.report_view import show_report
from scripts.start_checks import StartError, check_device, check_model

if TYPE_CHECKING:
    from api.examination import Upload

Say = Callable[..., None]

#: Memory for the KV cache: the prompts that an adapter is tried out on are short.
_KV_BYTES = 256 << 20


class CheckError(Exception):
    """The adapter cannot be checked; the message says why and what to change."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_options(argv, __doc__)
    console = Console(stderr=True)

    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    try:
        if args.convert:
            try:
                _convert(args.folder, say)
            except AdapterRejected as error:
                return _answer(args, refused_report(error.violations, None))
            if args.model is None:
                say("Check it with --model BASE, the base that it was trained on.")
                return 0
        return _answer(args, check(args.folder, _settings(args, say), args, say))
    except (CheckError, StartError, SettingsError, DemoModelError) as e:
        say(f"error: {e}", "red")
    except (AdapterError, EngineError, OSError, ValueError) as e:
        why = str(e).strip().split("\n")[0] or type(e).__name__
        say(f"error: cannot be checked: {why}", "red")
    except KeyboardInterrupt:
        return 130
    return 2


def check(source: Path, settings: Settings, options: argparse.Namespace, say: Say) -> Report:
    """The report on the adapter in `source`, a folder or an archive. Nothing in it is changed.

    Raises CheckError, AdapterUnavailable, EngineError, and OSError or ValueError where the base
    cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="check-adapter-") as made:
        folder = Path(made)
        try:
            members = _gather(source, folder, settings.max_upload)
            if not any((folder / name).exists() for name in (WEIGHTS_FILE, MLX_WEIGHTS_FILE)):
                raise AdapterRejected(_missing(folder, members))
            say(f"Loading {settings.public_name} …")
            from api.examination import Upload

            noop = bool(options.allow_noop)
            upload = Upload("", source.name, folder, members, allow_noop=noop)
            return asyncio.run(_judge(upload, settings, options))
        except AdapterRejected as error:
            return error.report or refused_report(error.violations, None)


def _gather(source: Path, folder: Path, limit: int) -> Members:
    """Copy the adapter's and its tokenizer's files to `folder`. Raises CheckError, and
    AdapterRejected for a pickle alone or an archive that cannot be read."""
    members = Members()
    if source.is_dir():
        weights = [name for name in (WEIGHTS_FILE, MLX_WEIGHTS_FILE) if (source / name).exists()]
        if not weights and (source / PICKLE_FILE).exists():
            message = (
                f"is a pickle, which may run anything when it is loaded; with --convert it is "
                f"written as {WEIGHTS_FILE} without running it"
            )
            raise AdapterRejected([Violation("unexpected_weights", PICKLE_FILE, message)])
        for name in (CONFIG_FILE, *weights, *TOKENIZER_FILES):
            if (source / name).is_file() and (wanted := members.select(name)) is not None:
                shutil.copyfile(source / name, folder / wanted)
    elif source.name.lower().endswith(ARCHIVE_SUFFIXES):
        unpack(source, source.name, folder, limit, members)
    else:
        suffixes = ", ".join(ARCHIVE_SUFFIXES)
        raise CheckError(f"{source} is no folder and no archive that is read ({suffixes})")
    members.finish()
    if any(violation.code.startswith("archive_") for violation in members.violations):
        raise AdapterRejected(members.violations)
    return members


def _missing(folder: Path, members: Members) -> list[Violation]:
    try:
        read_header(folder / WEIGHTS_FILE)
    except AdapterRejected as error:
        return members.violations + [members.explained(found) for found in error.violations]
    raise AssertionError("the weights file was missing a moment ago")


async def _judge(upload: Upload, settings: Settings, options: argparse.Namespace) -> Report:
    """Raises AdapterRejected with all violations and the report."""
    from transformers.utils import logging as transformers_logging

    from api.examination import examine, report_of
    from base_engine.engine import Engine  # takes seconds, so only where it is needed

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    config = replace(settings.engine_config(), kv_bytes=_KV_BYTES)
    engine = await asyncio.to_thread(Engine, settings.model, config, settings.public_name)
    engine.start()
    try:
        manifest = await examine(engine, settings, upload, run=options.run)
        if manifest.speaks:
            allowed = "a server uses its tokenizer files only with --adapter-tokenizers"
            manifest = replace(manifest, warnings=(*manifest.warnings, allowed))
        return report_of(engine, upload.folder, manifest)
    finally:
        await asyncio.to_thread(engine.stop)


def _convert(folder: Path, say: Say) -> None:
    """Write the folder's pickle as safetensors. Raises CheckError, AdapterRejected."""
    if not (folder / PICKLE_FILE).is_file():
        raise CheckError(f"--convert: there is no {PICKLE_FILE} in {folder}")
    for note in convert_pickle(folder / PICKLE_FILE, folder / WEIGHTS_FILE):
        say(f"note: {note}", "yellow")
    say(f"Converted {PICKLE_FILE} to {folder / WEIGHTS_FILE}; upload that one.")


def _settings(args: argparse.Namespace, say: Say) -> Settings:
    """Raises CheckError, StartError, SettingsError, DemoModelError."""
    if not args.folder.exists():
        raise CheckError(f"there is no {args.folder}")
    settings = Settings(
        model=args.model or Settings().model,
        model_name=args.model_name,
        device=args.device,
        dtype=args.dtype,
        max_rank=args.max_rank,
        adapter_memory=args.adapter_memory,
        adapter_tokenizers="*",
    )
    check_device(settings.device)
    if settings.model == Settings().model:
        public_name = settings.public_name
        return replace(settings, model=str(ensure_demo_model(say)), model_name=public_name)
    check_model(settings)
    return settings


def _answer(args: argparse.Namespace, report: Report) -> int:
    """Print the report on stdout; the exit status."""
    accepted = report["status"] == "accepted"
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return 0 if accepted else 1
    console = Console()
    verdict, style = ("accepted", "bold green") if accepted else ("refused", "bold red")
    console.print(f"{args.folder} is {verdict}", style=style, markup=False, soft_wrap=True)
    show_report(report, console, all_tensors=args.tensors)
    return 0 if accepted else 1


if __name__ == "__main__":
    sys.exit(main())
