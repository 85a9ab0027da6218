from __future__ import annotations

from adapters.errors import AdapterRejected, Violation

MISSHAPED = [
    Violation("shape_mismatch", f"model.layers.{i}.q_proj.lora_A.weight", "is [8, 64], not [8, 48]")
    for i in range(59)
]
FEATURE = Violation("unsupported_feature", "use_dora", "is true, but only false is supported")


def test_one_reason_is_told_whole() -> None:
    assert str(AdapterRejected([FEATURE])) == (
        "The adapter is refused: use_dora: is true, but only false is supported."
    )


def test_many_reasons_are_counted_by_kind() -> None:
    tensors = [Violation("unsupported_tensor", f"t{i}", "is no LoRA tensor") for i in range(59)]
    assert str(AdapterRejected([FEATURE, *tensors])) == (
        "Refused for 60 reasons: unsupported_feature (1): use_dora: is true, but only false is "
        "supported; unsupported_tensor (59), first: t0: is no LoRA tensor."
    )


def test_an_adapter_of_another_base_model_is_called_so() -> None:
    text = str(AdapterRejected(MISSHAPED))
    assert text.startswith("This adapter seems to be trained on another base model. Refused for 59")
    assert "another base" not in str(AdapterRejected(MISSHAPED[:1]))
    assert "another base" not in str(AdapterRejected([*MISSHAPED[:3], *[FEATURE] * 3]))


def test_the_summary_is_short_whatever_was_found() -> None:
    violations = [Violation(f"code_{i}", "x" * 300, "y" * 300) for i in range(1000)]
    rejected = AdapterRejected(violations)
    assert len(str(rejected)) <= 400
    assert len(rejected.violations) == 1000
    assert len(str(AdapterRejected(violations[:1]))) <= 400


def test_the_summary_shows_no_control_characters() -> None:
    violation = Violation("unexpected_key", "\u202eevil\x1b[2J\n", "is not named as PEFT names it")
    text = str(AdapterRejected([violation]))
    assert text.isprintable() and "\\u202eevil\\x1b[2J\\n" in text
