"""What stands in answers, streamed and not, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.asking import CHAT, COMPLETION, frames, streamed, whole
from tests.api.server import Running, serving
from tests.tiny import BOS, EOS, byte_ids, scripted_base, signature_adapter


@pytest.fixture(scope="module")
def emoji(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A base that answers "!" with characters of one to four tokens, and then ends."""
    folder = tmp_path_factory.mktemp("emoji")
    script = [*byte_ids("!aé😀z"), EOS]
    with serving(scripted_base(folder / "base", script), folder / "data") as running:
        yield running


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

    @pytest.mark.parametrize(
        ("stop", "max_tokens", "text", "reason"),
        [
            ("😀", 20, "aé", "stop"),
            ("é", 20, "a", "stop"),
            ("😀", 7, "aé", "stop"),  # complete with the last token there may be
            ("😀", 6, "aé\ufffd", "length"),
            ("\ufffd", 5, "aé", "stop"),  # only the end makes the cut character one
            ("\U0001f601", 20, "aé😀z", "stop"),  # all but the last byte is the same
            ("é😀z!", 20, "aé😀z", "stop"),
            ("z", 8, "aé😀", "stop"),
        ],
    )
    def test_stop_strings_of_many_bytes_cut_alike_streamed_and_not(
        self, emoji: Running, stop: str, max_tokens: int, text: str, reason: str
    ) -> None:
        for got in (whole, streamed):
            assert got(emoji, prompt="!", stop=stop, max_tokens=max_tokens)[0] == (text, reason)

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


class TestChoices:
    def test_every_choice_ends_once_also_if_one_ends_early(self, server: Running) -> None:
        body: dict[str, Any] = {"prompt": ["@", "D", "M"], "n": 2, "stop": "F", "max_tokens": 5}
        expected = {0: "ABCDE", 1: "ABCDE", 2: "E", 3: "E", 4: "NOPQR", 5: "NOPQR"}
        reasons = ["length", "length", "stop", "stop", "length", "length"]
        for got in (whole(server, **body), streamed(server, **body)):
            assert {i: text for i, (text, _) in got.items()} == expected
            assert [got[i][1] for i in range(6)] == reasons

    def test_chat_choices_that_end_apart_each_have_a_role_and_one_end(
        self, llama_base: Path, tmp_path: Path
    ) -> None:
        body = CHAT | {"n": 4, "seed": 3, "temperature": 1.5, "max_tokens": 40, "ignore_eos": True}
        body |= {"stop": ["e", "a", "t", " "]}
        with serving(llama_base, tmp_path) as server:
            plain = server.client.post("/v1/chat/completions", json=body).json()["choices"]
            got = frames(server, "/v1/chat/completions", **body)
        assert got[-1] == "[DONE]" and "[DONE]" not in got[:-1]
        lengths = set()
        for choice in plain:
            parts = [
                f["choices"][0] for f in got[:-1] if f["choices"][0]["index"] == choice["index"]
            ]
            assert parts[0]["delta"]["role"] == "assistant"
            assert all("role" not in part["delta"] for part in parts[1:])
            assert [p["finish_reason"] for p in parts[:-1]] == [None] * (len(parts) - 1)
            assert parts[-1]["finish_reason"] == choice["finish_reason"] is not None
            text = "".join(part["delta"].get("content", "") for part in parts)
            assert text == choice["message"]["content"]
            lengths.add((len(text), choice["finish_reason"]))
        assert len(lengths) > 1, "all choices ended together"

    def test_an_answer_without_visible_text_still_has_a_role_and_an_end(
        self, server: Running
    ) -> None:
        stop = server.client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}).json()
        body = CHAT | {"stop": stop["choices"][0]["message"]["content"]}
        first, last, done = frames(server, "/v1/chat/completions", **body)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
        assert done == "[DONE]"

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
            around_zero = server.complete(n=3, **(body | {"seed": -1}))["choices"]
            assert len({c["text"] for c in around_zero}) == 3

    def test_all_forms_of_prompt_agree(self, server: Running) -> None:
        ids = [BOS, *byte_ids("@")]
        for prompt in ("@", ["@"], ids, [ids]):
            assert whole(server, prompt=prompt, max_tokens=3) == {0: ("ABC", "length")}


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
