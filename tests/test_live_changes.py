"""Adapters come, change and go while others generate: nobody notices, and nothing stale remains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from adapters.weights import load_weights
from api.settings import ByteSize
from tests.api.server import Running, serving
from tests.tiny import make_adapter, oracle_logprobs, signature_adapter, tiny_base

#: Longer than a few KV blocks, so that the prefix cache has something to keep.
PROMPT = [3 + (7 * i) % 250 for i in range(64)]


def ask(server: Running, model: str, **body: Any) -> Any:
    return server.complete(model, prompt=PROMPT, max_tokens=6, logprobs=0, ignore_eos=True, **body)


def assert_answer_of(base: Path, adapter: Path | None, answer: Any, server: Running) -> None:
    """The answer's log-probabilities are those of PEFT for greedy tokens of `adapter`."""
    got = torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])
    ids = list(PROMPT)
    want = []
    for _ in got:
        row = oracle_logprobs(base, adapter, ids)[-1]
        want.append(row.max())
        ids.append(int(row.argmax()))
    torch.testing.assert_close(got, torch.stack(want), atol=1e-4, rtol=0)


def cached(answer: Any) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_new_weights_under_an_old_name_never_see_the_old_ones_cache(
    llama_base: Path, tmp_path: Path
) -> None:
    """Keys and values depend on these adapters from the first layer on."""
    a, b = (
        make_adapter(llama_base, tmp_path / n, seed=i, std=0.3, target_modules=["k_proj", "v_proj"])
        for i, n in enumerate("ab")
    )
    with serving(llama_base, tmp_path / "data") as server:
        for way in ("replace", "delete and upload again"):
            assert server.upload("style", a).status_code == 201
            assert_answer_of(llama_base, a, ask(server, "style"), server)
            warm = ask(server, "style")
            assert_answer_of(llama_base, a, warm, server)
            assert cached(warm) > 0
            if way != "replace":
                assert server.client.delete("/v1/adapters/style").status_code == 200
            assert server.upload("style", b).status_code == 201
            assert_answer_of(llama_base, b, ask(server, "style"), server)
            assert_answer_of(llama_base, None, ask(server, "tiny"), server)
            assert server.client.delete("/v1/adapters/style").status_code == 200


def test_the_same_weights_may_share_a_cache_and_others_may_not(
    llama_base: Path, tmp_path: Path
) -> None:
    a, b = (
        make_adapter(llama_base, tmp_path / n, seed=i, std=0.3, target_modules=["k_proj", "v_proj"])
        for i, n in enumerate("ab")
    )
    folders = {"tiny": None, "a": a, "b": b}
    with serving(llama_base, tmp_path / "data") as server:
        server.upload("a", a)
        server.upload("b", b)
        seen: set[str] = set()
        for model in ("tiny", "a", "b", "a", "tiny", "b"):
            answer = ask(server, model)
            assert_answer_of(llama_base, folders[model], answer, server)
            assert (cached(answer) > 0) == (model in seen)
            seen.add(model)


def test_a_name_replaced_while_adapters_evict_each_other_never_goes_back(
    llama_base: Path, tmp_path: Path
) -> None:
    """Device memory for one adapter, host memory for two, three names in turn."""
    old = {n: make_adapter(llama_base, tmp_path / n, seed=i) for i, n in enumerate("abc")}
    new = make_adapter(llama_base, tmp_path / "new", seed=9)
    one = ByteSize(sum(2 * 8 * (i + o) for i, o in PROJECTIONS) * 4)
    memory = {"adapter_memory": one, "host_adapter_memory": ByteSize(2 * one)}
    with serving(llama_base, tmp_path / "data", **memory) as server:
        for name, folder in old.items():
            assert server.upload(name, folder).status_code == 201
        for name in "abcabc":
            assert_answer_of(llama_base, old[name], ask(server, name), server)
        assert server.upload("b", new).status_code == 201
        for name in "bcabab":
            now = new if name == "b" else old[name]
            assert_answer_of(llama_base, now, ask(server, name), server)
        assert_answer_of(llama_base, old["b"], ask(server, "b@1"), server)
        stats = server.engine.adapters.stats()
        assert stats.evictions_total >= 10 and stats.loads_total > 4


#: Inputs and outputs of one layer's linears.
PROJECTIONS = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]


class Streams:
    """Token streams that run in the background and note when each token came."""

    def __init__(self, server: Running, models: list[str], tokens: int) -> None:
        self.texts: list[str] = [""] * len(models)
        self.gaps: list[float] = []
        self._server = server
        self._tokens = tokens
        self._executor = ThreadPoolExecutor(len(models))
        self._started = threading.Barrier(len(models) + 1)
        self._futures = [
            self._executor.submit(self._run, i, model) for i, model in enumerate(models)
        ]

    def wait_until_started(self) -> None:
        self._started.wait(60)

    @property
    def done(self) -> bool:
        return all(future.done() for future in self._futures)

    def finish(self) -> None:
        for future in self._futures:
            future.result(120)
        self._executor.shutdown()

    def _run(self, index: int, model: str) -> None:
        stream = self._server.openai.completions.create(
            model=model, prompt="!", max_tokens=self._tokens, temperature=0, stream=True
        )
        last = None
        for chunk in stream:
            now = time.monotonic()
            if last is None:
                self._started.wait(60)
            else:
                self.gaps.append(now - last)
            last = now
            self.texts[index] += chunk.choices[0].text


