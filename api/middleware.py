"""What happens around every request, in plain ASGI: streams and disconnects pass untouched."""

from __future__ import annotations

import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import error_response
from api.metrics import Metrics

REQUEST_ID_HEADER = "x-request-id"

_access_log = logging.getLogger("lorikeet.access")

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class RequestId:
    """Gives each request an id, the client's own if it is well-formed, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class AnswerFailures:
    """Answers what no exception handler knows, and logs it, as long as nothing was sent yet.

    Starlette would raise it again after answering, and the server then cuts the connection: the
    client's next request on it would fail too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        except Exception as error:
            if started:
                raise
            await error_response(Request(scope), error)(scope, receive, send)


class LogRequests:
    """Logs one line per request when its answer has ended; nothing of what was asked.

    Health probes and /metrics are left out. The status is "-" where the client left before there
    was one. A handler that knows the model notes it as `scope["model"]`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNLOGGED:
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        status = "-"

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        finally:
            milliseconds = (time.monotonic() - started) * 1000
            model = f" model={quote(scope['model'][:100])}" if "model" in scope else ""
            _access_log.info(
                "%s %s %s %.1f ms %s%s",
                scope["method"],
                quote(scope["path"][:200]),
                status,
                milliseconds,
                scope["request_id"],
                model,
            )


_UNLOGGED = ("/live", "/ready", "/health", "/metrics")


class CountRequests:
    """Counts requests by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_counted)
        finally:
            endpoint = scope.get("endpoint")
            route = endpoint.__name__ if endpoint is not None else "unmatched"
            self.metrics.requests.labels(route, str(status)).inc()
