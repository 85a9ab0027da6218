"""Measure serving: tokens/s and latencies for the base alone and for many adapters, side by side.

By default a server of our own serves the demo base and random rank-16 adapters on all seven
projections; --url measures any server of OpenAI's streamed completions (OPENAI_API_KEY is its key).
The workloads take turns for several rounds, and the table has the medians over rounds. Ratios to
the base within one run hold on a busy machine; tokens/s and times do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from scripts.bench_options import REPORTED, adapters_used, parse_options, title
from scripts.demo_model import DemoModelError, ensure_demo_model
from scripts.load import Client, FailedRequest, Job, Load, Outcome
from scripts.server_process import ServerFailed, ServerProcess
from scripts.serving_report import Figures, Report, StepFigures

#: The most steps that our own servers keep records of.
_STEPS_KEPT = 1000


@dataclass(frozen=True)
class Target:
    """The server to measure. `check` raises where it is known to have ended."""

    url: str
    base_model: str
    adapters: Sequence[str]
    tokenizer: Tokenizer | None = None
    key: str | None = None
    check: Callable[[], None] = lambda: None


@contextmanager
def own_server(options: argparse.Namespace, notes: Console) -> Iterator[Target]:
    """A new server with as many random adapters as the workloads need, all uploaded."""
    # Takes seconds, so not for --help.
    from scripts.random_adapters import adaptable_shapes, adapter_elements, write_adapter

    model = options.model or ensure_demo_model(notes.print)
    shapes = adaptable_shapes(model)
    names = [f"bench-r16-{n:02d}" for n in range(adapters_used(options))]
    # So much that all stay resident, also in float32.
    memory = max(1 << 20, len(names) * adapter_elements(shapes) * 4)
    flags = ["--adapter-memory", str(memory), *options.server_flags]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lorikeet-bench-")))
        with notes.status("starting the server"):
            server = stack.enter_context(ServerProcess(model, folder, flags))
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=300, trust_env=False))
        with _progress(notes) as progress:
            for n, name in enumerate(progress.track(names, description="uploading adapters")):
                write_adapter(shapes, folder / "adapter", seed=n)
                _upload(http, name, folder / "adapter")
        base = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        tokenizer = _tokenizer(model / "tokenizer.json")
        yield Target(server.url, base, names, tokenizer, check=server.check)


def other_server(options: argparse.Namespace) -> Target:
    tokenizer = _tokenizer(options.tokenizer) if options.tokenizer else None
    key = os.environ.get("OPENAI_API_KEY")
    return Target(options.url, options.base_model, options.adapters, tokenizer, key)


async def measure(target: Target, options: argparse.Namespace, notes: Console) -> Report:
    """Every workload once a round, until all rounds are done or the time is up.

    Before that each adapter answers once, unmeasured; raises FailedRequest where one cannot.
    """
    report = Report([str(workload) for workload in options.workloads])
    load = Load(options.requests, options.prompt, options.output, options.rate, options.seed)
    clients = None if options.rate else options.clients
    async with Client(
        target.url, target.base_model, target.adapters, target.key, options.timeout
    ) as client:
        await _touch(client, options, notes)
        deadline = asyncio.get_running_loop().time() + options.time_limit
        with _progress(notes) as progress:
            turns = [(r, w) for r in range(options.rounds) for w in options.workloads]
            task = progress.add_task("", total=len(turns) * options.requests)
            for round, workload in turns:
                progress.update(task, description=f"round {round + 1}, {workload}")
                jobs = load.jobs(workload, round, target.tokenizer)
                outcomes: list[Outcome] = []
                before = await _steps(client)
                try:
                    async with asyncio.timeout_at(deadline):
                        seconds = await client.run(
                            jobs, clients, _collect(outcomes, progress, task)
                        )
                except TimeoutError:
                    report.cut = str(workload)
                    break
                finally:
                    report.add_failures(str(workload), outcomes)
                target.check()
                last = before[-1]["step"] if before else -1
                steps = [step for step in await _steps(client) if step["step"] > last]
                report.add(str(workload), Figures.of(outcomes, seconds), StepFigures.of(steps))
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """0: every workload was measured and no request failed. 1: not so, and it was said."""
    options = parse_options(argv, __doc__)
    notes = Console(stderr=True)
    try:
        if options.url is None:
            with own_server(options, notes) as target:
                report = asyncio.run(measure(target, options, notes))
        else:
            report = asyncio.run(measure(other_server(options), options, notes))
        report.print(title(options))
        if options.json is not None:
            settings = {name: getattr(options, name) for name in REPORTED}
            text = json.dumps({"options": settings, **report.to_json()}, indent=1, default=str)
            options.json.write_text(text + "\n")
    except KeyboardInterrupt:
        return 130
    except (FailedRequest, ServerFailed, DemoModelError, httpx.HTTPError, OSError, ValueError) as e:
        text = f"error: {str(e) or type(e).__name__}"
        notes.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0 if report.complete else 1


async def _touch(client: Client, options: argparse.Namespace, notes: Console) -> None:
    """Have the base and each adapter that is used answer once."""
    jobs = [Job("Hello", 2, n) for n in (None, *range(adapters_used(options)))]
    outcomes: list[Outcome] = []
    with _progress(notes) as progress:
        task = progress.add_task("touching each once", total=len(jobs))
        await client.run(jobs, options.clients, _collect(outcomes, progress, task))
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise FailedRequest(f"{len(errors)} of {len(jobs)} first requests failed: {errors[0]}")


async def _steps(client: Client) -> list[dict[str, Any]]:
    """The server's last steps, none if it does not tell of any."""
    try:
        answer = await client.get(f"/v1/engine/steps?limit={_STEPS_KEPT}")
        steps: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
        return steps
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return []


def _collect(outcomes: list[Outcome], progress: Progress, task: Any) -> Callable[[Outcome], None]:
    def collect(outcome: Outcome) -> None:
        outcomes.append(outcome)
        progress.advance(task)

    return collect


def _tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    return Tokenizer.from_file(str(file))


def _upload(http: httpx.Client, name: str, folder: Path) -> None:
    with (folder / CONFIG_FILE).open("rb") as config, (folder / WEIGHTS_FILE).open("rb") as weights:
        files = [("files", (CONFIG_FILE, config)), ("files", (WEIGHTS_FILE, weights))]
        answer = http.post("/v1/adapters", data={"name": name}, files=files)
    if answer.status_code != 201:
        raise FailedRequest(f"upload of {name}: HTTP {answer.status_code}: {answer.text[:500]}")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


if __name__ == "__main__":
    # By default it would end this process and leave the server's.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
