from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from transformers import AutoModelForCausalLM

from adapters.peft_config import parse_config
from adapters.targets import (
    MAX_PATTERN_LENGTH,
    MAX_PATTERNS,
    LayerFilter,
    NameSelector,
    PatternError,
    PatternValues,
)
from tests.adapters.lora_files import spec_of
from tests.tiny import tiny_base

PATHS = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 10, 11)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
] + ["lm_head"]

HOSTILE = ["(?:[a-z._0-9]+)+!", "(.*.*.*.*.*.*)*X", "(a+)+$", "(([a-z.]*)*)*!", "(.|..)*\\.0!"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.down_proj"]},
        {"target_modules": ["proj", "q_proj"]},
        {"target_modules": r".*layers\.1\..*(q|v)_proj"},
        {"target_modules": r".*\.[qk]_proj|lm_head"},
        {"target_modules": r"(?i).*\.Q_PROJ"},
        {"target_modules": "all-linear"},
        {"target_modules": "All-Linear", "exclude_modules": ["down_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.0\..*"},
        {
            "target_modules": ["q_proj", "o_proj"],
            "exclude_modules": ["model.layers.0.self_attn.q_proj"],
        },
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": 0},
        {"target_modules": ["q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]},
        {
            "target_modules": ["q_proj", "model.layers.0.self_attn.k_proj"],
            "layers_to_transform": [1],
        },
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {
            "target_modules": ["q_proj"],
            "layers_to_transform": [0],
            "layers_pattern": ["h", "layers"],
        },
        {
            "target_modules": ["q_proj"],
            "layers_to_transform": [0],
            "layers_pattern": "h|model.lay.rs",
        },
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ""},
    ],
)
def test_selects_the_modules_that_peft_adapts(base: Path, config: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted: Any = get_peft_model(model, LoraConfig(r=2, **config)).base_model.model
    expected = {name for name, m in adapted.named_modules() if isinstance(m, LoraLayer)}

    parsed = parse_config({"peft_type": "LORA", "r": 2, "lora_alpha": 8} | config)

    assert parsed.violations == ()
    assert parsed.targets is not None
    assert parsed.targets.select(spec_of(base).module_index, "lm_head") == expected


@pytest.mark.parametrize(
    "keys",
    [
        ["q_proj"],
        ["layers.1.self_attn.q_proj", "q_proj"],
        ["q_proj", "layers.1.self_attn.q_proj"],
        ["^model.layers.0.self_attn.q_proj", "down_proj"],
        [r"layers\.1\d\..*", r".*\.0\..*_proj", "lm_head"],
        ["proj", "attn.q_proj", "self.attn.q_proj", "selfXattn.q_proj"],
        ["layers.1.*q_proj", "layers.1..*.k_proj"],
        ["model.layers.1.self_attn.q_proj|lm_head"],
        ["model"],
        ["", "lm.head"],
        ["(?i)LM_HEAD", "mlp.down_proj$"],
    ],
)
def test_pattern_values_take_the_first_key_as_peft_does(keys: list[str]) -> None:
    values = PatternValues({key: index for index, key in enumerate(keys)})

    for path in PATHS:
        peft_keys = [key.replace("(?i)LM_HEAD", "[lL][mM]_head") for key in keys]
        found = get_pattern_key(peft_keys, path)
        expected = peft_keys.index(found) if found in peft_keys else -1
        assert values.get(path, -1) == expected, path


def test_pattern_values_know_which_keys_never_applied() -> None:
    values = PatternValues({"q_proj": 1, "layers.1.self_attn.q_proj": 2, "z.*": 3})
    for path in PATHS:
        values.get(path, 0)
    assert values.unused == ["layers.1.self_attn.q_proj", "z.*"]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_patterns_that_backtrack_for_ever_in_re_return_at_once(pattern: str) -> None:
    path = "model.layers.0.self_attn." + "a" * 400 + "b"
    start = time.perf_counter()
    assert not NameSelector.of(pattern).matches(path)
    assert PatternValues({pattern: 1}).get(path, 0) == 0
    assert time.perf_counter() - start < 10


def test_thousands_of_names_are_looked_up_fast() -> None:
    values = PatternValues({f"layers.{i:04}.q_proj": i for i in range(4000)})
    start = time.perf_counter()
    for i in range(0, 4000, 40):
        assert values.get(f"model.layers.{i:04}.q_proj", -1) == i
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    "pattern",
    ["[", "(?!lm_head).*", r"(q)_\1", "a{1001}", "[[:alpha:]]+_proj", "q{,2}_proj", "a++", r"\Z"],
)
def test_a_pattern_that_cannot_be_evaluated_alike_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="supported|linear time"):
        NameSelector.of(pattern)
    with pytest.raises(PatternError):
        PatternValues({pattern: 1})


def test_thousands_of_groups_take_no_time() -> None:
    nested = "(" * 8000 + ")" * 8000
    start = time.process_time()
    selector, values = NameSelector.of(nested), PatternValues({nested: 1})
    for i in range(300):
        assert not selector.matches(f"model.layers.{i}.q_proj")
        assert values.get(f"model.layers.{i}.q_proj", 0) == 0
    assert time.process_time() - start < 2
    with pytest.raises(PatternError, match="groups; at most 100"):
        LayerFilter.of([0], ["(" * 101 + "a" + ")" * 101])


def test_pattern_sizes_are_bounded() -> None:
    with pytest.raises(PatternError, match=f"at most {MAX_PATTERN_LENGTH}"):
        NameSelector.of("q" * (MAX_PATTERN_LENGTH + 1))
    with pytest.raises(PatternError, match=f"at most {MAX_PATTERNS}"):
        PatternValues({f"q{i}.*": i for i in range(MAX_PATTERNS + 1)})
    with pytest.raises(PatternError, match="at most 4096"):
        PatternValues({f"q{i}": i for i in range(4097)})
