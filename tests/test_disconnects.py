"""Clients that go away, seen from outside: a second later nothing is held for them any more."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.process import ServerProcess, server_process, until
from tests.tiny import BYTE0, signature_adapter

#: Sequences that run at once; the others wait.
RUNNING = 4


@pytest.fixture(scope="module")
def server(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Has a long context and reads prompts 16 tokens a step: a long one takes hundreds of them."""
    folder = tmp_path_factory.mktemp("leaving")
    base = shutil.copytree(scripted, folder / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    adapter = signature_adapter(base, folder / "adapter", BYTE0 + ord("9"))
    flags = {"max_running": RUNNING, "step_tokens": 16, "kv_memory": "64MiB"}
    with server_process(base, folder / "data", **flags) as running:
        assert running.upload("nine", adapter).status_code == 201
        yield running


def ask(server: ServerProcess, **body: Any) -> socket.socket:
    """Send a request that takes many seconds, and leave the answer unread."""
    body = {"model": "nine", "prompt": "!", "max_tokens": 16000, "ignore_eos": True} | body
    content = json.dumps(body).encode()
    connection = server.connect()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def assert_all_is_free_soon(server: ServerProcess) -> None:
    """Within a second, by the metrics; and the next request is answered."""
    until(server.idle, 1)
    assert server.complete("nine", max_tokens=2)["choices"][0]["text"] == "99"
    assert server.idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_in_prefill(server: ServerProcess, stream: bool) -> None:
    before = server.gauges()["generated_tokens_total"]
    connection = ask(server, prompt=[5] * 16000, max_tokens=10, stream=stream)
    until(lambda: server.gauges()["kv_blocks_used"] > 0, 10)
    assert server.gauges()["adapters_pinned"] == 1
    connection.close()
    until(server.idle, 1)
    assert server.gauges()["generated_tokens_total"] == before, "the prompt was read to its end"
    assert_all_is_free_soon(server)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_after_the_first_token(server: ServerProcess, stream: bool) -> None:
    before = server.gauges()["generated_tokens_total"]
    connection = ask(server, stream=stream)
    if stream:
        assert b"200 OK" in connection.recv(1000)
    until(lambda: server.gauges()["generated_tokens_total"] > before, 10)
    assert not server.idle()
    connection.close()
    assert_all_is_free_soon(server)


def test_while_queued(server: ServerProcess) -> None:
    running = [ask(server, model="tiny") for _ in range(RUNNING)]
    until(lambda: server.gauges()["requests_running"] == RUNNING, 10)
    queued = [ask(server, stream=i % 2 == 0) for i in range(10)]
    until(lambda: server.gauges()["requests_waiting"] == 10, 10)
    for connection in queued:
        connection.close()
    until(lambda: server.gauges()["requests_waiting"] == 0, 1)
    assert server.gauges()["requests_running"] == RUNNING, "those that stayed are still served"
    for connection in running:
        connection.close()
    assert_all_is_free_soon(server)


def test_fifty_at_once_in_every_state(server: ServerProcess) -> None:
    connections = [
        ask(server, stream=i % 2 == 0, model=("nine", "tiny")[i % 3 == 0], n=1 + i % 2)
        for i in range(50)
    ]
    until(lambda: server.gauges()["requests_running"] == RUNNING, 10)
    until(lambda: server.gauges()["requests_waiting"] == 75 - RUNNING, 10)
    for connection in connections:
        connection.close()
    assert_all_is_free_soon(server)


def test_an_idle_connection_stays_open_for_longer_than_clients_keep_theirs(
    server: ServerProcess,
) -> None:
    """httpx, and so the openai package, uses a connection again that was idle for up to 5 s."""
    url = httpx.URL(server.address)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=30)
    connection.connect()
    connection.auto_open = 0  # do not connect anew
    for pause in (6, 0):
        connection.request("GET", "/live")
        assert connection.getresponse().read()
        time.sleep(pause)
    connection.close()
