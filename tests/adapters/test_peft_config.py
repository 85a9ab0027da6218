from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from adapters.config_values import MAX_INVOCATION, MAX_NAMES
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
        ("use_qalora", True),
        ("ensure_weight_tying", True),
        ("layer_replication", [[0, 2], [1, 2]]),
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
        *[("lora_dropout", value) for value in ("x", 4.0, -0.1, None)],
        *[("lora_alpha", value) for value in BAD_ALPHAS],
        ("use_rslora", 1),
        ("use_dora", 0),
        ("use_dora", "yes"),
        ("lora_bias", 1),
        ("modules_to_save", "lm_head"),
        ("modules_to_save", ["lm_head", 3]),
        ("modules_to_save", [""]),
        ("modules_to_save", ["lm_head|q_proj"]),
        ("modules_to_save", [f"m{i}" for i in range(MAX_NAMES + 1)]),
        ("target_parameters", "experts.gate_up_proj"),
        ("target_parameters", [["experts"]]),
        ("trainable_token_indices", []),
        ("trainable_token_indices", [3, 3]),
        ("trainable_token_indices", [-1]),
        ("trainable_token_indices", [3.0]),
        ("trainable_token_indices", [True]),
        ("trainable_token_indices", "3"),
        ("trainable_token_indices", {"embed_tokens": []}),
        ("trainable_token_indices", {"embed_tokens": 3}),
        ("trainable_token_indices", {"": [3]}),
        ("alora_invocation_tokens", []),
        ("alora_invocation_tokens", 5),
        ("alora_invocation_tokens", "<tool>"),
        ("alora_invocation_tokens", [-5]),
        ("alora_invocation_tokens", ["5"]),
        ("alora_invocation_tokens", [5] * (MAX_INVOCATION + 1)),
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
        PLAIN | {"r": 0, "use_qalora": True, "future": 1, "task_type": "X", "lora_alpha": 16}
    )
    assert {violation.subject for violation in parsed.violations} == {
        "r",
        "use_qalora",
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
    parsed = parse_config(PLAIN | {"use_qalora": "x" * 100_000, "f" * 100_000: 1})
    assert all(len(v.message) < 300 and len(v.subject) <= 1024 for v in parsed.violations)


def test_what_lora_can_be_combined_with_is_read() -> None:
    parsed = parse_config(
        PLAIN
        | {
            "bias": "lora_only",
            "use_dora": True,
            "modules_to_save": ["lm_head", "norm"],
            "trainable_token_indices": {"embed_tokens": [9, 3]},
        }
    )
    assert parsed.violations == ()
    assert (parsed.bias, parsed.use_dora, parsed.lora_bias) == ("lora_only", True, False)
    assert parsed.saved == ("lm_head", "norm")
    assert parsed.token_rows == {"embed_tokens": (9, 3)}
    parsed = parse_config(PLAIN | {"trainable_token_indices": [9, 3], "lora_bias": True})
    assert parsed.violations == ()
    assert (parsed.token_rows, parsed.lora_bias) == ({None: (9, 3)}, True)
    parsed = parse_config(PLAIN | {"alora_invocation_tokens": [5, 6, 5], "lora_bias": True})
    assert parsed.violations == ()
    assert parsed.invocation == (5, 6, 5)


@pytest.mark.parametrize("targets", [None, []])
def test_targets_may_be_left_out_where_parameters_are_targeted(targets: Any) -> None:
    change = {"target_modules": targets, "target_parameters": ["experts.down_proj"]}
    parsed = parse_config(PLAIN | change)
    assert parsed.violations == ()
    assert parsed.targets is not None
    assert parsed.targets.select(["model.layers.0.q_proj"], None) == frozenset()
    assert parsed.target_parameters == ("experts.down_proj",)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"use_dora": True, "alora_invocation_tokens": [5]}, "use_dora"),
        ({"use_dora": True, "init_lora_weights": "mica"}, "use_dora"),
        ({"alora_invocation_tokens": [5], "init_lora_weights": "mica"}, "alora_invocation_tokens"),
        ({"use_dora": True, "lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "gaussian", "lora_bias": True}, "lora_bias"),
        ({"use_dora": True, "target_parameters": ["e.w"]}, "use_dora"),
        ({"lora_bias": True, "target_parameters": ["e.w"]}, "lora_bias"),
        ({"lora_dropout": 0.1, "target_parameters": ["e.w"]}, "lora_dropout"),
        ({"fan_in_fan_out": True, "target_parameters": ["e.w"]}, "fan_in_fan_out"),
        ({"init_lora_weights": "mica", "target_parameters": ["e.w"]}, "init_lora_weights"),
    ],
)
@pytest.mark.filterwarnings("ignore:aLoRA is currently only supported:UserWarning")
def test_what_peft_refuses_to_combine_is_refused(change: dict[str, Any], field: str) -> None:
    assert _only(PLAIN | change) == ("invalid_combination", field)
    base: Any = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(8, 8), "e": _Experts()})
    targets = [] if "target_parameters" in change else ["q_proj"]
    with pytest.raises(ValueError, match=r"support|does not work"):
        get_peft_model(base, LoraConfig(target_modules=targets, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [3]},
        {"bias": "all"},
        {"bias": "lora_only"},
    ],
)
def test_what_reaches_in_front_of_an_invocation_is_refused(change: dict[str, Any]) -> None:
    config = PLAIN | {"alora_invocation_tokens": [5]} | change
    assert _only(config) == ("invalid_combination", next(iter(change)))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "lora_ga"])
def test_adapters_of_a_changed_base_come_with_advice(init: str) -> None:
    (violation,) = parse_config(PLAIN | {"init_lora_weights": init}).violations
    assert "path_initial_model_for_weight_conversion" in violation.message


class _Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 8, 8))


def _only(config: dict[str, Any]) -> tuple[str, str]:
    parsed: PeftConfig = parse_config(config)
    (violation,) = parsed.violations
    return violation.code, violation.subject
