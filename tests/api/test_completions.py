"""The OpenAI routes over real HTTP, with the scripted base that writes ASCII in order."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from api.app import ROUTES
from base_engine.errors import StepFailed
from tests.api.asking import ALPHABET, CHAT, COMPLETION, frames, streamed, whole
from tests.api.server import Running, until
from tests.tiny import BOS, VOCAB, byte_ids


def refused(server: Running, path: str, body: Any) -> Any:
    """The error object of a refused request, whose envelope is checked."""
    response = server.client.post(path, json=body)
    assert 400 <= response.status_code < 500, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error | {"status": response.status_code}


class TestStopping:
    @pytest.mark.parametrize(
        ("stop", "text", "reason"),
        [
            ("F", "ABCDE", "stop"),
            ("FGH", "ABCDE", "stop"),
            (["HI", "FG"], "ABCDE", "stop"),
            (["FGHX", "GHI"], "ABCDEF", "stop"),
            ("FGX", ALPHABET[:16], "length"),
            ("OPQ", ALPHABET[:16], "length"),
            ("P", ALPHABET[:15], "stop"),
            ("A", "", "stop"),
        ],
    )
    def test_stop_strings_cut_the_text_alike_streamed_and_not(
        self, server: Running, stop: Any, text: str, reason: str
    ) -> None:
        assert streamed(server, stop=stop) == {0: (text, reason)}
        assert whole(server, stop=stop) == {0: (text, reason)}

    def test_tokens_up_to_the_stop_are_counted_and_no_more(self, server: Running) -> None:
        usage = server.complete(prompt="@", stop="CD", max_tokens=300)["usage"]
        assert usage["completion_tokens"] == 4

    def test_a_stop_string_ends_the_generation_itself(self, server: Running) -> None:
        before = server.engine.stats().generated_tokens
        server.complete(prompt="@", stop="C", max_tokens=400)
        until(server.idle, 1)
        assert server.engine.stats().generated_tokens - before < 50

    def test_logprobs_do_not_give_away_the_stop_string(self, server: Running) -> None:
        body: dict[str, Any] = {"prompt": "@", "stop": "DEF", "logprobs": 0}
        assert server.complete(**body)["choices"][0]["logprobs"]["tokens"] == ["A", "B", "C"]
        got = frames(server, "/v1/completions", **(COMPLETION | body))
        tokens = [
            token
            for frame in got[:-1]
            for choice in frame["choices"]
            for token in (choice["logprobs"] or {"tokens": []})["tokens"]
        ]
        assert tokens == ["A", "B", "C"]

    def test_stop_token_ids(self, server: Running) -> None:
        assert whole(server, stop_token_ids=byte_ids("D")) == {0: ("ABC", "stop")}


class TestChat:
    def test_the_prompt_is_what_the_template_makes(self, server: Running) -> None:
        tokenizer = AutoTokenizer.from_pretrained(server.settings.model)
        messages = [
            {"role": "system", "content": "Be <bos> brief."},
            {"role": "user", "content": "héllo"},
        ]
        expected = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        headers = {"x-lorikeet-trace": "1"}
        answer = server.client.post(
            "/v1/chat/completions",
            json=CHAT | {"messages": messages, "max_tokens": 1},
            headers=headers,
        ).json()
        assert answer["lorikeet"]["choices"][0]["prompt_token_ids"] == expected
        assert answer["usage"]["prompt_tokens"] == len(expected)
        assert expected[0] == BOS and expected[1] != BOS

    def test_plain_prompts_get_one_bos_and_token_ids_none(self, server: Running) -> None:
        headers = {"x-lorikeet-trace": "1"}
        for prompt, ids in (("hi", [BOS, *byte_ids("hi")]), (byte_ids("hi"), byte_ids("hi"))):
            answer = server.complete(prompt=prompt, max_tokens=1, headers=headers)
            assert answer["lorikeet"]["choices"][0]["prompt_token_ids"] == ids
            assert answer["usage"]["prompt_tokens"] == len(ids)

    def test_the_first_chunk_has_the_role_and_the_rest_the_text(self, server: Running) -> None:
        stream = server.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            temperature=0,
            max_tokens=5,
            stream=True,
        )
        first, *rest = list(stream)
        assert first.choices[0].delta.role == "assistant"
        assert all(chunk.choices[0].delta.role is None for chunk in rest)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in rest)
        answer = server.client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 5}).json()
        assert text == answer["choices"][0]["message"]["content"] and len(text) == 5
        assert [chunk.choices[0].finish_reason for chunk in rest] == [None] * 4 + ["length"]

    def test_chat_fills_the_context_by_default(self, server: Running) -> None:
        answer = server.client.post("/v1/chat/completions", json=CHAT).json()
        assert answer["usage"]["total_tokens"] == server.engine.max_length
        assert answer["choices"][0]["finish_reason"] == "length"


class TestRefusals:
    @pytest.mark.parametrize(
        "model", ["typo", "TINY", "tiny ", " tiny", "tiny@latest", "tiny@1", "x" * 512, "../tiny"]
    )
    def test_nothing_but_its_exact_name_leads_to_the_base(
        self, server: Running, model: str
    ) -> None:
        for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            error = refused(server, path, body | {"model": model})
            assert (error["status"], error["code"]) == (404, "model_not_found")

    @pytest.mark.parametrize("change", [{"model": None}, {"model": ""}, "missing"])
    def test_a_model_must_be_named(self, server: Running, change: Any) -> None:
        body: dict[str, Any] = {"prompt": "x"} if change == "missing" else COMPLETION | change
        error = refused(server, "/v1/completions", body)
        assert (error["status"], error["param"]) == (400, "model")

    @pytest.mark.parametrize(
        "prompt", [[], [[]], [VOCAB], [-1], [10**30], [[1], [VOCAB]], [True], [1.5], {}]
    )
    def test_prompts_that_cannot_run_never_reach_the_engine(
        self, server: Running, prompt: Any
    ) -> None:
        steps = server.engine.stats().steps
        error = refused(server, "/v1/completions", COMPLETION | {"prompt": prompt})
        assert error["status"] == 400 and error["param"].startswith("prompt")
        assert server.engine.stats().steps == steps and server.idle()

    def test_an_empty_prompt_is_the_bos_alone(self, server: Running) -> None:
        assert server.complete(prompt="", max_tokens=1)["usage"]["prompt_tokens"] == 1

    def test_token_ids_to_stop_at_must_exist(self, server: Running) -> None:
        error = refused(server, "/v1/completions", COMPLETION | {"stop_token_ids": [10**6]})
        assert (error["param"], error["code"]) == ("stop_token_ids", "invalid_token_id")

    def test_too_many_sequences(self, server: Running) -> None:
        error = refused(server, "/v1/completions", COMPLETION | {"prompt": ["x"] * 64, "n": 3})
        assert "192" not in error["message"] and "64 prompts times 3" in error["message"]

    def test_prompts_longer_than_the_context(self, server: Running) -> None:
        limit = server.engine.max_length
        for length in (limit, limit + 1, 10 * limit):
            body = COMPLETION | {"prompt": [5] * length}
            error = refused(server, "/v1/completions", body)
            assert error["code"] == "context_length_exceeded"
            assert str(length) in error["message"] and str(limit) in error["message"]
        answer = server.complete(prompt=[5] * (limit - 2), max_tokens=100)
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_texts_that_no_tokens_could_make_fit_are_refused_unread(self, server: Running) -> None:
        text = "a" * 4_000_000
        for path, body in (
            ("/v1/completions", COMPLETION | {"prompt": text}),
            ("/v1/completions", COMPLETION | {"prompt": ["x", text]}),
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": text}]}),
        ):
            started = time.monotonic()
            error = refused(server, path, body)
            assert time.monotonic() - started < 3  # reading them takes half a minute
            assert error["code"] == "context_length_exceeded" and "4000000" in error["message"]

    def test_a_text_of_one_long_token_after_the_other_fits(self, server: Running) -> None:
        count = server.engine.max_length - 2
        usage = server.complete(prompt="<|im_start|>" * count, max_tokens=1)["usage"]
        assert usage["prompt_tokens"] == count + 1

    def test_a_prompt_fits_if_it_leaves_room_for_one_token(self, server: Running) -> None:
        limit = server.engine.max_length
        answer = server.complete(prompt=[5] * (limit - 1), max_tokens=100, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 1

    def test_large_bodies(self, server: Running) -> None:
        response = server.client.post("/v1/completions", content=b" " * (5 << 20))
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"

    def test_the_openai_client_understands_errors(self, server: Running) -> None:
        with pytest.raises(openai.NotFoundError) as missing:
            server.openai.completions.create(model="typo", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            server.openai.completions.create(model="tiny", prompt="x", echo=True)
        assert (bad.value.param, bad.value.type) == ("echo", "invalid_request_error")

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/nope", 404),
            ("GET", "/v1/models/", 404),
            ("GET", "/v1/models/no%2Fsuch", 404),
            ("GET", "/v1/chat/completions", 405),
            ("PUT", "/v1/adapters", 405),
            ("POST", "/v1/models", 405),
            ("POST", "/v1/adapters", 415),
        ],
    )
    def test_the_frameworks_own_errors_have_the_envelope(
        self, server: Running, method: str, path: str, status: int
    ) -> None:
        response = server.client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


class TestFailures:
    def test_an_unforeseen_failure_tells_nothing_of_the_inside(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: Any) -> None:
            raise RuntimeError("secret at 0x7f00 in /etc/secret")

        monkeypatch.setattr(server.engine, "submit", fail)
        response = server.client.post("/v1/completions", json=COMPLETION)
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "secret" not in response.text and "Traceback" not in response.text

    def test_a_failed_first_step_has_a_real_status(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _fail_step(server, monkeypatch, 1)
        response = server.client.post("/v1/completions", json=COMPLETION | {"stream": True})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "step_failed"

    @pytest.mark.parametrize("n", [1, 2])
    def test_a_failure_in_mid_stream_is_the_last_frame(
        self, server: Running, monkeypatch: pytest.MonkeyPatch, n: int
    ) -> None:
        _fail_step(server, monkeypatch, 4)
        got = frames(server, "/v1/completions", **(COMPLETION | {"n": n}))
        assert got[0]["choices"] and "[DONE]" not in got
        assert got[-1]["error"]["code"] == "step_failed"
        assert "secret" not in json.dumps(got)
        until(server.idle, 1)
        assert whole(server, max_tokens=3) == {0: ("ABC", "length")}


def _fail_step(server: Running, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the `number`th step from now raise."""
    run, count = server.engine.runner.run, 0

    def failing(chunks: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise StepFailed("secret")
        return run(chunks)

    monkeypatch.setattr(server.engine.runner, "run", failing)


def test_request_ids_are_taken_in_and_given_back(server: Running) -> None:
    for path in ("/live", "/nope"):
        mine = server.client.get(path, headers={"x-request-id": "abc-123_X"})
        assert mine.headers["x-request-id"] == "abc-123_X"
        for bad in ("", "a b", "x" * 65, "a/b"):
            other = server.client.get(path, headers={"x-request-id": bad}).headers["x-request-id"]
            assert other != bad and len(other) == 32


def test_routes_are_unique() -> None:
    seen = [(route.path, method) for route in ROUTES for method in route.methods or ()]
    assert len(seen) == len(set(seen))
