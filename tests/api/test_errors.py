from __future__ import annotations

import logging

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from adapters import errors as adapter_errors
from adapters.errors import AdapterRejected, AdapterUnavailable, Violation
from api import errors
from api.errors import BadRequest, error_body, error_response, fault_of
from base_engine import errors as engine_errors
from base_engine.errors import EngineStopped, QueueFull
from base_engine.sampler import LogitsNotFinite
from registry import errors as registry_errors
from registry.errors import InvalidName, NotFound, RegistryUnavailable, StorageFull
from tests.api.server import Running

REQUEST = Request({"type": "http", "method": "GET", "path": "/", "headers": []})


def public_errors() -> list[type[Exception]]:
    """The errors that can reach a handler: the leaves of every folder's tree."""
    modules = (errors, engine_errors, registry_errors, adapter_errors)
    kinds = [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ in _OURS
    ]
    leaves = [kind for kind in set(kinds) if not kind.__subclasses__()]
    return sorted(leaves, key=lambda kind: kind.__name__)


_OURS = {"api.errors", "base_engine.errors", "registry.errors", "adapters.errors"}
#: Ends the start of the server and never meets a request.
_AT_START = {"EmbeddedServerError", "ModelUnsupported"}


@pytest.mark.parametrize("kind", [k for k in public_errors() if k.__name__ not in _AT_START])
def test_every_error_has_a_row_of_its_own(kind: type[Exception]) -> None:
    error = kind.__new__(kind)
    assert fault_of(error).code != "internal_error", "missing in the table"


def test_the_envelope_has_all_four_keys() -> None:
    assert error_body(BadRequest("n: too large.", "n")) == {
        "error": {
            "message": "n: too large.",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }


def test_a_refused_adapter_lists_all_violations() -> None:
    violations = [Violation("a", "x", "is bad"), Violation("b", "y", "is worse")]
    body = error_body(AdapterRejected(violations))["error"]
    assert body["violations"] == [
        {"code": "a", "subject": "x", "message": "is bad"},
        {"code": "b", "subject": "y", "message": "is worse"},
    ]
    assert body["message"] == str(AdapterRejected(violations))


def test_what_the_registry_refuses_names_the_field_of_the_request() -> None:
    assert error_body(NotFound("no such adapter"))["error"]["param"] == "model"
    assert error_body(InvalidName("too long"))["error"]["param"] == "name"


@pytest.mark.parametrize(
    ("error", "status", "retry_after", "should_retry"),
    [
        (QueueFull("full", retry_after=7), 429, "7", "true"),
        (RegistryUnavailable("unix:///secret.sock refused"), 503, "5", "true"),
        (AdapterUnavailable("/secret/path is gone"), 503, None, "false"),
        (StorageFull("/secret is full"), 507, None, "false"),
        (LogitsNotFinite("not a number"), 500, None, "false"),
        (BadRequest("x"), 400, None, None),
        (HTTPException(404), 404, None, None),
        (HTTPException(405), 405, None, None),
        (ValueError("secret"), 500, None, None),
    ],
)
def test_only_what_passes_by_itself_is_worth_a_retry(
    error: Exception, status: int, retry_after: str | None, should_retry: str | None
) -> None:
    response = error_response(REQUEST, error)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert response.headers.get("x-should-retry") == should_retry
    assert b"secret" not in response.body


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nothing", "There is no /nothing; routes begin with /v1, such as /v1/models."),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/metrics", "did you mean /metrics?"),
        ("/v1/completions/", "did you mean /v1/completions?"),
        ("/a%0Ab", "There is no /a%0Ab;"),
        ("/" + "x" * 5000, "There is no /xxx"),
    ],
)
def test_an_unknown_path_is_named_with_the_nearest(server: Running, path: str, words: str) -> None:
    error = server.client.get(path)
    assert error.status_code == 404
    assert words in error.json()["error"]["message"]
    assert len(error.content) < 500


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/adapters", "GET, POST"),
        ("POST", "/v1/adapters/x", "DELETE, GET"),
        ("GET", "/v1/chat/completions", "POST"),
    ],
)
def test_a_wrong_method_is_answered_with_the_right_ones(
    server: Running, method: str, path: str, allowed: str
) -> None:
    response = server.client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    message = response.json()["error"]["message"]
    assert message == f"{method} is not taken by this route, only {allowed.replace(', ', ' and ')}."


def test_requests_cut_by_a_stopping_engine_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lorikeet.api"):
        error_response(REQUEST, EngineStopped("the engine was stopped"))
        error_response(REQUEST, ValueError("a fault"))
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR"]
