"""The server in a process of its own, started as a user does, for tests that measure or kill it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE

ROOT = Path(__file__).resolve().parents[1]

_SMALL = {"kv-memory": "4MiB", "adapter-memory": "16MiB", "host-adapter-memory": "16MiB"}


class ServerProcess:
    """`scripts.serve` on a free port of the loopback, serving `model` as "tiny"."""

    def __init__(self, model: Path, data: Path, **flags: Any) -> None:
        """`flags` are the command's, with underscores for dashes. Returns when it answers."""
        self.data = data
        options = {"model": model, "data": data, "port": 0, "model-name": "tiny"} | _SMALL
        options |= {name.replace("_", "-"): value for name, value in flags.items()}
        data.mkdir(parents=True, exist_ok=True)
        self._log = data / "process.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "scripts.serve"]
                + [f"--{name}={value}" for name, value in options.items()],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.address = self._wait_for_address()
        self.client = httpx.Client(base_url=self.address, timeout=120)

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """End it as a user does; it must end cleanly."""
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(60) == 0, self._log.read_text()[-4000:]
        finally:
            self.kill()

    def kill(self) -> None:
        """kill -9, unless it has ended already."""
        self.client.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def upload(self, name: str, folder: Path) -> httpx.Response:
        """The two adapter files in `folder`, streamed from disk."""
        with ExitStack() as stack:
            files = [
                ("files", (file, stack.enter_context((folder / file).open("rb"))))
                for file in (CONFIG_FILE, WEIGHTS_FILE)
            ]
            return self.client.post("/v1/adapters", data={"name": name}, files=files)

    def complete(self, model: str, **body: Any) -> Any:
        """POST /v1/completions, greedy and with its trace; must succeed."""
        body = {"model": model, "prompt": "!", "temperature": 0, "ignore_eos": True} | body
        headers = {"x-lorikeet-trace": "1"}
        response = self.client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    def adapters(self) -> dict[str, list[Any]]:
        """Name of each listed adapter -> the records of its versions, oldest first."""
        listed = self.client.get("/v1/adapters").raise_for_status().json()["data"]
        return {adapter["name"]: adapter["versions"] for adapter in listed}

    def gauges(self) -> dict[str, float]:
        """All metrics without labels, by name without the prefix."""
        text = self.client.get("/metrics").raise_for_status().text
        pairs = re.findall(r"^lorikeet_(\w+) ([0-9.e+-]+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in pairs}

    def idle(self) -> bool:
        """Whether no request holds anything, by the metrics."""
        gauges = self.gauges()
        held = ("requests_running", "requests_waiting", "kv_blocks_used", "adapters_pinned")
        return not any(gauges[name] for name in held)

    def staged(self) -> list[str]:
        """What lies in the folder for uploads in progress."""
        return os.listdir(self.data / "adapters" / "staging")

    def connect(self) -> socket.socket:
        """A bare connection, for clients that misbehave."""
        url = httpx.URL(self.address)
        assert url.port is not None
        return socket.create_connection((url.host, url.port), timeout=60)

    def children(self) -> list[int]:
        """The processes it has started (Linux)."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]

    def resident_bytes(self) -> int:
        """Its resident memory now (Linux)."""
        return self._status("VmRSS")

    def peak_bytes(self) -> int:
        """The most resident memory since `reset_peak` (Linux)."""
        return self._status("VmHWM")

    def reset_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _status(self, field: str) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    def _wait_for_address(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                return found[0]
        self.process.wait()
        raise AssertionError(f"the server did not start: {self._log.read_text()[-4000:]}")


@contextmanager
def server_process(model: Path, data: Path, **flags: Any) -> Iterator[ServerProcess]:
    """A server, ended at the end in good order, or killed where the test failed."""
    server = ServerProcess(model, data, **flags)
    try:
        yield server
    except BaseException:
        server.kill()
        raise
    server.stop()


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for `condition`; AssertionError if it takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds"
        time.sleep(0.01)


def token_ids(answer: Mapping[str, Any]) -> list[int]:
    """The tokens of the only choice of `answer`, which has a trace."""
    (choice,) = answer["lorikeet"]["choices"]
    ids: list[int] = choice["token_ids"]
    return ids
