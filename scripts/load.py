"""Repeatable load on a server of OpenAI's completions: what is asked of it, and how that went."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any

import httpx
from tokenizers import Tokenizer

KINDS = ("base", "identical", "distinct", "uniform", "zipf", "summed")
MAX_ADAPTERS = 10_000

_ZIPF_EXPONENT = 1.1

#: One token each, with the space in front, in the vocabularies of common models.
_WORDS = (
    "able about above across after again almost along also among answer apple around back ball "
    "bank bear been before begin below best better between bird black blue board boat book both "
    "bread bring brown build call came carry cause center chair change clear close cold color "
    "copy corn cost could cross dark deep desk door down draw dream drive early earth east eight "
    "every face fall farm fast field fire fish five floor food form four free friend front game "
    "garden glass gold grass green ground half hand happy hard head hill horse hot hour ice island"
).split()


@dataclass(frozen=True)
class Workload:
    """Which of the first `adapters` adapters the requests name.

    "base" names none, "identical" always the first, "distinct" takes them in turn, "uniform"
    draws them alike, "zipf" draws number r (from 1) with weight 1 / r**1.1; "summed" asks for all
    of them in each request, weighted alike.
    """

    kind: str
    adapters: int = 0

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Such as `base`, `identical`, `distinct:8`, `zipf:64` or `summed:2`. Raises ValueError."""
        kind, colon, count = text.partition(":")
        if kind not in KINDS:
            raise ValueError(f"{text!r} is no workload; there are {', '.join(KINDS)}")
        if kind in ("base", "identical"):
            if colon:
                raise ValueError(f"{text!r}: {kind} takes no number of adapters")
            return cls(kind, int(kind == "identical"))
        if not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= MAX_ADAPTERS):
            raise ValueError(
                f"{text!r} needs a number of adapters, 1 to {MAX_ADAPTERS}, such as {kind}:8"
            )
        return cls(kind, int(count[:9]))

    def __str__(self) -> str:
        return f"{self.kind}:{self.adapters}" if self.adapters > 1 else self.kind

    def choose(self, count: int, random: Random) -> list[int | None]:
        """The adapters of `count` requests, by number; None is the base."""
        numbers = range(self.adapters)
        match self.kind:
            case "base":
                return [None] * count
            case "summed":
                return [0] * count
            case "identical" | "distinct":
                return [i % self.adapters for i in range(count)]
            case "uniform":
                return [*random.choices(numbers, k=count)]
        weights = [(n + 1) ** -_ZIPF_EXPONENT for n in numbers]
        return [*random.choices(numbers, weights, k=count)]


@dataclass(frozen=True)
class Job:
    """One request: exactly `max_tokens` are wanted. `arrival` is in seconds after the start.

    `summed` is how many adapters, from `adapter` on, are added up for it.
    """

    prompt: str
    max_tokens: int
    adapter: int | None
    arrival: float = 0.0
    summed: int = 1


