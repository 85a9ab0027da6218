from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from api.middleware import LogRequests
from tests.api.server import Running, until

ACCESS = "lorikeet.access"


def test_a_request_is_logged_in_one_line_without_its_content(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, ACCESS):
        server.complete(prompt="top secret", max_tokens=2, headers={"x-request-id": "abc-1"})
        until(lambda: bool(caplog.records), 5)
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith("POST /v1/completions 200 ") and " ms abc-1" in line
    assert "secret" not in line


def test_a_stream_is_logged_when_it_has_ended(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": "tiny", "prompt": "!", "max_tokens": 5, "stream": True}
    with caplog.at_level(logging.INFO, ACCESS):
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            response.read()
        until(lambda: bool(caplog.records), 5)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/metrics"])
def test_probes_are_not_logged(
    server: Running, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    with caplog.at_level(logging.INFO, ACCESS):
        server.client.get(path).raise_for_status()
        server.client.get("/v1/models?key=secret").raise_for_status()
        until(lambda: bool(caplog.records), 5)
    assert [record.getMessage()[:19] for record in caplog.records] == ["GET /v1/models 200 "]


def line_of(app: Any, caplog: pytest.LogCaptureFixture, **scope: Any) -> str:
    """What is logged for a request that `app` answers."""

    async def send(message: Any) -> None:
        pass

    request = {"type": "http", "method": "GET", "path": "/", "request_id": "r"} | scope
    with caplog.at_level(logging.INFO, ACCESS):
        asyncio.run(LogRequests(app)(request, send, send))  # type: ignore[arg-type]
    (record,) = caplog.records
    return record.getMessage()


async def leaves(scope: Any, receive: Any, send: Any) -> None:
    pass


def test_paths_and_models_cannot_forge_lines(caplog: pytest.LogCaptureFixture) -> None:
    line = line_of(leaves, caplog, path="/a\nb" + "x" * 5000, model="m\n")
    assert line.startswith("GET /a%0Abxxx") and line.endswith(" r model=m%0A")
    assert len(line) < 300


def test_a_client_that_left_before_its_answer_has_no_status(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert line_of(leaves, caplog).startswith("GET / - ")
