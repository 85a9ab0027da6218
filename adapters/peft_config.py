"""An adapter_config.json as PEFT writes it, with a decision about every one of its fields.

Each field of PEFT 0.21's LoraConfig is read, or has no bearing on inference, or must be off. What
PEFT would do with a field was taken from its source; a field it does not know is accepted only
where it is null, false or empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from adapters.errors import Violation
from adapters.targets import (
    ALL_LINEAR,
    LayerFilter,
    NameSelector,
    PatternError,
    PatternValues,
    Targets,
)

#: Fields that only matter for training, for initialisation or for where a file came from.
IGNORED_FIELDS = frozenset(
    "auto_mapping corda_config eva_config inference_mode loftq_config lora_dropout lora_ga_config "
    "peft_version qalora_group_size revision runtime_config".split()
)

#: Features that are not served: field -> the values that leave it off, beside null.
OFF_FIELDS: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "ensure_weight_tying": (False,),
    "kasa_config": (),
    "layer_replication": ([],),
    "lora_bias": (False,),
    "megatron_config": ({},),
    "megatron_core": ("megatron.core",),
    "modules_to_save": ([],),
    "monteclora_config": (),
    "target_parameters": ([],),
    "trainable_token_indices": (),
    "use_bdlora": (),
    "use_dora": (False,),
    "use_qalora": (False,),
    "velora_config": (),
}

READ_FIELDS = frozenset(
    "alpha_pattern base_model_name_or_path bias exclude_modules fan_in_fan_out init_lora_weights "
    "layers_pattern layers_to_transform lora_alpha peft_type r rank_pattern target_modules "
    "task_type use_rslora".split()
)

#: Initialisations that leave the base as it was; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA)
#: train on a changed base.
BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal", "mica")

#: From this many names on, PEFT shortens a target list, which changes what a layer filter spares.
SHORTENED_LIST = 20

MAX_TEXT = 1024

T = TypeVar("T")


@dataclass(frozen=True)
class PeftConfig:
    """What a config says. A value that could not be read is None, and a violation says why.

    `alpha` over the rank (or its square root, `use_rslora`) is the scale; the patterns override
    `alpha` and `rank` by module.
    """

    rank: int | None = None
    alpha: float | None = None
    rank_pattern: PatternValues[int] | None = None
    alpha_pattern: PatternValues[float] | None = None
    use_rslora: bool = False
    targets: Targets | None = None
    base_model: str | None = None
    violations: tuple[Violation, ...] = ()
    warnings: tuple[str, ...] = ()


def parse_config(data: dict[str, Any]) -> PeftConfig:
    """Decide every field of a config. Never raises; see `PeftConfig.violations`."""
    if (kind := data.get("peft_type")) != "LORA":
        found = f"is {_shown(kind)}" if "peft_type" in data else "is missing"
        message = f'{found}; only "LORA" is served'
        return PeftConfig(violations=(Violation("unsupported_peft_type", "peft_type", message),))
    reader = _Reader(data)
    reader.check_features()
    return PeftConfig(
        rank=reader.read("r", _rank),
        alpha=reader.read("lora_alpha", _alpha),
        rank_pattern=reader.read("rank_pattern", _pattern_of(_rank), {}),
        alpha_pattern=reader.read("alpha_pattern", _pattern_of(_alpha), {}),
        use_rslora=bool(reader.read("use_rslora", _flag, False)),
        targets=reader.targets(),
        base_model=reader.read("base_model_name_or_path", _optional_text, None),
        violations=tuple(reader.violations),
        warnings=tuple(reader.warnings),
    )


class _Reader:
    """Reads the fields of one config and gathers what is wrong with them."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.violations: list[Violation] = []
        self.warnings: list[str] = []

    def refuse(self, code: str, field: str, message: str) -> None:
        self.violations.append(Violation(code, field[:MAX_TEXT], message))

    def read(self, field: str, convert: Callable[[Any], T], *default: Any) -> T | None:
        """The field's converted value; None, and a violation, where it has none that will do."""
        if field not in self.data and not default:
            self.refuse("invalid_adapter_config", field, "is missing")
            return None
        try:
            return convert(self.data.get(field, *default))
        except PatternError as error:
            self.refuse("invalid_pattern", field, str(error))
        except ValueError as error:
            self.refuse("invalid_adapter_config", field, str(error))
        return None

    def check_features(self) -> None:
        """Refuse what goes beyond plain LoRA, and what is not known."""
        for field, value in self.data.items():
            if field in READ_FIELDS or field in IGNORED_FIELDS or value is None:
                continue
            if field in OFF_FIELDS:
                if not _one_of(value, OFF_FIELDS[field]):
                    off = " or ".join(["null", *(_shown(v) for v in OFF_FIELDS[field])])
                    message = f"is {_shown(value)}, which is not served; it must be {off}"
                    self.refuse("unsupported_feature", field, message)
            elif not _one_of(value, (False, "", [], {})):
                message = f"is not a known field, and its value {_shown(value)} is not empty"
                self.refuse("unknown_field", field, message)
        for field in ("corda_config", "loftq_config", "lora_ga_config"):
            if self.data.get(field):
                self.warnings.append(f"{field} only matters for initialisation and is ignored")
        if self.data.get("task_type") not in (None, "CAUSAL_LM"):
            message = f'is {_shown(self.data["task_type"])}; it must be "CAUSAL_LM" or null'
            self.refuse("unsupported_task_type", "task_type", message)
        self._check_init(self.data.get("init_lora_weights", True))
        self.read("bias", _bias, "none")
        if self.read("fan_in_fan_out", _flag, False):
            self.warnings.append(
                "fan_in_fan_out is true, but the base's layers are linear: ignored, as PEFT does"
            )

    def _check_init(self, value: Any) -> None:
        known = isinstance(value, str) and value.lower() in BASE_KEEPING_INITS
        if not known and not isinstance(value, bool | None):
            message = (
                f"is {_shown(value)}; only true, false and {', '.join(BASE_KEEPING_INITS)} are "
                "known to leave the base as it was"
            )
            self.refuse("unsupported_feature", "init_lora_weights", message)

    def targets(self) -> Targets | None:
        before = len(self.violations)
        include = self.read("target_modules", _target_modules)
        exclude = self.read("exclude_modules", _exclude_modules, None)
        layers = self._layers()
        if len(self.violations) > before:
            return None
        return Targets(include, exclude, layers)

    def _layers(self) -> LayerFilter | None:
        layers = self.read("layers_to_transform", _layer_numbers, None)
        patterns = self.read("layers_pattern", _layer_patterns, None)
        names = self.data.get("target_modules")
        for field in ("layers_to_transform", "layers_pattern"):
            if isinstance(names, str) and self.data.get(field) is not None:
                message = "cannot be combined with target_modules given as one string"
                self.refuse("invalid_adapter_config", field, message)
        if patterns and self.data.get("layers_to_transform") is None:
            message = "has no meaning without layers_to_transform"
            self.refuse("invalid_adapter_config", "layers_pattern", message)
        if not layers:
            return None
        if isinstance(names, list) and len(names) >= SHORTENED_LIST:
            message = (
                f"is combined with {len(names)} target_modules; PEFT is only predictable "
                f"with fewer than {SHORTENED_LIST}"
            )
            self.refuse("invalid_adapter_config", "layers_to_transform", message)
        try:
            return LayerFilter.of(layers, patterns or ())
        except PatternError as error:
            self.refuse("invalid_pattern", "layers_pattern", str(error))
            return None


