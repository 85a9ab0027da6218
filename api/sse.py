"""Server-sent events: frames out, and the stream's end when either side fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.disconnect import while_connected
from api.errors import error_body, fault_of, log_failure

DONE = b"data: [DONE]\n\n"


def frame(value: Any) -> bytes:
    """One event with `value` as JSON; NaN and infinities become null."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields, one frame each, then `[DONE]`.

    If `events` raises, an error frame is the last one and there is no `[DONE]`. `events` is closed
    and `on_close` called whatever happens: when it ends, when the client goes away, or when the
    client has not read for `write_timeout` seconds.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        headers: Mapping[str, str],
        write_timeout: float,
        on_close: Callable[[], None],
    ) -> None:
        self.events = events
        self.on_close = on_close
        self.write_timeout = write_timeout
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self.events):
                await while_connected(receive, self._send_all(Request(scope), send))
        except ClientDisconnect:
            pass
        finally:
            self.on_close()

    async def _send_all(self, request: Request, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            try:
                async with asyncio.timeout(self.write_timeout):
                    await send({"type": "http.response.body", "body": data, "more_body": more})
            except TimeoutError:
                raise ClientDisconnect from None

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = DONE
        try:
            async for event in self.events:
                await write(frame(event))
        except ClientDisconnect:
            raise
        except Exception as error:
            if fault_of(error).status >= 500:
                log_failure(error, request)
            last = frame(error_body(error))
        await write(last, more=False)
