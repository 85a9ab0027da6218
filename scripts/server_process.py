"""A server of our own in a process of its own, for as long as a measurement takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from api.settings import ENV_PREFIX

ROOT = Path(__file__).resolve().parent.parent

START_S = 300
STOP_S = 30


class ServerFailed(Exception):
    """The server did not start, or ended by itself; the message has the end of its log."""


class ServerProcess:
    """Serves `model` on a free port of 127.0.0.1 while the context lasts.

    Records, adapters and log go into `folder`. The environment's settings for servers are not
    passed on, so that nobody's registry is written to; `flags` are.
    """

    def __init__(self, model: Path, folder: Path, flags: Sequence[str]) -> None:
        self.url = ""
        self._log = folder / "server.log"
        self._command = [sys.executable, "-P", "-m", "scripts.serve", "--model", str(model)]
        self._command += [*flags, "--data", str(folder / "data")]
        self._command += ["--host", "127.0.0.1", "--port", "0"]

    def __enter__(self) -> ServerProcess:
        env = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=env | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self.url = self._address()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def check(self) -> None:
        """Raises ServerFailed if the process has ended."""
        if self._process.poll() is not None:
            raise ServerFailed(f"the server ended by itself, {self._ending()}")

    def _address(self) -> str:
        """The address that the server prints once it is ready."""
        stdout = self._process.stdout
        assert stdout is not None
        too_long = threading.Timer(START_S, self._process.kill)
        too_long.start()
        try:
            for line in stdout:
                if (address := re.search(r"http://127\.0\.0\.1:\d+", line)) is not None:
                    return address[0]
        finally:
            too_long.cancel()
        self._process.wait()
        raise ServerFailed(f"the server did not start (it has {START_S} s), {self._ending()}")

    def _ending(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-8:]
        return "\n  ".join([f"status {self._process.returncode}:", *lines])
