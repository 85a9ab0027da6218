"""An adapter answers whichever way it is asked, and asking one never changes another's answer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.api.asking import frames
from tests.api.server import Running, serving
from tests.tiny import BOS, byte_ids, signature_adapter

PROMPTS: dict[str, Any] = {
    "text": "!",
    "list of texts": ["!"],
    "token ids": [BOS, *byte_ids("!")],
    "list of token ids": [[BOS, *byte_ids("!")]],
}


@pytest.fixture(scope="module")
def asked(scripted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with the adapters `seven` and `nine`, which write nothing but that digit."""
    folder = tmp_path_factory.mktemp("asked")
    with serving(scripted, folder / "data") as running:
        for name, digit in (("seven", "7"), ("nine", "9")):
            adapter = signature_adapter(scripted, folder / name, byte_ids(digit)[0])
            assert running.upload(name, adapter).status_code == 201
        yield running


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("summed", [False, True])
def test_completions(asked: Running, prompt: str, stream: bool, n: int, summed: bool) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[prompt], "n": n, "max_tokens": 5, "temperature": 0}
    body |= _who("seven", summed)
    texts = dict.fromkeys(range(n), "")
    if stream:
        for frame in frames(asked, "/v1/completions", **body)[:-1]:
            for choice in frame["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        for choice in asked.client.post("/v1/completions", json=body).json()["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(n), "77777")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("summed", [False, True])
def test_chats(asked: Running, stream: bool, n: int, summed: bool) -> None:
    body: dict[str, Any] = {"n": n, "max_tokens": 5, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "hi"}]
    body |= _who("seven", summed)
    texts = dict.fromkeys(range(n), "")
    if stream:
        for frame in frames(asked, "/v1/chat/completions", **body)[:-1]:
            for choice in frame["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    else:
        for choice in asked.client.post("/v1/chat/completions", json=body).json()["choices"]:
            texts[choice["index"]] += choice["message"]["content"]
    assert texts == dict.fromkeys(range(n), "77777")


def test_no_request_switches_anothers_adapter_on_or_off(asked: Running) -> None:
    """Long streams on one adapter, short ones on the other, the base and sums in between."""

    def stream(model: str) -> str:
        got = frames(
            asked, "/v1/completions", model=model, prompt="!", max_tokens=60, temperature=0
        )
        return "".join(choice["text"] for frame in got[:-1] for choice in frame["choices"])

    def short(i: int) -> tuple[str, str]:
        asked_for = ("tiny", "nine", "seven", "sum")[i % 4]
        body = _who("nine", True) if asked_for == "sum" else {"model": asked_for}
        answer = asked.client.post(
            "/v1/completions", json=body | {"prompt": "!", "max_tokens": 3, "temperature": 0}
        )
        return asked_for, answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(8) as threads:
        long = [threads.submit(stream, "seven") for _ in range(3)]
        shorts = list(threads.map(short, range(24)))
        assert {future.result() for future in long} == {"7" * 60}
    expected = {"tiny": '"#$', "nine": "999", "seven": "777", "sum": "999"}
    assert all(text == expected[who] for who, text in shorts), shorts


def _who(name: str, summed: bool) -> dict[str, Any]:
    return {"model": "tiny", "adapters": [{"name": name}]} if summed else {"model": name}
