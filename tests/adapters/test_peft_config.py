from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from peft import LoraConfig

from adapters.peft_config import IGNORED_FIELDS, OFF_FIELDS, READ_FIELDS, PeftConfig, parse_config

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
BAD_RANKS: list[Any] = [0, -4, "4", 4.0, True, None, []]
BAD_ALPHAS: list[Any] = [None, -8, "16", True, 10**400, float("inf"), float("nan")]


def test_every_field_of_peft_is_decided_exactly_once() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    decided = [*READ_FIELDS, *IGNORED_FIELDS, *OFF_FIELDS]
    assert fields == set(decided)
    assert len(decided) == len(set(decided))


def test_the_defaults_of_peft_are_accepted_whole() -> None:
    defaults: Any = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    config = defaults.to_dict()
    config |= {"peft_type": "LORA", "target_modules": ["q_proj"]}
    parsed = parse_config(config)
    assert (parsed.violations, parsed.warnings) == ((), ())
    assert (parsed.rank, parsed.alpha, parsed.use_rslora) == (8, 8.0, False)


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": 8.5},
        {"lora_alpha": 0},
        {"task_type": None},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"rank_pattern": None, "alpha_pattern": None},
        {"use_rslora": None, "use_dora": None, "fan_in_fan_out": None},
        {"modules_to_save": [], "layer_replication": [], "target_parameters": []},
        {"future_option": None, "another": False, "third": {}, "fourth": [], "fifth": ""},
        {"peft_version": "9.9", "corda_config": None, "eva_config": None},
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM"}, "runtime_config": {}},
        *(
            {"init_lora_weights": value}
            for value in (True, False, "gaussian", "orthogonal", "mica")
        ),
    ],
)
def test_what_does_not_change_the_maths_is_accepted(change: dict[str, Any]) -> None:
    parsed = parse_config(PLAIN | change)
    assert (parsed.violations, parsed.warnings) == ((), ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("use_dora", 0),
        ("lora_bias", True),
        ("use_qalora", True),
        ("ensure_weight_tying", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [3, 5]),
        ("trainable_token_indices", {"embed_tokens": [3]}),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("alora_invocation_tokens", [5, 6]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("megatron_config", {"hidden": 1}),
        ("megatron_core", "os"),
        ("arrow_config", {}),
        ("kasa_config", {"beta": 1.0}),
        ("velora_config", {}),
        ("monteclora_config", {}),
        ("use_bdlora", {"nblocks": 2}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "newest"),
        ("init_lora_weights", 1),
    ],
)
def test_a_feature_beyond_plain_lora_is_refused_by_name(field: str, value: Any) -> None:
    assert _only(PLAIN | {field: value}) == ("unsupported_feature", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("r", value) for value in BAD_RANKS],
        *[("lora_alpha", value) for value in BAD_ALPHAS],
        ("use_rslora", 1),
        ("use_rslora", "true"),
        ("fan_in_fan_out", "yes"),
        ("bias", "some"),
        ("bias", None),
        ("target_modules", None),
        ("target_modules", ["q_proj", 3]),
        ("target_modules", {"q_proj": 1}),
        ("exclude_modules", 3),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": 2.0}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": "8"}),
        ("alpha_pattern", {"q_proj": -1}),
        ("layers_to_transform", "1"),
        ("layers_to_transform", [True]),
        ("layers_to_transform", 1.0),
        ("layers_pattern", "layers"),
        ("base_model_name_or_path", 3),
        ("base_model_name_or_path", "n" * 5000),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(field: str, value: Any) -> None:
    assert _only(PLAIN | {field: value}) == ("invalid_adapter_config", field)


@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules"])
def test_a_config_without_its_core_is_refused(field: str) -> None:
    config = dict(PLAIN)
    del config[field]
    assert _only(config) == ("invalid_adapter_config", field)


@pytest.mark.parametrize("kind", ["ADALORA", "IA3", "PROMPT_TUNING", "NOPE", "lora", None, 3, []])
def test_another_method_is_refused_whatever_else_its_config_says(kind: Any) -> None:
    assert _only({"peft_type": kind, "feedforward_modules": ["x"], "r": "?"}) == (
        "unsupported_peft_type",
        "peft_type",
    )
    assert _only({"r": 8}) == ("unsupported_peft_type", "peft_type")


@pytest.mark.parametrize("task", ["SEQ_CLS", "SEQ_2_SEQ_LM", "causal_lm", 1])
def test_another_task_is_refused(task: Any) -> None:
    assert _only(PLAIN | {"task_type": task}) == ("unsupported_task_type", "task_type")


@pytest.mark.parametrize("value", [{"a": 1}, True, 1, "on", [0], 0])
def test_an_unknown_field_that_says_something_is_refused(value: Any) -> None:
    assert _only(PLAIN | {"future_option": value}) == ("unknown_field", "future_option")


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": "(?!lm_head).*"},
        {"exclude_modules": "["},
        {"rank_pattern": {"(q": 4}},
        {"alpha_pattern": {"(?=q)": 4}},
        {"layers_pattern": "(", "layers_to_transform": [0]},
    ],
)
def test_a_pattern_that_cannot_be_evaluated_is_refused(change: dict[str, Any]) -> None:
    assert _only(PLAIN | change) == ("invalid_pattern", next(iter(change)))


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": ".*q_proj", "layers_to_transform": [0]},
        {"target_modules": "all-linear", "layers_to_transform": [0]},
        {"target_modules": [f"m{i}" for i in range(20)], "layers_to_transform": [0]},
    ],
)
def test_layers_with_targets_that_peft_cannot_limit_are_refused(change: dict[str, Any]) -> None:
    assert _only(PLAIN | change) == ("invalid_adapter_config", "layers_to_transform")


def test_everything_wrong_is_reported_at_once_and_the_rest_is_read() -> None:
    parsed = parse_config(
        PLAIN | {"r": 0, "use_dora": True, "future": 1, "task_type": "X", "lora_alpha": 16}
    )
    assert {violation.subject for violation in parsed.violations} == {
        "r",
        "use_dora",
        "future",
        "task_type",
    }
    assert (parsed.rank, parsed.alpha) == (None, 16.0)
    assert parsed.targets is not None


def test_ignored_oddities_are_warned_about() -> None:
    parsed = parse_config(PLAIN | {"fan_in_fan_out": True, "loftq_config": {"loftq_bits": 4}})
    assert parsed.violations == ()
    assert [warning.split()[0] for warning in parsed.warnings] == ["loftq_config", "fan_in_fan_out"]


def test_messages_stay_short() -> None:
    parsed = parse_config(PLAIN | {"use_dora": "x" * 100_000, "f" * 100_000: 1})
    assert all(len(v.message) < 300 and len(v.subject) <= 1024 for v in parsed.violations)


def _only(config: dict[str, Any]) -> tuple[str, str]:
    parsed: PeftConfig = parse_config(config)
    (violation,) = parsed.violations
    return violation.code, violation.subject
