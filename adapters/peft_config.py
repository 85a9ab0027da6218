"""An adapter_config.json as PEFT writes it, with a decision about every one of its fields.

Each field of PEFT 0.21's LoraConfig is read, or has no bearing on inference, or must be off. What
PEFT would do with a field was taken from its source; a field it does not know is accepted only
where it is null, false or empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from adapters.config_combinations import invalid_combinations
from adapters.config_values import (
    PLAIN_NAME,
    as_alpha,
    as_bias,
    as_dropout,
    as_exclusion,
    as_few_names,
    as_flag,
    as_invocation,
    as_layer_patterns,
    as_layers,
    as_optional_text,
    as_rank,
    as_saved_modules,
    as_targets,
    as_token_rows,
    is_one_of,
    pattern_of,
    shown,
)
from adapters.errors import Violation
from adapters.targets import LayerFilter, NameSelector, PatternError, PatternValues, Targets

#: Fields that only matter for training, for initialisation or for where a file came from.
IGNORED_FIELDS = frozenset(
    "auto_mapping corda_config eva_config inference_mode loftq_config lora_ga_config peft_version "
    "qalora_group_size revision runtime_config".split()
)

#: Features that are not served: field -> the values that leave it off, beside null.
OFF_FIELDS: dict[str, tuple[Any, ...]] = {
    "arrow_config": (),
    "ensure_weight_tying": (False,),
    "kasa_config": (),
    "layer_replication": ([],),
    "megatron_config": ({},),
    "megatron_core": ("megatron.core",),
    "monteclora_config": (),
    "use_bdlora": (),
    "use_qalora": (False,),
    "velora_config": (),
}

READ_FIELDS = frozenset(
    "alora_invocation_tokens alpha_pattern base_model_name_or_path bias exclude_modules "
    "fan_in_fan_out init_lora_weights layers_pattern layers_to_transform lora_alpha lora_bias "
    "lora_dropout modules_to_save peft_type r rank_pattern target_modules target_parameters "
    "task_type trainable_token_indices use_dora use_rslora".split()
)

#: Initialisations that leave the base as it was; the others train on a changed base.
BASE_KEEPING_INITS = ("gaussian", "eva", "orthogonal", "mica")

#: Starts of initialisations whose adapters PEFT can convert to plain LoRA when it saves them.
CONVERTIBLE_INITS = ("pissa", "olora", "corda", "lora_ga")

#: From this many names on, PEFT shortens a target list, which changes what a layer filter spares.
SHORTENED_LIST = 20

#: Characters of a violation's subject.
MAX_SUBJECT = 1024

T = TypeVar("T")


@dataclass(frozen=True)
class PeftConfig:
    """What a config says. A value that could not be read is None, and a violation says why.

    `alpha` over the rank (or its square root, `use_rslora`) is the scale; the patterns override
    `alpha` and `rank` by module. `bias` is "none", "all" or "lora_only". `token_rows` maps endings
    of module paths, or None for the input embedding, to the token ids whose rows are trained.
    `target_parameters` are endings of parameter paths, `saved` endings of paths of modules.
    """

    rank: int | None = None
    alpha: float | None = None
    rank_pattern: PatternValues[int] | None = None
    alpha_pattern: PatternValues[float] | None = None
    use_rslora: bool = False
    targets: Targets | None = None
    target_parameters: tuple[str, ...] = ()
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    saved: tuple[str, ...] = ()
    token_rows: Mapping[str | None, tuple[int, ...]] = field(default_factory=dict)
    invocation: tuple[int, ...] = ()
    base_model: str | None = None
    violations: tuple[Violation, ...] = ()
    warnings: tuple[str, ...] = ()


def parse_config(data: dict[str, Any]) -> PeftConfig:
    """Decide every field of a config. Never raises; see `PeftConfig.violations`."""
    if (kind := data.get("peft_type")) != "LORA":
        found = f"is {shown(kind)}" if "peft_type" in data else "is missing"
        message = f'{found}; only "LORA" is served'
        return PeftConfig(violations=(Violation("unsupported_peft_type", "peft_type", message),))
    reader = _Reader(data)
    reader.check_features()
    reader.read("lora_dropout", as_dropout, 0.0)
    reader.violations.extend(invalid_combinations(data))
    return PeftConfig(
        rank=reader.read("r", as_rank),
        alpha=reader.read("lora_alpha", as_alpha),
        rank_pattern=reader.read("rank_pattern", pattern_of(as_rank), {}),
        alpha_pattern=reader.read("alpha_pattern", pattern_of(as_alpha), {}),
        use_rslora=bool(reader.read("use_rslora", as_flag, False)),
        targets=reader.targets(),
        target_parameters=tuple(reader.read("target_parameters", as_few_names, None) or ()),
        use_dora=bool(reader.read("use_dora", as_flag, False)),
        lora_bias=bool(reader.read("lora_bias", as_flag, False)),
        bias=reader.read("bias", as_bias, "none") or "none",
        saved=tuple(reader.saved()),
        token_rows=reader.read("trainable_token_indices", as_token_rows, None) or {},
        invocation=reader.read("alora_invocation_tokens", as_invocation, None) or (),
        base_model=reader.read("base_model_name_or_path", as_optional_text, None),
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
        self.violations.append(Violation(code, field[:MAX_SUBJECT], message))

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
        for name, value in self.data.items():
            if name in READ_FIELDS or name in IGNORED_FIELDS or value is None:
                continue
            if name in OFF_FIELDS:
                if not is_one_of(value, OFF_FIELDS[name]):
                    off = " or ".join(["null", *(shown(v) for v in OFF_FIELDS[name])])
                    message = f"is {shown(value)}, which is not served; it must be {off}"
                    self.refuse("unsupported_feature", name, message)
            elif not is_one_of(value, (False, "", [], {})):
                message = f"is not a known field, and its value {shown(value)} is not empty"
                self.refuse("unknown_field", name, message)
        for name in ("corda_config", "loftq_config", "lora_ga_config"):
            if self.data.get(name):
                self.warnings.append(f"{name} only matters for initialisation and is ignored")
        if self.data.get("task_type") not in (None, "CAUSAL_LM"):
            message = f'is {shown(self.data["task_type"])}; it must be "CAUSAL_LM" or null'
            self.refuse("unsupported_task_type", "task_type", message)
        self._check_init(self.data.get("init_lora_weights", True))
        if self.read("fan_in_fan_out", as_flag, False):
            self.warnings.append(
                "fan_in_fan_out is ignored: as in PEFT, the base says how its weights are stored"
            )

    def _check_init(self, value: Any) -> None:
        known = isinstance(value, str) and value.lower() in BASE_KEEPING_INITS
        if known or isinstance(value, bool | None):
            return
        message = (
            f"is {shown(value)}; only true, false and {', '.join(BASE_KEEPING_INITS)} are "
            "known to leave the base as it was"
        )
        if isinstance(value, str) and value.lower().startswith(CONVERTIBLE_INITS):
            message = (
                f"is {shown(value)}, which trains on a changed base; save the adapter with PEFT's "
                "save_pretrained(..., path_initial_model_for_weight_conversion=<the adapter as "
                "initialised>), which converts it to plain LoRA"
            )
        elif value == "loftq":
            message = (
                'is "loftq", which trains on a base quantised in its own way; the adapter is only '
                "exact on that base, so merge it there or train again from this base"
            )
        self.refuse("unsupported_feature", "init_lora_weights", message)

    def saved(self) -> list[str]:
        names = self.read("modules_to_save", as_few_names, None) or []
        for name in names:
            if not PLAIN_NAME.fullmatch(name):
                message = f"holds {shown(name)}; only letters, digits, '_', '-' and '.' are served"
                self.refuse("invalid_adapter_config", "modules_to_save", message)
                return []
        return names

    def targets(self) -> Targets | None:
        before = len(self.violations)
        if self.data.get("target_modules") is None and self.data.get("target_parameters"):
            include: NameSelector | None = NameSelector()
        else:
            include = self.read("target_modules", as_targets)
        exclude = self.read("exclude_modules", as_exclusion, None)
        layers = self._layers()
        if len(self.violations) > before:
            return None
        saved = self.data.get("modules_to_save")
        return Targets(include, exclude, layers, as_saved_modules(saved))

    def _layers(self) -> LayerFilter | None:
        layers = self.read("layers_to_transform", as_layers, None)
        patterns = self.read("layers_pattern", as_layer_patterns, None)
        names = self.data.get("target_modules")
        for limit in ("layers_to_transform", "layers_pattern"):
            if isinstance(names, str) and self.data.get(limit) is not None:
                message = "cannot be combined with target_modules given as one string"
                self.refuse("invalid_adapter_config", limit, message)
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
