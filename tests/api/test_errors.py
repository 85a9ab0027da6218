from __future__ import annotations

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from adapters import errors as adapter_errors
from adapters.errors import AdapterRejected, AdapterUnavailable, Violation
from api import errors
from api.errors import BadRequest, error_body, error_response, fault_of
from base_engine import errors as engine_errors
from base_engine.errors import QueueFull
from base_engine.sampler import LogitsNotFinite
from registry import errors as registry_errors
from registry.errors import RegistryUnavailable, StorageFull

REQUEST = Request({"type": "http", "headers": []})


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
            "code": None,
        }
    }


def test_a_refused_adapter_lists_all_violations() -> None:
    violations = [Violation("a", "x", "is bad"), Violation("b", "y", "is worse")]
    body = error_body(AdapterRejected(violations))["error"]
    assert body["violations"] == [
        {"code": "a", "subject": "x", "message": "is bad"},
        {"code": "b", "subject": "y", "message": "is worse"},
    ]
    assert "x: is bad; y: is worse" in body["message"]


@pytest.mark.parametrize(
    ("error", "status", "retry_after", "should_retry"),
    [
        (QueueFull("full", retry_after=7), 429, "7", "true"),
        (RegistryUnavailable("unix:///secret.sock refused"), 503, "5", "true"),
        (AdapterUnavailable("/secret/path is gone"), 503, None, "false"),
        (StorageFull("/secret is full"), 507, None, "false"),
        (LogitsNotFinite("not a number"), 500, None, "false"),
        (BadRequest("x"), 400, None, None),
        (HTTPException(405, headers={"allow": "GET"}), 405, None, None),
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
    if status == 405:
        assert response.headers["allow"] == "GET"
