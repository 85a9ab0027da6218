"""Large, cut and parallel uploads while others stream, on a real server process."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.test_body import form_of, head_of
from tests.process import ServerProcess, server_process, token_ids, until
from tests.tiny import BYTE0, make_adapter, oracle_logprobs, signature_adapter, tiny_base

MIB = 1 << 20
#: What one upload may add to the server's memory.
MARGIN = 64 * MIB


class Streams:
    """Endless token streams of several models, which note when each token came."""

    def __init__(self, server: ServerProcess, models: list[str]) -> None:
        self.times: list[list[float]] = [[] for _ in models]
        self._server = server
        self._leave = threading.Event()
        self._executor = ThreadPoolExecutor(len(models))
        self._runs = [self._executor.submit(self._run, i, m) for i, m in enumerate(models)]

    def worst_gap(self, start: float, end: float) -> float:
        """The longest time, of those that reach into [start, end], that one stream stood still."""
        gaps = []
        for times in self.times:
            inside = [
                (a, b) for a, b in zip(times, times[1:], strict=False) if b > start and a < end
            ]
            assert inside, "a stream brought no token in all that time"
            gaps.append(max(b - a for a, b in inside))
        return max(gaps)

    def finish(self) -> None:
        self._leave.set()
        for run in self._runs:
            run.result(60)
        self._executor.shutdown()

    def _run(self, index: int, model: str) -> None:
        body = {"model": model, "prompt": "!", "max_tokens": 20_000, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        with httpx.Client(base_url=self._server.address, timeout=60) as client:
            while not self._leave.is_set():
                with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200, response.read()
                    for line in response.iter_lines():
                        if line:
                            assert '"error"' not in line, line
                            self.times[index].append(time.monotonic())
                        if self._leave.is_set():
                            break


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose adapters can be large: at rank 3400, 300 MB."""
    folder = tmp_path_factory.mktemp("wide")
    return tiny_base(
        folder / "base",
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        max_position_embeddings=32768,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured through /proc")
def test_a_300_mb_adapter_goes_up_in_little_memory_while_others_stream(
    wide: Path, tmp_path: Path
) -> None:
    large = make_adapter(wide, tmp_path / "large", seed=1, r=3400)
    assert (large / WEIGHTS_FILE).stat().st_size > 300_000_000
    small = make_adapter(wide, tmp_path / "small", seed=2)
    memory = {"adapter_memory": "400MiB", "host_adapter_memory": "400MiB", "kv_memory": "256MiB"}
    with server_process(wide, tmp_path / "data", max_rank=4096, **memory) as server:
        assert server.upload("small", small).status_code == 201
        streams = Streams(server, ["tiny", "small", "small", "tiny"])
        until(lambda: all(len(times) > 100 for times in streams.times), 60)
        quiet_from = time.monotonic()
        time.sleep(2)
        server.reset_peak()
        before = server.resident_bytes()
        start = time.monotonic()
        response = server.upload("large", large)
        end = time.monotonic()
        peak = server.peak_bytes()
        streams.finish()
        assert response.status_code == 201, response.text
        assert response.json()["bytes"] > 300_000_000
        # It is tried out before it is accepted: then its weights are on host and device, within
        # the budgets for that.
        held = 2 * response.json()["report"]["device_bytes"]
        assert peak - before - held < MARGIN, f"{(peak - before - held) / MIB:.0f} MiB"
        # What stands still without an upload, on a busy machine, is no fault of the upload.
        quiet, busy = streams.worst_gap(quiet_from, start), streams.worst_gap(start, end)
        assert busy < 1 + 5 * quiet, f"{busy:.2f} s in an upload of {end - start:.1f} s"

        answer = server.complete("large", max_tokens=4, logprobs=0)
        prompt = answer["lorikeet"]["choices"][0]["prompt_token_ids"]
        tokens = token_ids(answer)
        want = oracle_logprobs(wide, large, prompt + tokens)[len(prompt) - 1 : -1]
        base = oracle_logprobs(wide, None, prompt + tokens)[len(prompt) - 1 : -1]
        index = torch.tensor(tokens)[:, None]
        got = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])
        torch.testing.assert_close(got, want.gather(1, index)[:, 0], atol=1e-4, rtol=0)
        assert (want - base).abs().max() > 0.01, "the adapter changes nothing"
        assert not server.staged()


@pytest.fixture(scope="module")
def server(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    data = tmp_path_factory.mktemp("uploads")
    with server_process(scripted, data, max_upload="16MiB") as running:
        yield running


@pytest.fixture(scope="module")
def files(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """An adapter that says "9"."""
    folder = signature_adapter(scripted, tmp_path_factory.mktemp("nine"), BYTE0 + ord("9"))
    return {name: (folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}


@pytest.mark.parametrize(
    ("share", "excess"),
    [
        pytest.param(0.1, 0, id="closed-after-a-tenth"),
        pytest.param(0.5, 0, id="closed-in-the-middle"),
        pytest.param(0.99, 0, id="closed-near-the-end"),
        pytest.param(1.0, 100, id="declared-too-long"),
        pytest.param(1.0, -100, id="declared-too-short"),
    ],
)
def test_a_cut_upload_leaves_nothing_and_its_name_is_free(
    server: ServerProcess, files: dict[str, bytes], share: float, excess: int
) -> None:
    """`excess` is how much more Content-Length declares than the form takes."""
    padded = files | {"notes.txt": bytes(8 * MIB)}
    name = f"cut-{share}-{excess}"
    body = form_of(padded, name)
    with server.connect() as connection:
        connection.sendall(head_of(len(body) + excess))
        try:
            connection.sendall(body[: int(len(body) * share)])
            if share < 1:
                until(lambda: bool(server.staged()), 10)
            else:
                connection.shutdown(socket.SHUT_WR)
                assert b"HTTP/1.1 201" not in connection.recv(1000)
        except ConnectionError:
            assert excess < 0  # the rest of the form is no request: the server may reset
    until(lambda: not server.staged(), 10)
    assert name not in server.adapters()
    response = httpx.post(
        f"{server.address}/v1/adapters",
        content=form_of(files, name),
        headers={"content-type": "multipart/form-data; boundary=cut"},
        timeout=60,
    )
    assert (response.status_code, response.json()["version"]) == (201, 1)
    assert server.complete(name, max_tokens=2)["choices"][0]["text"] == "99"


def test_twenty_uploads_at_once_are_each_taken_as_sent(
    server: ServerProcess, scripted: Path, tmp_path: Path
) -> None:
    letters = {f"par-{letter}": letter for letter in "abcdefghijklmnopqrst"}
    folders = {
        name: signature_adapter(scripted, tmp_path / name, BYTE0 + ord(letter))
        for name, letter in letters.items()
    }
    together = threading.Barrier(len(folders))

    def upload(name: str) -> int:
        together.wait(60)
        return server.upload(name, folders[name]).status_code

    with ThreadPoolExecutor(len(folders)) as executor:
        assert list(executor.map(upload, folders)) == [201] * 20
    for name, letter in letters.items():
        assert server.complete(name, max_tokens=2)["choices"][0]["text"] == 2 * letter
    assert not server.staged()
