"""The requests of a measurement: repeatable, equally heavy, and counted only when whole."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
from tokenizers import Tokenizer

from scripts.load import Client, Job, Load, Outcome, Workload

LOAD = Load(requests=40, prompt=(32, 64), output=(16, 32), seed=3)


def picks(text: str, count: int) -> list[int | None]:
    return Workload.parse(text).choose(count, Random(0))


def test_each_workload_names_the_adapters_it_is_called_after() -> None:
    assert picks("base", 3) == [None] * 3
    assert picks("identical", 3) == [0] * 3
    assert picks("distinct:3", 7) == [0, 1, 2, 0, 1, 2, 0]
    assert set(picks("uniform:4", 200)) == {0, 1, 2, 3}
    assert picks("summed:3", 2) == [0, 0]


def test_a_summed_workload_asks_for_all_adapters_at_once() -> None:
    job = LOAD.jobs(Workload.parse("summed:2"), 0, None)[0]
    client = Client("http://127.0.0.1:1", "base", ["a", "b", "c"], None, 1)
    body = client._body(job)
    assert body["model"] == "base"
    assert body["adapters"] == [{"name": "a", "weight": 0.5}, {"name": "b", "weight": 0.5}]
    alone = client._body(LOAD.jobs(Workload("distinct", 2), 0, None)[1])
    assert alone["model"] == "b" and "adapters" not in alone


def test_zipf_weighs_adapters_by_their_rank() -> None:
    counts = Counter(picks("zipf:3", 30_000))
    assert counts[0] / counts[1] == pytest.approx(2**1.1, rel=0.1)
    assert counts[0] / counts[2] == pytest.approx(3**1.1, rel=0.1)


def test_equal_seeds_give_equal_requests_and_others_do_not() -> None:
    workload = Workload("uniform", 8)
    assert LOAD.jobs(workload, 1, None) == LOAD.jobs(workload, 1, None)
    other = Load(LOAD.requests, LOAD.prompt, LOAD.output, seed=4)
    assert LOAD.jobs(workload, 1, None) != other.jobs(workload, 1, None)


def test_workloads_of_a_round_are_equally_long_but_share_no_prompt() -> None:
    runs = [LOAD.jobs(Workload(*w), r, None) for r in (0, 1) for w in (("base", 0), ("zipf", 8))]
    sizes = [[(len(job.prompt.split()), job.max_tokens) for job in jobs] for jobs in runs]
    assert sizes[0] == sizes[1]
    assert sizes[2] == sizes[3]
    assert sizes[0] != sizes[2]
    assert len({job.prompt for jobs in runs for job in jobs}) == 4 * LOAD.requests
    assert all(32 <= words <= 64 and 16 <= tokens <= 32 for words, tokens in sizes[0])


def test_prompts_have_as_many_tokens_as_asked_for(scripted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(scripted / "tokenizer.json"))
    jobs = Load(20, (48, 48), (8, 8)).jobs(Workload("base"), 0, tokenizer)
    lengths = {len(tokenizer.encode(j.prompt, add_special_tokens=False).ids) for j in jobs}
    assert lengths == {48}


def test_arrivals_follow_the_rate() -> None:
    jobs = Load(2000, (1, 1), (1, 1), rate=50.0).jobs(Workload("base"), 0, None)
    arrivals = [job.arrival for job in jobs]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(2000 / 50, rel=0.1)


def chunk(text: str = "", finish: str | None = None, **rest: Any) -> str:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **rest})}\n\n"


USAGE = {"prompt_tokens": 5, "completion_tokens": 3}
WHOLE = [chunk("a"), chunk("b"), chunk("c", "length", usage=USAGE), "data: [DONE]\n\n"]


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """The address of a server that gives every request this answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def outcome(status: int, body: str) -> Outcome:
    """What the client makes of an answer to a request for three tokens."""

    async def send(url: str) -> Outcome:
        async with Client(url, "base", [], None, 30) as client:
            return await client.send(Job("go", 3, None))

    with answering(status, body) as url:
        return asyncio.run(send(url))


def test_a_whole_answer_is_timed_and_counted() -> None:
    result = outcome(200, "".join(WHOLE))
    assert result.error is None
    assert (result.prompt_tokens, result.output_tokens) == (5, 3)
    assert len(result.gaps) == 2
    assert result.ttft > 0


def test_a_server_without_usage_is_counted_by_its_chunks() -> None:
    body = chunk("a") + chunk("b") + chunk("", "length") + "data: [DONE]\n\n"
    assert outcome(200, body).output_tokens == 2


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, '{"error": {"message": "no such model"}}', "HTTP 404: no such model"),
        (500, "<html>", "HTTP 500: b'<html>'"),
        (200, chunk("a") + 'data: {"error": {"message": "gone"}}\n\n', "in the stream: gone"),
        (200, "".join(WHOLE[:2]), "ended early"),
        (200, "", "ended early"),
        (200, "data: {\n\n", "JSONDecodeError"),
        (200, "data: []\n\n", "AttributeError"),
        (
            200,
            chunk("a", "stop", usage=USAGE | {"completion_tokens": 1}),
            "1 tokens instead of 3; is EOS ignored?",
        ),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(status: int, body: str, error: str) -> None:
    result = outcome(status, body)
    assert result.error is not None
    assert error in result.error
    assert result.output_tokens == 0
