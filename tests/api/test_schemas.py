from __future__ import annotations

import json
import time
from typing import Any

import pytest

from api.errors import BadRequest
from api.schemas import MAX_BRACKETS, NEUTRAL, ChatRequest, CompletionRequest, decode

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return decode(json.dumps(CHAT | fields).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps(COMPLETION | fields).encode(), CompletionRequest)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": "x" * 10_000}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream": 1}, "stream"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"model": "m" * (1 << 20)}, "model"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_both_routes_refuse_and_name_the_field(fields: dict[str, Any], param: str) -> None:
    for request in (chat, completion):
        with pytest.raises(BadRequest) as refused:
            request(**fields)
        assert refused.value.param == param
        assert param in str(refused.value)
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": None},
        {"stop": []},
        {"stop": ["a", "b", "c", "d"]},
        {"max_tokens": None},
        {"temperature": 0},
        {"temperature": 2.0},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63 - 1},
        {"user": "someone", "metadata": {"a": "b"}},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
)
def test_both_routes_take(fields: dict[str, Any]) -> None:
    chat(**fields)
    completion(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "boss", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "x": 1}]}, "messages[0].x"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_chat_refuses_and_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[-1]]}, "prompt[0][0]"),
    ],
)
def test_completions_refuse_and_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        completion(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("prompt", [[], [1, "a"], ["a", [1]], ["x"] * 65])
def test_lists_of_prompts_are_of_one_kind_and_bounded(prompt: list[Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        completion(prompt=prompt).prompts()
    assert refused.value.param == "prompt"


def test_the_four_forms_of_prompt() -> None:
    assert completion(prompt="ab").prompts() == ["ab"]
    assert completion(prompt=["ab", "c"]).prompts() == ["ab", "c"]
    assert completion(prompt=[5, 6]).prompts() == [[5, 6]]
    assert completion(prompt=[[5], [6, 7]]).prompts() == [[5], [6, 7]]


#: Field -> a value that would change the answer.
ACTIVE: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "logit_bias": {"5": 1},
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "store": True,
    "service_tier": "flex",
    "reasoning_effort": "high",
    "verbosity": "low",
    "prediction": {},
    "modalities": ["audio"],
    "audio": {},
    "web_search_options": {},
    "parallel_tool_calls": "yes",
    "best_of": 2,
    "echo": True,
    "suffix": "end",
}


@pytest.mark.parametrize("field", sorted(ACTIVE))
def test_unsupported_fields_are_taken_at_their_neutral_values_only(field: str) -> None:
    requests = [chat] if field in ChatRequest.__struct_fields__ else []
    requests += [completion] if field in CompletionRequest.__struct_fields__ else []  # type: ignore[list-item]
    assert requests
    for request in requests:
        for neutral in (None, *NEUTRAL[field]):
            request(**{field: neutral})
        with pytest.raises(BadRequest, match="not supported") as refused:
            request(**{field: ACTIVE[field]})
        assert refused.value.param == field


def test_false_is_not_zero() -> None:
    with pytest.raises(BadRequest):
        chat(frequency_penalty=False)
    with pytest.raises(BadRequest):
        completion(echo=0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nope",
        b"[]",
        b'"x"',
        b'{"model": "m", "temperature": NaN}',
        b'{"model": "m", "temperature": 1e999}',
        b'{"model": "m", "n": ' + b"9" * 5000 + b"}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "m", "tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "m", "messages": ' + b'[{"content": ' * 10_000,
    ],
)
def test_bodies_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        decode(body, ChatRequest)
    assert len(str(refused.value)) < 500
    with pytest.raises(BadRequest):
        decode(body, CompletionRequest)


@pytest.mark.parametrize("piece", [b"[5],", b"[],", b'{"a":[]},'])
def test_millions_of_arrays_are_refused_before_they_are_built(piece: bytes) -> None:
    body = b'{"model": "m", "prompt": [' + piece * 1_000_000 + b"[5]]}"
    started = time.monotonic()
    with pytest.raises(BadRequest, match=f"more than {MAX_BRACKETS} opening brackets"):
        decode(body, CompletionRequest)
    assert time.monotonic() - started < 0.5


def test_messages_reach_the_template_as_plain_strings() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(
        messages=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": parts, "name": "ann"},
            {"role": "assistant", "content": None},
            {"role": "user", "content": ""},
        ]
    )
    assert request.template_messages() == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_token_limits() -> None:
    assert chat().sampling(room=50, choice=0).max_tokens == 50
    assert chat(max_tokens=7).sampling(room=50, choice=0).max_tokens == 7
    assert chat(max_completion_tokens=7).sampling(room=50, choice=0).max_tokens == 7
    assert chat(max_tokens=70).sampling(room=50, choice=0).max_tokens == 50
    assert completion().sampling(room=50, choice=0).max_tokens == 16
    assert completion(max_tokens=None).sampling(room=5, choice=0).max_tokens == 5


def test_each_choice_has_its_own_seed_within_64_bits() -> None:
    request = completion(seed=2**63 - 1, n=2)
    seeds = [request.sampling(room=5, choice=i).seed for i in range(2)]
    assert seeds == [2**63 - 1, -(2**63)]
    assert completion().sampling(room=5, choice=1).seed is None


def test_logprobs_of_either_route_become_a_number_of_alternatives() -> None:
    assert chat().sampling(5, 0).logprobs is None
    assert chat(logprobs=False).sampling(5, 0).logprobs is None
    assert chat(logprobs=True).sampling(5, 0).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling(5, 0).logprobs == 20
    assert completion().sampling(5, 0).logprobs is None
    assert completion(logprobs=0).sampling(5, 0).logprobs == 0
