"""Clients that go away: what their requests held is free again within a second."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from api.disconnect import while_connected
from tests.api.server import Running, serving, until
from tests.tiny import signature_adapter


@pytest.fixture(scope="module")
def narrow(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that runs one sequence at a time and queues the others; has the adapter `sig`."""
    folder = tmp_path_factory.mktemp("narrow")
    adapter = signature_adapter(scripted, folder / "adapter", 60)
    with serving(scripted, folder / "data", max_running=1, max_waiting=60) as running:
        assert running.upload("sig", adapter).status_code == 201
        yield running


def ask(server: Running, **body: Any) -> socket.socket:
    """Send a request that would take seconds, and leave the answer unread."""
    body = {"model": "sig", "prompt": "!", "max_tokens": 500, "ignore_eos": True} | body
    content = json.dumps(body).encode()
    connection = server.connect()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_a_running_request_is_aborted(narrow: Running, stream: bool, n: int) -> None:
    connection = ask(narrow, stream=stream, n=n)
    until(lambda: narrow.engine.stats().running > 0, 10)
    if stream:
        assert b"200 OK" in connection.recv(1000)
    assert not narrow.idle()
    connection.close()
    until(narrow.idle, 1)
    assert narrow.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


def test_many_queued_requests_are_aborted_at_once(narrow: Running) -> None:
    connections = [ask(narrow, stream=i % 2 == 0) for i in range(50)]
    until(lambda: narrow.engine.stats().waiting >= 49, 10)
    for connection in connections:
        connection.close()
    until(narrow.idle, 1)
    started = time.monotonic()
    narrow.complete(max_tokens=3)
    assert time.monotonic() - started < 2


def test_a_queue_that_is_full_is_said_so(narrow: Running) -> None:
    connections = [ask(narrow) for _ in range(61)]
    try:
        until(lambda: len(narrow.engine._generations) == 61, 10)
        for body in ({}, {"stream": True}):
            response = narrow.client.post(
                "/v1/completions", json={"model": "sig", "prompt": "x"} | body
            )
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
    finally:
        for connection in connections:
            connection.close()
    until(narrow.idle, 1)


def test_several_choices_are_queued_all_or_not_at_all(narrow: Running) -> None:
    connections = [ask(narrow) for _ in range(58)]
    try:
        until(lambda: len(narrow.engine._generations) == 58, 10)
        body = {"model": "tiny", "prompt": "x", "n": 4}
        assert narrow.client.post("/v1/completions", json=body).status_code == 429
        until(lambda: len(narrow.engine._generations) == 58, 1)
    finally:
        for connection in connections:
            connection.close()
    until(narrow.idle, 1)


def test_work_ends_before_the_disconnect_is_reported() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def run() -> None:
        with pytest.raises(ClientDisconnect):
            await while_connected(receive, work())
        assert ended == [True]

    asyncio.run(run())


def test_a_result_comes_back_and_the_watch_ends() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.sleep(30)
        raise AssertionError

    async def work() -> int:
        return 3

    async def run() -> None:
        assert await while_connected(receive, work()) == 3
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
