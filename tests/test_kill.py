"""kill -9 at any moment: what was acknowledged is there afterwards, and nothing half-written is."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from adapters.peft_files import content_digest
from tests.process import ServerProcess, token_ids, until
from tests.tiny import BYTE0, signature_adapter

KILLS = 20 if os.environ.get("LORIKEET_LONG") else 4
UPLOADERS = 4
#: Adapters that each uploader alternates between, so that every upload is a new version.
CONTENTS = 3


@dataclass
class History:
    """What one uploader has sent under its name and what the server has said to it."""

    name: str
    folders: list[Path]
    #: Version -> the digest that the server acknowledged.
    acknowledged: dict[int, str] = field(default_factory=dict)
    #: The digest of the upload that was cut by the kill, if one was.
    cut: str | None = None
    sent: int = 0


class Load:
    """Uploads and requests without end, until the server is gone."""

    def __init__(self, server: ServerProcess, histories: list[History]) -> None:
        self._server = server
        work = [(self._upload, history) for history in histories]
        work += [(self._ask, history) for history in histories]
        self._executor = ThreadPoolExecutor(len(work))
        self._begun = threading.Barrier(len(work) + 1)
        self._runs = [self._executor.submit(self._run, *item) for item in work]
        self._begun.wait(60)

    def finish(self) -> None:
        """Returns when the server is gone and everybody has noticed; raises what failed before."""
        for run in self._runs:
            run.result(60)
        self._executor.shutdown()

    def _run(self, work: Callable[[httpx.Client, History], None], history: History) -> None:
        self._begun.wait(60)
        with httpx.Client(base_url=self._server.address, timeout=60) as client:
            try:
                while True:
                    work(client, history)
            except httpx.TransportError:
                return

    def _upload(self, client: httpx.Client, history: History) -> None:
        folder = history.folders[history.sent % len(history.folders)]
        history.sent += 1
        history.cut = content_digest(folder)
        files = [("files", (file.name, file.read_bytes())) for file in sorted(folder.iterdir())]
        response = client.post("/v1/adapters", data={"name": history.name}, files=files)
        assert response.status_code == 201, response.text
        record = response.json()
        history.acknowledged[record["version"]] = record["digest"]
        history.cut = None

    def _ask(self, client: httpx.Client, history: History) -> None:
        body = {"model": history.name, "prompt": "!", "max_tokens": 8}
        response = client.post("/v1/completions", json=body)
        assert response.status_code in (200, 404), response.text


def lives(pid: int) -> bool:
    """Whether the process runs (Linux); one that has ended may wait for its parent as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_whole(
    server: ServerProcess, histories: list[History], says: dict[str, int], since: dict[str, int]
) -> None:
    """Acknowledged versions are listed; listed ones later than `since` answer what they are."""
    listed = server.adapters()
    assert set(listed) <= {history.name for history in histories}
    for history in histories:
        versions = {v["version"]: v["digest"] for v in listed.get(history.name, [])}
        assert list(versions) == list(range(1, len(versions) + 1))
        unheard = {n: d for n, d in versions.items() if n not in history.acknowledged}
        assert history.acknowledged.items() <= versions.items()
        # The one upload that was cut may have been recorded, and nothing else.
        assert list(unheard.items()) in ([], [(len(versions), history.cut)])
        for number in range(since[history.name] + 1, len(versions) + 1):
            answer = server.complete(f"{history.name}@{number}", max_tokens=2)
            assert token_ids(answer) == [says[versions[number]]] * 2
        if versions:
            answer = server.complete(history.name, max_tokens=2)
            assert token_ids(answer) == [says[versions[len(versions)]]] * 2
        history.acknowledged = versions


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up through /proc")
@pytest.mark.timeout(300 if KILLS < 20 else 1800)
def test_kill_9_at_random_moments_loses_no_acknowledged_upload(
    scripted: Path, tmp_path: Path
) -> None:
    """LORIKEET_LONG=1 kills 20 times instead of 4."""
    says: dict[str, int] = {}
    histories = []
    for i in range(UPLOADERS):
        tokens = [BYTE0 + 40 + i * CONTENTS + j for j in range(CONTENTS)]
        folders = [signature_adapter(scripted, tmp_path / f"adapter-{t}", t) for t in tokens]
        says |= {content_digest(f): t for f, t in zip(folders, tokens, strict=True)}
        histories.append(History(f"name-{i}", folders))
    chance = random.Random(11)
    server = ServerProcess(scripted, tmp_path / "data")
    try:
        for _ in range(KILLS):
            before = {history.name: len(history.acknowledged) for history in histories}
            load = Load(server, histories)
            time.sleep(chance.uniform(0, 1.5))
            (records,) = server.children()
            server.kill()
            load.finish()
            server = ServerProcess(scripted, tmp_path / "data")
            until(lambda pid=records: not lives(pid), 10)
            assert not server.staged()
            assert_whole(server, histories, says, before)
        assert sum(len(history.acknowledged) for history in histories) > KILLS
        assert_whole(server, histories, says, dict.fromkeys((h.name for h in histories), 0))
        server.stop()
    finally:
        server.kill()
