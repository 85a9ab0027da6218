"""The OpenAI routes over real HTTP, with the scripted base that writes ASCII in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from api.app import ROUTES
from base_engine.errors import StepFailed
from tests.api.server import Running, serving, until
from tests.tiny import BOS, EOS, VOCAB, byte_ids, scripted_base, signature_adapter

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "@", "temperature": 0}
#: The base goes on from "@" like this.
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def emoji(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A base that answers "!" with characters of one to four tokens, and then ends."""
    folder = tmp_path_factory.mktemp("emoji")
    script = [*byte_ids("!aé😀z"), EOS]
    with serving(scripted_base(folder / "base", script), folder / "data") as running:
        yield running


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


class TestText:
    def test_characters_of_several_tokens_come_whole(self, emoji: Running) -> None:
        got = frames(emoji, "/v1/completions", **(COMPLETION | {"prompt": "!"}))
        deltas = [frame["choices"][0]["text"] for frame in got[:-1]]
        assert [delta for delta in deltas if delta] == ["a", "é", "😀", "z"]
        assert whole(emoji, prompt="!") == {0: ("aé😀z", "stop")}
        assert streamed(emoji, prompt="!") == {0: ("aé😀z", "stop")}

    @pytest.mark.parametrize("max_tokens", [4, 5, 6])
    def test_a_cut_character_ends_alike_streamed_and_not(
        self, emoji: Running, max_tokens: int
    ) -> None:
        for got in (whole, streamed):
            text, reason = got(emoji, prompt="!", max_tokens=max_tokens)[0]
            assert (text, reason) == ("aé\ufffd", "length")

    def test_tokens_of_one_character_share_its_offset(self, emoji: Running) -> None:
        logprobs = emoji.complete(prompt="!", logprobs=0)["choices"][0]["logprobs"]
        assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 9

    def test_the_end_token_counts_and_is_not_shown(self, emoji: Running) -> None:
        answer = emoji.complete(prompt="!", max_tokens=100)
        assert answer["usage"]["completion_tokens"] == 9
        going_on = emoji.complete(prompt="!", max_tokens=12, ignore_eos=True)["choices"][0]
        assert going_on["finish_reason"] == "length" and going_on["text"].startswith("aé😀z")

    def test_chat_logprobs_carry_the_bytes(self, emoji: Running) -> None:
        body: dict[str, Any] = {
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 2,
            "temperature": 0,
        }
        messages = [{"role": "user", "content": "x"}]
        body |= {"model": "tiny", "messages": messages}
        answer = emoji.client.post("/v1/chat/completions", json=body).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 2
        for entry in content:
            assert entry["bytes"] and len(entry["top_logprobs"]) == 2
            assert entry["top_logprobs"][0]["logprob"] >= entry["logprob"]


class TestUsage:
    @pytest.mark.parametrize("n", [1, 2])
    @pytest.mark.parametrize(
        ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
    )
    def test_streams_tell_usage_if_asked(
        self, server: Running, path: str, body: dict[str, Any], n: int
    ) -> None:
        body = body | {"n": n, "max_tokens": 3}
        plain = server.client.post(path, json=body).json()["usage"]
        assert plain["completion_tokens"] == 3 * n
        assert plain["total_tokens"] == plain["prompt_tokens"] + 3 * n
        for options in ({}, {"stream_options": {"include_usage": False}}):
            got = frames(server, path, **body, **options)
            assert all("usage" not in frame and frame["choices"] for frame in got[:-1])
        *chunks, last, done = frames(server, path, **body, stream_options={"include_usage": True})
        assert done == "[DONE]" and last["choices"] == []
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [last["usage"][c] for c in counts] == [plain[c] for c in counts]

    def test_cached_tokens_are_told(self, server: Running) -> None:
        body: dict[str, Any] = {"prompt": "cached " * 30, "max_tokens": 1}
        first = server.complete(**body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        second = server.complete(**body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first == 0 and second > 0


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


class TestChoices:
    def test_every_choice_ends_once_also_if_one_ends_early(self, server: Running) -> None:
        body: dict[str, Any] = {"prompt": ["@", "D", "M"], "n": 2, "stop": "F", "max_tokens": 5}
        expected = {0: "ABCDE", 1: "ABCDE", 2: "E", 3: "E", 4: "NOPQR", 5: "NOPQR"}
        reasons = ["length", "length", "stop", "stop", "length", "length"]
        for got in (whole(server, **body), streamed(server, **body)):
            assert {i: text for i, (text, _) in got.items()} == expected
            assert [got[i][1] for i in range(6)] == reasons

    def test_seeds_make_choices_repeatable_and_different(
        self, llama_base: Path, tmp_path: Path
    ) -> None:
        with serving(llama_base, tmp_path) as server:
            body: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "seed": 7, "prompt": "x"}
            texts = [c["text"] for c in server.complete(n=3, **body)["choices"]]
            assert texts == [c["text"] for c in server.complete(n=3, **body)["choices"]]
            assert len(set(texts)) == 3
            second = server.complete(**(body | {"seed": 8}))["choices"][0]["text"]
            assert second == texts[1]

    def test_all_forms_of_prompt_agree(self, server: Running) -> None:
        ids = [BOS, *byte_ids("@")]
        for prompt in ("@", ["@"], ids, [ids]):
            assert whole(server, prompt=prompt, max_tokens=3) == {0: ("ABC", "length")}


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


class TestWhoAnswered:
    def test_answers_say_which_version_they_come_from(
        self, server: Running, tmp_path: Path
    ) -> None:
        base = Path(server.settings.model)
        record = server.upload("who", signature_adapter(base, tmp_path / "a", 60)).json()
        try:
            for model in ("who", "who@1", "who@latest", f"who@sha256:{record['digest']}"):
                body = CHAT | {"model": model, "max_tokens": 2}
                response = server.client.post("/v1/chat/completions", json=body)
                assert response.headers["x-lorikeet-adapter-digest"] == record["digest"]
                assert response.headers["x-lorikeet-adapter-version"] == "1"
                answer = response.json()
                assert answer["model"] == model
                assert record["digest"].startswith(answer["system_fingerprint"].removeprefix("fp_"))
                got = frames(server, "/v1/chat/completions", **body)
                assert {frame["model"] for frame in got[:-1]} == {model}
            base_answer = server.client.post("/v1/completions", json=COMPLETION)
            assert "x-lorikeet-adapter-digest" not in base_answer.headers
        finally:
            server.client.delete("/v1/adapters/who")

    def test_the_trace_comes_with_the_last_chunk_of_each_choice(self, server: Running) -> None:
        with server.client.stream(
            "POST",
            "/v1/completions",
            json=COMPLETION | {"stream": True, "n": 2, "max_tokens": 3},
            headers={"x-lorikeet-trace": "1"},
        ) as response:
            got = [json.loads(x[6:]) for x in response.iter_lines() if x.startswith("data: {")]
        traces = [frame["lorikeet"]["choices"] for frame in got if "lorikeet" in frame]
        assert sorted(trace[0]["index"] for trace in traces) == [0, 1]
        assert all(trace[0]["token_ids"] == byte_ids("ABC") for trace in traces)
        assert all(frame["choices"][0]["finish_reason"] for frame in got if "lorikeet" in frame)


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
