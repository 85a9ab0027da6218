"""Runs one input after another in a process of its own that may take little time and memory.

What goes wrong is told apart: another exception than a refusal, a hang (the process is ended by
the CPU time it may take, so that a loop in C is caught too), too much memory (its address space is
bounded, and the peak of what is resident is measured for each input).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Seconds of CPU that one input may take, and bytes of memory beyond those taken before it.
MAX_SECONDS = 2.0
MAX_BYTES = 256 << 20
#: Seconds for the process to start in.
_START = 60.0


class Wrong(AssertionError):
    """An input was neither taken nor refused in good order; the text says what happened."""


@dataclass
class Found:
    """What the inputs brought so far; `seconds` of CPU and `nbytes` are the most of one."""

    inputs: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.inputs} inputs, at most {self.seconds:.2f} s and {self.nbytes / 2**20:.0f} MB, "
            f"{dict(self.outcomes.most_common())}"
        )


class Watched:
    """`target(input, folder)` for each input, with an empty folder; it returns a word for what came
    of it and raises nothing. `prepare()` runs first, unwatched, and gives the target."""

    def __init__(
        self, prepare: Callable[[], Callable[[Any, Path], str]], silence: float = 60.0
    ) -> None:
        """`silence`: seconds after which a process that does not even compute is given up."""
        self.found = Found()
        self._silence = silence
        self._prepare = prepare
        self._process: Any = None
        self._connection: Any = None

    def run(self, value: Any) -> str:
        """What came of `value`, which must be picklable. Raises Wrong."""
        if self._process is None:
            self._start()
        self._connection.send(value)
        try:
            if not self._connection.poll(self._silence):
                self.close()
                raise Wrong(f"no answer within {self._silence:g} s")
            outcome, seconds, nbytes, failure = self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.close()
            hangs = code == -signal.SIGPROF
            reason = f"takes more than {MAX_SECONDS:g} s" if hangs else f"ended it with {code}"
            raise Wrong(reason) from None
        self.found.inputs += 1
        self.found.outcomes[outcome] += 1
        self.found.seconds = max(self.found.seconds, seconds)
        self.found.nbytes = max(self.found.nbytes, nbytes)
        if failure:
            raise Wrong(failure)
        if nbytes > MAX_BYTES:
            raise Wrong(f"takes {nbytes} bytes of memory")
        return str(outcome)

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._prepare), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(_START) or self._connection.recv() != "ready":
            raise RuntimeError("the process did not start")


def _serve(connection: Connection, prepare: Callable[[], Callable[[Any, Path], str]]) -> None:
    target = prepare()
    gc.collect()
    gc.freeze()  # so that a full collection, which looks at all that is loaded, is not measured
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
    connection.send("ready")
    with tempfile.TemporaryDirectory() as root:
        while True:
            try:
                value = connection.recv()
            except EOFError:
                return
            folder = Path(root) / "input"
            folder.mkdir()
            connection.send(_measured(target, value, folder))
            shutil.rmtree(folder)


def _measured(
    target: Callable[[Any, Path], str], value: Any, folder: Path
) -> tuple[str, float, int, str]:
    """Outcome, seconds of CPU, bytes, and what went wrong ("": nothing)."""
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew
    before = _status("VmRSS")
    _bound_memory(_status("VmSize") + MAX_BYTES)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    start = time.process_time()
    try:
        outcome, failure = target(value, folder), ""
    except Exception:
        outcome, failure = "failed", traceback.format_exc()
    seconds = time.process_time() - start
    signal.setitimer(signal.ITIMER_PROF, 0)
    _bound_memory(resource.RLIM_INFINITY)
    return outcome, seconds, _status("VmHWM") - before, failure


def _bound_memory(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.RLIM_INFINITY))


def _status(name: str) -> int:
    """Bytes of this process under `name` in its status."""
    for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)
