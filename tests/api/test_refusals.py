from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest

from api.errors import BadRequest
from api.refusals import NOT_SUPPORTED
from api.schemas import NEUTRAL, ChatRequest, CompletionRequest, Message, decode

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def refused(body: bytes, kind: Any = ChatRequest) -> BadRequest:
    with pytest.raises(BadRequest) as error:
        decode(body, kind)
    return error.value


def chat(**fields: Any) -> BadRequest:
    return refused(json.dumps(CHAT | fields).encode())


def said(part: Any) -> str:
    return str(chat(messages=[{"role": "user", "content": [part]}]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 17}, "n: 17 is more than 16, the most that is taken."),
        ({"n": 0}, "n: 0 is less than 1, the least that is taken."),
        ({"n": "two"}, 'n: "two" is not a whole number or null.'),
        ({"temperature": 2.5}, "temperature: 2.5 is more than 2, the most that is taken."),
        ({"top_p": 0}, "top_p: 0 is not more than 0."),
        ({"stop": ["a"] * 5}, "stop: has 5 entries; at most 4 are taken."),
        ({"stop": ""}, "stop: has 0 characters; at least 1 must be given."),
        ({"model": "m" * 600}, "model: has 600 characters; at most 512 are taken."),
        ({"messages": 5}, "messages: 5 is not a list."),
        ({"stream": {}}, "stream: an object is not true or false or null."),
        ({"metadata": {"a": 1}}, "metadata[...]: the value is not a string."),
    ],
)
def test_a_bad_value_is_named_with_its_limit(fields: dict[str, Any], message: str) -> None:
    error = chat(**fields)
    assert (str(error), error.code) == (message, "invalid_value")


def test_a_long_value_is_cut() -> None:
    assert len(str(chat(n="x" * 100_000))) < 120
    assert len(str(chat(n=10**4000))) < 200


def test_what_is_no_object_at_all_is_said_of_the_body() -> None:
    error = refused(b"[]")
    assert (str(error), error.param) == ("body: a list is not an object.", None)


def test_a_value_that_the_broken_rest_hides_is_left_out() -> None:
    assert str(refused(b'{"model": "m", "n": 17, "stop": ')) == (
        "n: the value is more than 16, the most that is taken."
    )
    assert "at most 4 are taken" in str(refused(b'{"stop": ["a","a","a","a","a"], nonsense'))


def test_the_roles_are_listed() -> None:
    text = str(chat(messages=[{"role": "boss", "content": ""}]))
    assert text.startswith('messages[0].role: "boss" is not one of ')
    assert all(role in text for role in get_args(get_type_hints(Message)["role"]))


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {}}, {"image_url": {}, "type": "image_url"}]
)
def test_parts_that_are_no_text_are_answered_with_what_is_taken(part: Any) -> None:
    assert 'only parts of type "text" are' in said(part)


def test_a_misspelt_field_is_answered_with_the_nearest() -> None:
    error = chat(max_token=5)
    assert str(error) == "max_token: unknown field; did you mean max_tokens?"
    assert (error.param, error.code) == ("max_token", "unknown_parameter")
    assert str(chat(tool=[])) == "tool: unknown field."
    assert str(chat(zzz=1)) == "zzz: unknown field."


def test_a_field_of_the_other_route_is_answered_with_that_route() -> None:
    assert "by /v1/completions" in str(chat(prompt="hi"))
    messages = json.dumps(COMPLETION | {"messages": []}).encode()
    assert "by /v1/chat/completions" in str(refused(messages, CompletionRequest))


@pytest.mark.parametrize("field", ["repetition_penalty", "guided_json", "best_of", "min_tokens"])
def test_options_of_other_servers_are_called_unsupported(field: str) -> None:
    error = chat(**{field: 1})
    assert (str(error), error.code) == (f"{field}: not supported.", "unsupported_parameter")


def test_nothing_that_a_route_takes_is_called_unsupported() -> None:
    for kind in (ChatRequest, CompletionRequest):
        assert not NOT_SUPPORTED & (set(kind.__struct_fields__) - set(NEUTRAL))


def test_names_are_made_printable() -> None:
    assert str(chat(**{"bad\nname": 1})) == "bad\\nname: unknown field."
