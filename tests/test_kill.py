"""kill -9 at any moment: what was acknowledged is there afterwards, and nothing half-written is."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from adapters.peft_files import content_digest
from tests.process import ServerProcess, token_ids, until
from tests.tiny import BYTE0, signature_adapter

KILLS = 20 if os.environ.get("LORIKEET_LONG") else 4
UPLOADERS = 4
#: Adapters that an uploader takes turns with, so that every upload makes a new version.
CONTENTS = 3


class Uploader:
    """Uploads one version after the other under its name; version n has content n % CONTENTS."""

    def __init__(self, scripted: Path, folder: Path, number: int) -> None:
        self.name = f"name-{number}"
        self.tokens = [BYTE0 + 40 + number * CONTENTS + i for i in range(CONTENTS)]
        self.folders = [signature_adapter(scripted, folder / str(t), t) for t in self.tokens]
        self.digests = [content_digest(f) for f in self.folders]
        #: Versions 1 to this one were acknowledged, or listed by a server later on.
        self.known = 0

    def upload(self, client: httpx.Client) -> None:
        folder = self.folders[(self.known + 1) % CONTENTS]
        files = [("files", (file.name, file.read_bytes())) for file in sorted(folder.iterdir())]
        response = client.post("/v1/adapters", data={"name": self.name}, files=files)
        assert response.status_code == 201, response.text
        assert response.json()["version"] == self.known + 1
        self.known += 1

    def ask(self, client: httpx.Client) -> None:
        body = {"model": self.name, "prompt": "!", "max_tokens": 8}
        response = client.post("/v1/completions", json=body)
        assert response.status_code in (200, 404), response.text

    def check(self, server: ServerProcess, first: int) -> None:
        """All known versions are there, and at most the one whose upload was cut; those from
        `first` on answer as what they are."""
        versions = server.adapters().get(self.name, [])
        assert [v["version"] for v in versions] == list(range(1, len(versions) + 1))
        assert self.known <= len(versions) <= self.known + 1
        for version in versions:
            assert version["digest"] == self.digests[version["version"] % CONTENTS]
        self.known = len(versions)
        for number in range(first, self.known + 1):
            model = self.name if number == self.known else f"{self.name}@{number}"
            answer = server.complete(model, max_tokens=2)
            assert token_ids(answer) == [self.tokens[number % CONTENTS]] * 2


class Load:
    """Uploads and requests without end, until the server is gone."""

    def __init__(self, server: ServerProcess, uploaders: list[Uploader]) -> None:
        self._address = server.address
        work = [one.upload for one in uploaders] + [one.ask for one in uploaders]
        self._executor = ThreadPoolExecutor(len(work))
        self._begun = threading.Barrier(len(work) + 1)
        self._runs = [self._executor.submit(self._run, call) for call in work]
        self._begun.wait(60)

    def finish(self) -> None:
        """Returns when everybody has noticed that the server is gone; raises what failed before."""
        for run in self._runs:
            run.result(60)
        self._executor.shutdown()

    def _run(self, call: Callable[[httpx.Client], None]) -> None:
        with httpx.Client(base_url=self._address, timeout=60) as client:
            self._begun.wait(60)
            try:
                while True:
                    call(client)
            except httpx.TransportError:
                return


def lives(pid: int) -> bool:
    """Whether the process runs; one that has ended may wait for its parent as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up through /proc")
@pytest.mark.timeout(300 if KILLS < 20 else 1800)
def test_kill_9_at_random_moments_loses_no_acknowledged_upload(
    scripted: Path, tmp_path: Path
) -> None:
    """LORIKEET_LONG=1 kills 20 times instead of 4."""
    uploaders = [Uploader(scripted, tmp_path, number) for number in range(UPLOADERS)]
    chance = random.Random(11)
    recorded_though_cut = 0
    server = ServerProcess(scripted, tmp_path / "data")
    try:
        for _ in range(KILLS):
            before = [one.known for one in uploaders]
            load = Load(server, uploaders)
            time.sleep(chance.uniform(0, 1.5))
            (records,) = server.children()
            server.kill()
            load.finish()
            acknowledged = [one.known for one in uploaders]

            server = ServerProcess(scripted, tmp_path / "data")
            until(lambda pid=records: not lives(pid), 10)  # type: ignore[misc]
            assert not server.staged()
            assert set(server.adapters()) <= {one.name for one in uploaders}
            for one, known in zip(uploaders, before, strict=True):
                one.check(server, known + 1)
            recorded_though_cut += sum(one.known for one in uploaders) - sum(acknowledged)
        total = sum(one.known for one in uploaders)
        print(f"{KILLS} kills, {total} versions, {recorded_though_cut} of cut uploads")
        assert total > KILLS
        for one in uploaders:
            one.check(server, 1)
        server.stop()
    finally:
        server.kill()
