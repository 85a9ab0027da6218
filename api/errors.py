"""From exception to HTTP answer: one table, one envelope.

ApiError                what the HTTP layer itself refuses
├── BadRequest          400, names the parameter
├── Missing             404
├── BodyTooLarge        413
├── WrongMediaType      415
└── BodyTimeout         408

Everything else comes from the layers below; the table gives each its status.
Bodies never hold paths, addresses or tracebacks: where an exception's own text might, the table
has a fixed sentence instead, and the details go to the log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from adapters.errors import AdapterRejected, AdapterUnavailable
from base_engine.errors import EngineStopped, NotInvoked, PromptTooLong, QueueFull, StepFailed
from base_engine.sampler import LogitsNotFinite
from base_engine.template_process import ChatTemplateBusy
from base_engine.tokenizer import ChatTemplateError, ChatTemplateMissing
from registry.errors import Conflict, InvalidName, NotFound, RegistryUnavailable, StorageFull

#: Seconds a client should wait before it tries again after a 503.
RETRY_AFTER = 5

_log = logging.getLogger("lorikeet.api")


class ApiError(Exception):
    """Something the HTTP layer refuses. `param` names the field of the request at fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BadRequest(ApiError):
    """The request is malformed or asks for something that is not supported."""


class Missing(ApiError):
    """What the request names does not exist."""


class BodyTooLarge(ApiError):
    """The body is larger than the server takes."""


class WrongMediaType(ApiError):
    """The body's content type is not the one this route reads."""


class BodyTimeout(ApiError):
    """The client stopped sending in the middle of its body."""


@dataclass(frozen=True)
class Fault:
    """How one kind of exception is answered.

    `message` None means the exception's own text, which must then be fit for clients. `retry`:
    None says nothing, True sends Retry-After, False tells SDKs that trying again is useless.
    `code` and `param` are for exceptions that name none themselves.
    """

    status: int
    type: str
    code: str
    message: str | None = None
    retry: bool | None = None
    param: str | None = None


_INVALID = "invalid_request_error"

#: The most special class comes first where one derives from another.
FAULTS: tuple[tuple[type[Exception], Fault], ...] = (
    (BadRequest, Fault(400, _INVALID, "invalid_value")),
    (Missing, Fault(404, _INVALID, "not_found")),
    (BodyTimeout, Fault(408, _INVALID, "body_timeout", retry=False)),
    (BodyTooLarge, Fault(413, _INVALID, "request_too_large")),
    (WrongMediaType, Fault(415, _INVALID, "unsupported_media_type")),
    (ClientDisconnect, Fault(400, _INVALID, "client_disconnected", "The client went away.")),
    (ChatTemplateBusy, Fault(429, "rate_limit_error", "chat_template_busy", retry=True)),
    (ChatTemplateMissing, Fault(400, _INVALID, "chat_template_missing")),
    (ChatTemplateError, Fault(400, _INVALID, "chat_template_error")),
    (NotInvoked, Fault(400, _INVALID, "adapter_not_invoked")),
    (InvalidName, Fault(400, _INVALID, "invalid_name", param="name")),
    (PromptTooLong, Fault(400, _INVALID, "context_length_exceeded")),
    (NotFound, Fault(404, _INVALID, "model_not_found", param="model")),
    (Conflict, Fault(409, _INVALID, "conflict", retry=False)),
    (AdapterRejected, Fault(422, _INVALID, "adapter_rejected")),
    (QueueFull, Fault(429, "rate_limit_error", "queue_full", retry=True)),
    (
        AdapterUnavailable,
        Fault(
            503,
            "server_error",
            "adapter_unavailable",
            "The adapter cannot be loaded: its stored files are missing or damaged, or it is too "
            "large for this server. Uploading it again tells which.",
            retry=False,
        ),
    ),
    (
        RegistryUnavailable,
        Fault(
            503,
            "server_error",
            "registry_unavailable",
            "The adapter registry cannot be changed at the moment.",
            retry=True,
        ),
    ),
    (
        EngineStopped,
        Fault(503, "server_error", "engine_stopped", "The engine has stopped.", retry=True),
    ),
    (
        StorageFull,
        Fault(507, "server_error", "storage_full", "There is no room to store this.", retry=False),
    ),
    (
        StepFailed,
        Fault(500, "server_error", "step_failed", "The forward pass of this request failed."),
    ),
    (LogitsNotFinite, Fault(500, "server_error", "output_not_finite", retry=False)),
)

