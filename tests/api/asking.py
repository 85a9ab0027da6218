"""Requests as the tests ask them, and the rules that every answer must keep."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx

from tests.api.server import Running

#: Files of one upload: name and content.
Files = list[tuple[str, bytes]]

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "@", "temperature": 0}
#: The base goes on from "@" like this.
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def frames(server: Running, path: str, **body: Any) -> list[Any]:
    """The decoded frames of a stream; a complete one ends with "[DONE]"."""
    with server.client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [d if (d := line[6:]) == "[DONE]" else json.loads(d) for line in lines]


def streamed(server: Running, **body: Any) -> dict[int, tuple[str, str]]:
    """Text and finish reason of each choice of a completion stream, whose rules are checked."""
    got = frames(server, "/v1/completions", **(COMPLETION | body))
    assert got[-1] == "[DONE]" and "[DONE]" not in got[:-1]
    choices: dict[int, list[dict[str, Any]]] = {}
    for frame in got[:-1]:
        for choice in frame["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    result = {}
    for index, parts in choices.items():
        reasons = [part["finish_reason"] for part in parts]
        assert reasons[-1] is not None and reasons[:-1] == [None] * (len(reasons) - 1)
        result[index] = "".join(part["text"] for part in parts), reasons[-1]
    return result


def whole(server: Running, **body: Any) -> dict[int, tuple[str, str]]:
    choices = server.complete(**(COMPLETION | body))["choices"]
    return {c["index"]: (c["text"], c["finish_reason"]) for c in choices}


def staged(server: Running) -> list[str]:
    return os.listdir(server.settings.data / "adapters" / "staging")


def post(server: Running, name: str, files: Files, field: str = "files") -> httpx.Response:
    form = [(field, (filename, content)) for filename, content in files]
    return server.client.post("/v1/adapters", data={"name": name}, files=form)


def violations(response: httpx.Response) -> set[str]:
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["code"] == "adapter_rejected"
    return {violation["code"] for violation in error["violations"]}


def models(server: Running) -> list[str]:
    return [model["id"] for model in server.client.get("/v1/models").json()["data"]]