@dataclass(frozen=True)
class Load:
    """The requests of one run. Lengths are in tokens, lowest and highest; `rate` is in 1/s."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    rate: float | None = None
    seed: int = 0

    def jobs(self, workload: Workload, round: int, tokenizer: Tokenizer | None) -> list[Job]:
        """Equal arguments give equal jobs.

        All workloads of a round have the same lengths and arrivals, so that their figures can be
        compared. The words of each run are its own: no server finds a prompt in its cache. Without
        a tokenizer a word is taken for a token.
        """
        sizes = Random(f"{self.seed}/{round}")
        words = Random(f"{self.seed}/{round}/{workload}/words")
        adapters = Random(f"{self.seed}/{round}/{workload}/adapters")
        jobs, clock = [], 0.0
        summed = workload.adapters if workload.kind == "summed" else 1
        for adapter in workload.choose(self.requests, adapters):
            prompt = _prompt(sizes.randint(*self.prompt), words, tokenizer)
            max_tokens = sizes.randint(*self.output)
            clock += sizes.expovariate(self.rate) if self.rate else 0.0
            jobs.append(Job(prompt, max_tokens, adapter, clock, summed))
        return jobs


@dataclass(frozen=True)
class Outcome:
    """How one request went. Times in seconds; `gaps` are those between chunks with text.

    Whoever counts a request with an `error` (all else is zero then) counts it as failed.
    """

    ttft: float = 0.0
    gaps: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class Client:
    """Sends jobs to the server at `url`; a job's adapter is an index into `adapters`.

    `timeout` bounds each request from start to end, in seconds.
    """

    def __init__(
        self, url: str, base_model: str, adapters: Sequence[str], key: str | None, timeout: float
    ) -> None:
        self._base_model = base_model
        self._adapters = adapters
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy would be measured too
        )

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def run(
        self, jobs: Sequence[Job], clients: int | None, on_outcome: Callable[[Outcome], None]
    ) -> float:
        """Send all jobs and return the seconds that took.

        With `clients`, so many send in turn, each its next job when its last has ended; without,
        every job is sent at its arrival and its TTFT counts from there.
        """
        start = time.perf_counter()
        waiting = iter(jobs)

        async def work() -> None:
            for job in waiting:
                on_outcome(await self.send(job))

        async def arrive(job: Job) -> None:
            await asyncio.sleep(start + job.arrival - time.perf_counter())
            on_outcome(await self.send(job, start + job.arrival))

        async with asyncio.TaskGroup() as group:
            for one in (arrive(job) for job in jobs) if clients is None else _times(clients, work):
                group.create_task(one)
        return time.perf_counter() - start

    async def send(self, job: Job, started: float | None = None) -> Outcome:
        """Stream one completion to its end. Whatever goes wrong is in the outcome."""
        started = time.perf_counter() if started is None else started
        try:
            async with asyncio.timeout(self._timeout):
                return await self._stream(job, started)
        except TimeoutError:
            return Outcome(error=f"not done within {self._timeout:g} seconds")
        except Exception as error:  # one request fails, the others go on
            return Outcome(error=f"{type(error).__name__}: {error}"[:300])

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(path)

    async def _stream(self, job: Job, started: float) -> Outcome:
        stamps: list[float] = []
        usage: dict[str, int] = {}
        finished = False
        async with self._http.stream("POST", "/v1/completions", json=self._body(job)) as answer:
            if answer.status_code != 200:
                raise FailedRequest(f"HTTP {answer.status_code}: {_reason(await answer.aread())}")
            async for line in answer.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if event.get("error"):
                    raise FailedRequest(f"in the stream: {_reason(data)}")
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    if choice.get("text"):
                        stamps.append(time.perf_counter())
                    finished = finished or bool(choice.get("finish_reason"))
        if not finished:
            raise FailedRequest("the stream ended early")
        output = usage.get("completion_tokens", len(stamps))
        if usage and output != job.max_tokens:
            raise FailedRequest(f"{output} tokens instead of {job.max_tokens}; is EOS ignored?")
        first = stamps[0] if stamps else time.perf_counter()
        gaps = tuple(b - a for a, b in zip(stamps, stamps[1:], strict=False))
        return Outcome(first - started, gaps, usage.get("prompt_tokens", 0), output)

    def _body(self, job: Job) -> dict[str, Any]:
        who: dict[str, Any] = {"model": self._base_model}
        if job.adapter is not None and job.summed == 1:
            who["model"] = self._adapters[job.adapter]
        elif job.adapter is not None:
            names = self._adapters[job.adapter : job.adapter + job.summed]
            who["adapters"] = [{"name": name, "weight": 1 / job.summed} for name in names]
        return {
            **who,
            "prompt": job.prompt,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class FailedRequest(Exception):
    """The server refused a request, or its answer is not what was asked for."""


def _prompt(tokens: int, random: Random, tokenizer: Tokenizer | None) -> str:
    text = " ".join(random.choices(_WORDS, k=tokens))
    if tokenizer is None:
        return text
    return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids[:tokens]))


def _times(count: int, work: Callable[[], Any]) -> list[Any]:
    return [work() for _ in range(count)]


def _reason(body: str | bytes) -> str:
    """The message of an error in OpenAI's envelope, else the beginning of what came."""
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return repr(body[:200])