_UNKNOWN = Fault(500, "server_error", "internal_error", "The server failed on this request.")


def fault_of(error: Exception) -> Fault:
    """The table's row for `error`; an internal error where it has none."""
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        code = phrase.lower().replace(" ", "_").replace("-", "_")
        kind = _INVALID if error.status_code < 500 else "server_error"
        return Fault(error.status_code, kind, code, f"{phrase}.")
    return next((fault for kind, fault in FAULTS if isinstance(error, kind)), _UNKNOWN)


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's envelope for `error`; a refused adapter adds all its violations and its report."""
    fault = fault_of(error)
    body: dict[str, Any] = {
        "message": fault.message or str(error),
        "type": fault.type,
        "param": getattr(error, "param", None) or fault.param,
        "code": getattr(error, "code", None) or fault.code,
    }
    if isinstance(error, AdapterRejected):
        body["violations"] = [violation.to_json() for violation in error.violations]
        if error.report is not None:
            return {"error": body, "report": error.report}
    return {"error": body}


def error_response(request: Request, error: Exception) -> Response:
    """The answer to `error`, for every exception handler of the application."""
    fault = fault_of(error)
    if fault.status >= 500:
        log_failure(error, request)
    headers = dict(getattr(error, "headers", None) or {})
    if fault.retry is not None:
        headers["x-should-retry"] = "true" if fault.retry else "false"
    if fault.retry:
        headers["retry-after"] = str(getattr(error, "retry_after", RETRY_AFTER))
    body = error_body(error)
    if fault.status == 404 and isinstance(error, HTTPException):
        body["error"]["message"] = _no_route(request)
    if fault.status == 405:
        methods = _methods(request)
        headers["Allow"] = ", ".join(methods)
        taken = " and ".join(methods)
        body["error"]["message"] = f"{request.method} is not taken by this route, only {taken}."
    return Response(msgspec.json.encode(body), fault.status, headers, "application/json")


def log_failure(error: Exception, request: Request) -> None:
    """Log a failure of the server's own under the request's id, with its traceback.

    Requests cut by a stopping engine are no surprise: a line each is enough. An engine that fails
    logs that itself.
    """
    request_id = request.scope.get("request_id", "-")
    if isinstance(error, EngineStopped):
        _log.info("request %s was cut: %s", request_id, error)
        return
    _log.error("request %s failed: %r", request_id, error, exc_info=error)


def _no_route(request: Request) -> str:
    path = request.scope["path"]
    for other in (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/")):
        if other != path and _matches(request, other):
            return f"There is no {_shown(path)}; did you mean {_shown(other)}?"
    return f"There is no {_shown(path)}; routes begin with /v1, such as /v1/models."


def _methods(request: Request) -> list[str]:
    """The methods that the request's path takes, over all of its routes."""
    routes = _matches(request, request.scope["path"])
    return sorted({method for route in routes for method in route.methods or ()} - {"HEAD"})


def _matches(request: Request, path: str) -> list[Route]:
    app = request.scope.get("app")
    scope = {**request.scope, "path": path, "root_path": ""}
    routes = [route for route in app.routes if isinstance(route, Route)] if app is not None else []
    return [route for route in routes if route.matches(scope)[0] is not Match.NONE]


def _shown(path: str) -> str:
    return quote(path[:200])
