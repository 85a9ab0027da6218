"""The values of single fields of an adapter_config.json, checked and in the shape that is used.

Each function takes what the JSON holds (null as None) and raises ValueError, whose message goes on
from the field's name, for what will not do; PatternError is one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from adapters.targets import ALL_LINEAR, NameSelector, PatternValues

MAX_TEXT = 1024
#: Names in `modules_to_save`, `target_parameters` and `trainable_token_indices`.
MAX_NAMES = 256
#: Tokens that an activated LoRA can be invoked by.
MAX_INVOCATION = 64
#: Names that mean the same to PEFT, which reads some as regular expressions, and to us.
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")

T = TypeVar("T")


def as_rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"is {shown(value)}; it must be a whole number of at least 1")
    return value


def as_alpha(value: Any) -> float:
    if type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number >= 0:
            return number
    raise ValueError(f"is {shown(value)}; it must be a finite number of at least 0")


def pattern_of(convert: Callable[[Any], T]) -> Callable[[Any], PatternValues[T]]:
    def pattern_values(value: Any) -> PatternValues[T]:
        if not isinstance(value, dict | None):
            raise ValueError(f"is {shown(value)}; it must be an object of patterns")
        values = {}
        for key, entry in (value or {}).items():
            try:
                values[key] = convert(entry)
            except ValueError as error:
                raise ValueError(f"entry {shown(key)} {error}") from None
        return PatternValues(values)

    return pattern_values


def as_dropout(value: Any) -> float:
    """Has no effect, but PEFT makes a layer of it."""
    if type(value) in (int, float) and 0 <= value <= 1:
        return float(value)
    raise ValueError(f"is {shown(value)}; it must be a number from 0 to 1")


def as_flag(value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise ValueError(f"is {shown(value)}; it must be true or false")
    return bool(value)


def as_optional_text(value: Any) -> str | None:
    if not isinstance(value, str | None) or len(value or "") > MAX_TEXT:
        raise ValueError(f"is {shown(value)}; it must be null or at most {MAX_TEXT} characters")
    return value


def as_bias(value: Any) -> str:
    if value not in ("none", "all", "lora_only"):
        raise ValueError(f'is {shown(value)}; it must be "none", "all" or "lora_only"')
    return str(value)


def as_token_rows(value: Any) -> dict[str | None, tuple[int, ...]]:
    if not isinstance(value, dict):
        return {} if value is None else {None: _token_ids(value)}
    as_few_names(list(value))
    return {name: _token_ids(ids) for name, ids in value.items()}


def _token_ids(value: Any) -> tuple[int, ...]:
    tokens = _tokens(value)
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"names a token twice in {shown(value)}")
    return tokens


def as_invocation(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    tokens = _tokens(value)
    if len(tokens) > MAX_INVOCATION:
        raise ValueError(f"holds {len(tokens)} tokens; at most {MAX_INVOCATION} are served")
    return tokens


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"is {shown(value)}; it must be null or a list of token ids")
    if any(type(token) is not int or token < 0 for token in value):
        raise ValueError(f"holds {shown(value)}; token ids must be whole numbers of at least 0")
    return tuple(value)


def as_few_names(value: Any) -> list[str]:
    if isinstance(value, str):
        raise ValueError(f"is {shown(value)}; it must be a list of names")
    names = [] if value is None else _names(value)
    if len(names) > MAX_NAMES:
        raise ValueError(f"holds {len(names)} names; at most {MAX_NAMES} are served")
    if "" in names:
        raise ValueError("holds an empty name")
    return names


def as_saved_modules(value: Any) -> NameSelector | None:
    """The modules that PEFT keeps LoRA off, for they are saved whole or within such a one."""
    try:
        names = [name for name in as_few_names(value) if PLAIN_NAME.fullmatch(name)]
    except ValueError:
        return None
    if not names:
        return None
    return NameSelector.of(rf"(?:.*\.)?(?:{'|'.join(names)})(?:\..*)?")


def as_targets(value: Any) -> NameSelector | None:
    if isinstance(value, str):
        return None if value.lower() == ALL_LINEAR else NameSelector.of(value)
    return NameSelector.of(_names(value))


def as_exclusion(value: Any) -> NameSelector | None:
    if not value and isinstance(value, str | list | None):
        return None
    return NameSelector.of(value if isinstance(value, str) else _names(value))


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"is {shown(value)}; it must be a list of names or one pattern")
    return value


def as_layers(value: Any) -> list[int]:
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(number) is not int for number in numbers):
        raise ValueError(f"is {shown(value)}; it must be a layer number or a list of them")
    return numbers


def as_layer_patterns(value: Any) -> list[str]:
    patterns = [value] if isinstance(value, str) else value or []
    return [name for name in _names(patterns) if name or isinstance(value, list)]


def is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Equality that tells false from 0."""
    return any(type(value) is type(other) and value == other for other in allowed)


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"