def _rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"is {_shown(value)}; it must be a whole number of at least 1")
    return value


def _alpha(value: Any) -> float:
    if type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number >= 0:
            return number
    raise ValueError(f"is {_shown(value)}; it must be a finite number of at least 0")


def _pattern_of(convert: Callable[[Any], T]) -> Callable[[Any], PatternValues[T]]:
    def pattern_values(value: Any) -> PatternValues[T]:
        if not isinstance(value, dict | None):
            raise ValueError(f"is {_shown(value)}; it must be an object of patterns")
        values = {}
        for key, entry in (value or {}).items():
            try:
                values[key] = convert(entry)
            except ValueError as error:
                raise ValueError(f"entry {_shown(key)} {error}") from None
        return PatternValues(values)

    return pattern_values


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | None):
        raise ValueError(f"is {_shown(value)}; it must be true or false")
    return bool(value)


def _optional_text(value: Any) -> str | None:
    if not isinstance(value, str | None) or len(value or "") > MAX_TEXT:
        raise ValueError(f"is {_shown(value)}; it must be null or at most {MAX_TEXT} characters")
    return value


def _bias(value: Any) -> None:
    # "all" and "lora_only" are plain LoRA where the base has no biases; bias tensors in the file
    # are refused as tensors.
    if value not in ("none", "all", "lora_only"):
        raise ValueError(f'is {_shown(value)}; it must be "none", "all" or "lora_only"')


def _target_modules(value: Any) -> NameSelector | None:
    if isinstance(value, str):
        return None if value.lower() == ALL_LINEAR else NameSelector.of(value)
    return NameSelector.of(_names(value))


def _exclude_modules(value: Any) -> NameSelector | None:
    if not value and isinstance(value, str | list | None):
        return None
    return NameSelector.of(value if isinstance(value, str) else _names(value))


def _names(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"is {_shown(value)}; it must be a list of names or one pattern")
    return value


def _layer_numbers(value: Any) -> list[int]:
    numbers = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(number) is not int for number in numbers):
        raise ValueError(f"is {_shown(value)}; it must be a layer number or a list of them")
    return numbers


def _layer_patterns(value: Any) -> list[str]:
    patterns = [value] if isinstance(value, str) else value or []
    return [name for name in _names(patterns) if name or isinstance(value, list)]


def _one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Equality that tells false from 0."""
    return any(type(value) is type(other) and value == other for other in allowed)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"
