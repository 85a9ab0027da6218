"""Fields of an adapter_config.json that exclude one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from adapters.errors import Violation


def invalid_combinations(data: dict[str, Any]) -> Iterator[Violation]:
    """A violation for each field that PEFT 0.21 refuses beside another, or that cannot be served
    beside it; `data` is the whole config."""
    variants = _variants(data)
    for name, other in [*((variants[0], name) for name in variants[1:]), *_beside_lora_bias(data)]:
        yield _refused(name, f"cannot be combined with {other}, as in PEFT")
    if data.get("target_parameters"):
        for name in (*variants, "lora_bias", "lora_dropout", "fan_in_fan_out"):
            if data.get(name):
                yield _refused(name, _NOT_WITH_PARAMETERS)
    if data.get("alora_invocation_tokens"):
        for name in ("modules_to_save", "trainable_token_indices", "bias"):
            if data.get(name) not in (None, "none", [], {}):
                yield _refused(name, _NOT_WITH_INVOCATION)


def _beside_lora_bias(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if data.get("lora_bias"):
        if data.get("use_dora"):
            yield "lora_bias", "use_dora"
        if not isinstance(data.get("init_lora_weights", True), bool):
            yield "lora_bias", "init_lora_weights other than true or false"


def _variants(data: dict[str, Any]) -> list[str]:
    """The fields that ask for a variant of LoRA, of which PEFT allows one at most."""
    found = [name for name in ("use_dora", "alora_invocation_tokens") if data.get(name)]
    if data.get("init_lora_weights") == "mica":
        found.append("init_lora_weights")
    return found


_NOT_WITH_PARAMETERS = (
    "cannot be combined with target_parameters, as in PEFT; where it has no part in what was "
    "trained, such as dropout, turn it off in the config"
)
_NOT_WITH_INVOCATION = (
    "cannot be combined with alora_invocation_tokens: it would change what comes before the "
    "invocation, which must be the base's own"
)


def _refused(name: str, message: str) -> Violation:
    return Violation("invalid_combination", name, message)
