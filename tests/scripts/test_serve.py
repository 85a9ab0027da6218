"""Starting and stopping the server as a user does: the process, its words and its exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
STREAM = {"messages": [{"role": "user", "content": "go on"}], "stream": True, "ignore_eos": True}


def start(data: Path, *flags: str) -> subprocess.Popen[str]:
    small = ("--kv-memory", "4MiB", "--adapter-memory", "1MiB", "--host-adapter-memory", "1MiB")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "scripts.serve", "--data", str(data), *small, *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def serving(data: Path, base: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is ready, and its address as it printed it."""
    process = start(data, "--port", "0", "--model", str(base), *flags)
    assert process.stdout is not None
    try:
        welcome = ""
        while (address := re.search(r"http://127\.0\.0\.1:\d+", welcome)) is None:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            welcome += line
        yield process, address[0]
    finally:
        process.kill()
        process.communicate()


def refusal(data: Path, *flags: str) -> str:
    """What a server that cannot start says."""
    process = start(data, *flags)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert out == ""
    assert "Traceback" not in err
    return err


def test_a_signal_ends_the_server_cleanly_and_its_streams_with_an_error(
    tmp_path: Path, scripted: Path
) -> None:
    with serving(tmp_path / "data", scripted) as (process, address):
        model = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
        body = {"model": model, **STREAM}
        stopped = threading.Event()
        lines = []
        url = f"{address}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                lines.append(line)
                if not stopped.is_set():
                    stopped.set()
                    process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        ended = frames[-1]["choices"][0]["finish_reason"] if "choices" in frames[-1] else None
        assert ended == "length" or frames[-1]["error"]["code"] == "engine_stopped"


def test_a_signal_while_it_starts_ends_it_at_once(tmp_path: Path, scripted: Path) -> None:
    process = start(tmp_path / "data", "--port", "0", "--model", str(scripted))
    assert process.stderr is not None
    assert "Loading" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_a_port_in_use_is_named(tmp_path: Path, scripted: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        text = refusal(tmp_path / "data", "--model", str(scripted), "--port", port)
    assert f"port {port} on 127.0.0.1 is in use" in text
    assert "--port" in text


@pytest.mark.parametrize("path", ["./no-such-folder", "/no/such/folder"])
def test_a_model_folder_that_is_missing_is_named(tmp_path: Path, path: str) -> None:
    assert path.lstrip("./") in refusal(tmp_path / "data", "--port", "0", "--model", path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path / "data", "--port", "0", "--model", str(tmp_path))
    assert "config.json" in text


def test_a_damaged_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "no-such-type"}')
    text = refusal(tmp_path / "data", "--port", "0", "--model", str(tmp_path / "model"))
    assert "error: cannot start: " in text


def test_budgets_beyond_the_machine_are_refused(tmp_path: Path, scripted: Path) -> None:
    text = refusal(
        tmp_path / "data", "--port", "0", "--model", str(scripted), "--kv-memory", "900TiB"
    )
    assert "not enough memory" in text
    assert "--kv-memory" in text


def test_a_data_folder_that_another_server_uses_is_refused(tmp_path: Path, scripted: Path) -> None:
    with serving(tmp_path / "data", scripted):
        text = refusal(tmp_path / "data", "--port", "0", "--model", str(scripted))
    assert f"--data: the folder {tmp_path / 'data'} is in use by another server" in text
    assert "Loading" not in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seed-adapters", "/no/such/folder"), "--seed-adapters: there is no folder /no/such"),
        (("--redis", "redis://u:secret@127.0.0.1:1"), "--redis: redis://127.0.0.1:1 does not"),
        (("--data", "/dev/null/x"), "--data: the folder /dev/null/x cannot be written"),
    ],
)
def test_places_that_cannot_be_used_are_refused_before_the_base_is_loaded(
    tmp_path: Path, scripted: Path, flags: tuple[str, str], words: str
) -> None:
    text = refusal(tmp_path / "data", "--port", "0", "--model", str(scripted), *flags)
    assert words in text and text.count("\n") == 1
    assert "secret" not in text


@pytest.mark.parametrize("device", ["cuda", "cuda:99"])
def test_a_device_that_is_not_there_is_refused_before_the_base_is_loaded(
    tmp_path: Path, scripted: Path, device: str
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("has a GPU")
    text = refusal(tmp_path / "data", "--port", "0", "--model", str(scripted), "--device", device)
    assert f"error: --device: there is no {device}" in text and "cpu" in text
    assert text.count("\n") == 1


def test_a_model_that_cannot_be_fetched_is_named(tmp_path: Path) -> None:
    text = refusal(tmp_path / "data", "--port", "0", "--model", "no/such-model")
    _, error = text.splitlines()
    assert error.startswith("error: --model: no/such-model is no folder here")


def test_a_misspelt_variable_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORIKEET_KV_MEMROY", "1GiB")
    text = refusal(tmp_path / "data", "--seed-adapters", "/no/such/folder")
    assert "warning: LORIKEET_KV_MEMROY is no setting; did you mean LORIKEET_KV_MEMORY?" in text


def test_requests_are_logged_unless_told_not_to(tmp_path: Path, scripted: Path) -> None:
    for flags, lines in (((), 1), (("--no-log-requests",), 0)):
        with serving(tmp_path / "data", scripted, *flags) as (process, address):
            httpx.get(f"{address}/v1/models").raise_for_status()
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        assert log.count("lorikeet.access: GET /v1/models 200 ") == lines
        assert " ERROR " not in log
