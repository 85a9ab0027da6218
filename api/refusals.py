"""Why a body is no valid request, in the words of the person who wrote it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from adapters.composition import COMBINATIONS
from api.errors import BadRequest
from api.members import printable

#: Options of other servers that would change the answer, so that leaving them out is no choice.
NOT_SUPPORTED = frozenset(
    """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt
    chat_template chat_template_kwargs continue_final_message documents do_sample early_stopping
    echo guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
    guided_whitespace_pattern include_stop_str_in_output json_schema length_penalty
    logits_processors lora_request min_tokens no_repeat_ngram_size prompt_logprobs priority regex
    repetition_penalty response_format skip_special_tokens spaces_between_special_tokens
    structured_outputs suffix thinking tool_choice tools truncate_prompt_tokens typical_p
    use_beam_search
    """.split()
)

_CHOICES = {
    "role": "is not one of system, developer, user and assistant",
    "type": 'is not taken here; only parts of type "text" are',
    "combination_type": f"is not one of {', '.join(COMBINATIONS)}",
    "majority_sign_method": "is not one of total and frequency",
    "include_obfuscation": "is not supported; only false is taken",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_LENGTHS = {"array": "entries", "str": "characters", "object": "entries"}

#: msgspec's messages end so when they concern a part of the body.
_PLACE = re.compile(r" - at `\$\.?(.*?)`\Z", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_ABSENT = object()


def refusal(
    message: str, body: bytes, known: Collection[str], elsewhere: Mapping[str, str]
) -> BadRequest:
    """The error for a client, made of msgspec's `message` about `body`.

    `known` are the fields to suggest where a name is misspelt, `elsewhere` the fields that only
    another route has -> that route.
    """
    place = _PLACE.search(message)
    where = place[1] if place is not None else ""
    text = message[: place.start()] if place is not None else message
    if (name := re.fullmatch(r"Object contains unknown field `(.*)`", text, re.DOTALL)) is not None:
        return _unknown(name[1], where, known, elsewhere)
    if (name := re.fullmatch(r"Object missing required field `(.*)`", text)) is not None:
        field = _joined(where, name[1])
        return BadRequest(f"{field}: required, but missing.", field, "missing_parameter")
    param = printable(where) or None
    problem = _problem(text, where, _value(body, where))
    return BadRequest(f"{param or 'body'}: {problem}.", param, "invalid_value")


def _unknown(
    name: str, where: str, known: Collection[str], elsewhere: Mapping[str, str]
) -> BadRequest:
    field = _joined(where, name)
    if not where and name in elsewhere:
        text = f"{field}: not taken by this route, but by {elsewhere[name]}."
        return BadRequest(text, field, "unknown_parameter")
    if not where and name in NOT_SUPPORTED:
        return BadRequest(f"{field}: not supported.", field, "unsupported_parameter")
    if where.endswith("]") and ".content[" in where:
        text = f'{field}: not taken here; only parts of type "text" are.'
        return BadRequest(text, field, "unsupported_parameter")
    close = get_close_matches(name[:100], known, n=1, cutoff=0.7) if not where else []
    hint = f"; did you mean {close[0]}?" if close else "."
    return BadRequest(f"{field}: unknown field{hint}", field, "unknown_parameter")


def _problem(text: str, where: str, value: Any) -> str:
    """`text` in plain words, without a full stop."""
    shown = "the value" if value is _ABSENT else _shown(value)
    if text.startswith("Invalid enum value"):
        return f"{shown} {_CHOICES.get(where.rpartition('.')[2], 'is not taken')}"
    if (bound := re.fullmatch(r"Expected `\w+` ([<>]=?) (\S+)", text)) is not None:
        limit = bound[2].removesuffix(".0")
        return f"{shown} {_BOUNDS[bound[1]].format(limit)}"
    if (length := re.fullmatch(r"Expected `(\w+)` of length ([<>])= (\d+)", text)) is not None:
        count = "" if value is _ABSENT else f"has {len(value)} {_LENGTHS[length[1]]}; "
        limit = "at most {} are taken" if length[2] == "<" else "at least {} must be given"
        return count + limit.format(length[3])
    if (kind := re.fullmatch(r"Expected `(.*)`, got `.*`", text)) is not None:
        taken = [_KINDS.get(part, part) for part in kind[1].split(" | ")]
        return f"{shown} is not {' or '.join(taken)}"
    return printable(text)


_BOUNDS = {
    "<=": "is more than {0}, the most that is taken",
    ">=": "is less than {0}, the least that is taken",
    "<": "is not less than {0}",
    ">": "is not more than {0}",
}


def _value(body: bytes, where: str) -> Any:
    """What stands in `body` at msgspec's path `where`; _ABSENT where that cannot be told."""
    try:
        value = msgspec.json.decode(body)
        if "[...]" in where:
            return _ABSENT
        for name, index in _STEP.findall(where):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return _ABSENT
    return value


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = msgspec.json.encode(value[:60] if isinstance(value, str) else value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _joined(where: str, name: str) -> str:
    return printable(f"{where}.{name}" if where else name)