def test_uploads_and_deletes_during_generation_change_no_stream(
    scripted: Path, tmp_path: Path
) -> None:
    letters = {name: 3 + ord(name.upper()) for name in "abcdefgh"}
    folders = {n: signature_adapter(scripted, tmp_path / n, t) for n, t in letters.items()}
    tokens = 300
    with serving(scripted, tmp_path / "data") as server:
        for name in "abcd":
            assert server.upload(name, folders[name]).status_code == 201
        quiet = server.complete("tiny", max_tokens=tokens)["choices"][0]["text"]
        streams = Streams(server, [*"abcd", "tiny", "tiny", "a", "b"], tokens)
        streams.wait_until_started()
        calls = 0
        for round_ in range(5):
            for name in "efgh":
                uploaded = server.upload(name, folders[name if round_ % 2 else "h"])
                assert uploaded.status_code in (200, 201), uploaded.text
                calls += 1
            for name in "efgh"[: 2 + round_ % 3]:
                assert server.client.delete(f"/v1/adapters/{name}").status_code == 200
        streams.finish()
        assert calls == 20
        want = [name.upper() * tokens for name in "abcd"] + [quiet] * 2
        assert streams.texts == [*want, "A" * tokens, "B" * tokens]


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes every read of an adapter from disk take that many seconds longer."""
    delay = 0.0

    def slow(*args: Any) -> Any:
        time.sleep(delay)
        return load_weights(*args)

    monkeypatch.setattr("adapters.pool.load_weights", slow)

    def set_delay(seconds: float) -> None:
        nonlocal delay
        delay = seconds

    return set_delay


def test_a_cold_adapter_on_a_slow_disk_holds_nobody_back(
    scripted: Path, tmp_path: Path, slow_reads: Callable[[float], None]
) -> None:
    seven = signature_adapter(scripted, tmp_path / "s", 3 + ord("S"))
    with serving(scripted, tmp_path / "data") as server:
        assert server.upload("s", seven).status_code == 201
        loads = server.engine.adapters.stats().loads_total
        slow_reads(2.0)
        streams = Streams(server, ["tiny"] * 4, 480)
        streams.wait_until_started()
        with ThreadPoolExecutor(1) as executor:
            cold = executor.submit(server.complete, "s", max_tokens=3)
            health = []
            with httpx.Client(base_url=server.client.base_url, timeout=10) as probe:
                while not cold.done() and not streams.done:
                    started = time.monotonic()
                    assert probe.get("/health").status_code == 200
                    health.append(time.monotonic() - started)
                    time.sleep(0.05)
            assert cold.result(30)["choices"][0]["text"] == "SSS"
        streams.finish()
        # The read alone takes two seconds; neither a token nor a probe waited for it.
        assert max(streams.gaps) < 1.0
        assert len(health) > 5 and max(health) < 1.0
        assert server.engine.adapters.stats().loads_total == loads + 1


def test_adapters_of_another_base_are_neither_listed_nor_served(tmp_path: Path) -> None:
    """Two bases of equal name and sizes on one data folder, one after the other."""
    bases = [tiny_base(tmp_path / f"base{seed}", seed=seed) for seed in (1, 2)]
    folders = [
        make_adapter(base, tmp_path / f"a{i}", seed=i, std=0.3) for i, base in enumerate(bases)
    ]
    data = tmp_path / "data"

    def models(server: Running) -> list[str]:
        return [model.id for model in server.openai.models.list()]

    with serving(bases[0], data) as server:
        assert server.upload("a", folders[0]).json()["version"] == 1
        assert_answer_of(bases[0], folders[0], ask(server, "a"), server)
    with serving(bases[1], data) as server:
        assert models(server) == ["tiny"]
        for model in ("a", "a@1"):
            refused = server.client.post("/v1/completions", json={"model": model, "prompt": "!"})
            assert refused.status_code == 409
            assert "uploaded for the base 'tiny'" in refused.json()["error"]["message"]
        # The very same files may be meant for this base too.
        assert server.upload("a", folders[0]).json()["version"] == 2
        assert_answer_of(bases[1], folders[0], ask(server, "a"), server)
        assert server.upload("a", folders[1]).json()["version"] == 3
        assert models(server) == ["tiny", "a"]
    with serving(bases[0], data) as server:
        assert models(server) == ["tiny", "a"]
        assert_answer_of(bases[0], folders[0], ask(server, "a"), server)
