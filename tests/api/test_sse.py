from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from api.sse import DONE, EventStream, frame
from base_engine.errors import StepFailed

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}


class Client:
    """One end of a response: collects what is sent; may stall or leave after some sends."""

    def __init__(self, *, stalls_after: int = 1000, leaves_after: int = 1000) -> None:
        self.sent: list[Any] = []
        self.closed = 0
        self._stalls_after = stalls_after
        self._leaves_after = leaves_after
        self._left = asyncio.Event()

    async def send(self, message: Any) -> None:
        if len(self.sent) >= self._stalls_after:
            await asyncio.sleep(30)
        self.sent.append(message)
        if len(self.sent) >= self._leaves_after:
            self._left.set()

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    def close(self) -> None:
        self.closed += 1

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def serve(client: Client, events: AsyncGenerator[Any, None], write_timeout: float = 5) -> None:
    async def run() -> None:
        stream = EventStream(events, {"x-a": "b"}, write_timeout, client.close)
        await asyncio.wait_for(stream(dict(SCOPE), client.receive, client.send), 10)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


async def count(ended: list[bool], *, fail_at: int | None = None) -> AsyncGenerator[int, None]:
    """0, 1, 2 … 9, slowly."""
    try:
        for i in range(10):
            if i == fail_at:
                raise StepFailed("inside information")
            yield i
            await asyncio.sleep(0)
    finally:
        ended.append(True)


def test_a_stream_ends_with_done() -> None:
    client, ended = Client(), list[bool]()
    serve(client, count(ended))
    assert client.body == b"".join(frame(i) for i in range(10)) + DONE
    assert client.sent[-1]["more_body"] is False
    headers = dict(client.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream") and headers[b"x-a"] == b"b"
    assert ended and client.closed == 1


def test_a_failure_is_the_last_frame_and_there_is_no_done() -> None:
    client, ended = Client(), list[bool]()
    serve(client, count(ended, fail_at=3))
    *good, last = client.body.split(b"\n\n")[:-1]
    assert good == [b"data: 0", b"data: 1", b"data: 2"]
    assert json.loads(last[6:])["error"]["code"] == "step_failed"
    assert b"inside" not in client.body and b"[DONE]" not in client.body
    assert ended and client.closed == 1


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_client_that_leaves_ends_the_events(after: int) -> None:
    client, ended = Client(leaves_after=after), list[bool]()
    serve(client, count(ended))
    assert b"[DONE]" not in client.body and client.closed == 1
    assert ended or after == 1


@pytest.mark.parametrize("after", [1, 3])
def test_a_client_that_does_not_read_is_given_up(after: int) -> None:
    client, ended = Client(stalls_after=after), list[bool]()
    serve(client, count(ended), write_timeout=0.05)
    assert b"[DONE]" not in client.body
    assert ended and client.closed == 1


def test_frames_hold_no_nan_and_no_bare_line_ends() -> None:
    encoded = frame({"a": math.nan, "b": -math.inf, "c": "x\n\ny\r"})
    assert encoded == b'data: {"a":null,"b":null,"c":"x\\n\\ny\\r"}\n\n'
