from __future__ import annotations

import pytest

from adapters.errors import Violation
from adapters.tokenizer_files import TOKENIZER_FILES
from api.members import MAX_MEMBERS, Members, printable


def test_a_pickle_is_answered_with_the_way_out() -> None:
    members = Members()
    assert members.select("adapter_model.bin") is None
    (violation,) = members.violations
    assert "scripts/check_adapter FOLDER --convert" in violation.message


def test_many_ignored_files_make_a_short_warning() -> None:
    members = Members()
    for i in range(500):
        assert members.select(f"notes/{i}.txt") is None
    (warning,) = members.warnings
    assert warning.endswith("and 490 more") and len(warning) < 300
    assert not members.violations


def test_a_missing_file_is_explained_by_what_was_sent_instead() -> None:
    members = Members()
    members.select("config.json")
    missing = members.explained(Violation("missing_file", "adapter_config.json", "is missing"))
    assert missing.message == "is missing; sent were config.json, which are not read"
    other = Violation("rank_mismatch", "x", "is 5")
    assert members.explained(other) is other
    assert Members().explained(missing) is missing


def test_the_number_of_names_is_bounded_and_said_once() -> None:
    members = Members()
    for i in range(MAX_MEMBERS + 50):
        members.select(f"{i}.txt")
    assert [violation.code for violation in members.violations] == ["too_many_files"]


def test_names_are_made_printable() -> None:
    assert printable("plain.json") == "plain.json"
    assert printable("a\x1b[31m\n") == "a\\x1b[31m\\n"
    assert printable("é") == "é"
    assert len(printable("x" * 1000)) == 100
    assert printable("\ud800") == "\\ud800"


def test_the_tokenizers_files_beside_the_adapter_are_taken() -> None:
    for folder in ("", "./", "checkpoint/"):
        members = Members()
        for name in ("adapter_config.json", *TOKENIZER_FILES, "adapter_model.safetensors"):
            assert members.select(folder + name) == name
        members.finish()
        assert not members.violations and not members.warnings and not members.misplaced


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.json", "merges.txt", "x/y/tokenizer.json"]
)
def test_other_tokenizer_files_are_ignored(name: str) -> None:
    members = Members()
    assert members.select("x/adapter_config.json")
    assert members.select(name) is None
    assert members.warnings == (f"ignored files that are not part of the adapter: {name}",)
    assert not members.violations


def test_tokenizer_files_of_another_folder_are_ignored() -> None:
    members = Members()
    members.select("adapter_config.json")
    assert members.select("base/tokenizer.json") is None
    assert members.select("tokenizer.json") == "tokenizer.json"
    assert not members.misplaced
    assert members.warnings[0].endswith("adapter: base/tokenizer.json")


def test_tokenizer_files_that_turn_out_to_be_of_another_folder_are_misplaced() -> None:
    members = Members()
    assert members.select("base/tokenizer.json") == "tokenizer.json"
    assert not members.misplaced
    assert members.select("adapter_config.json") == "adapter_config.json"
    assert members.select("tokenizer.json") is None
    members.finish()
    assert members.misplaced == ("tokenizer.json",)
    assert not members.violations
    assert members.warnings[0].endswith("adapter: base/tokenizer.json, tokenizer.json")


def test_the_weights_of_mlx_are_taken_in_place_of_pefts() -> None:
    members = Members()
    assert members.select("adapters.safetensors") == "adapters.safetensors"
    assert not members.violations


@pytest.mark.parametrize("order", [1, -1])
def test_two_weights_files_are_one_too_many(order: int) -> None:
    first, second = ("adapter_model.safetensors", "adapters.safetensors")[::order]
    members = Members()
    assert members.select(first) == first
    assert members.select(second) is None
    (violation,) = members.violations
    assert (violation.code, violation.subject) == ("unexpected_weights", second)
    assert first in violation.message


@pytest.mark.parametrize(
    "mark",
    ["\x00", "\x7f", "\x85", "\u202e", "\u2066", "\u200f", "\u200b", "\ufeff", "\u2028"]
    + ["\u2029", "\ue000", "\ud800", "\U000e0041"],
)
def test_names_with_marks_that_nobody_sees_are_unsafe(mark: str) -> None:
    members = Members()
    assert members.select(f"adapter_config{mark}.json") is None
    (violation,) = members.violations
    assert violation.code == "unsafe_name"
    assert violation.subject.isprintable()


@pytest.mark.parametrize(
    "name", ["é.txt", "日本語.txt", "عربى.txt", "a b.txt", "e\u0301.txt", "😀.txt"]
)
def test_names_in_any_script_are_only_ignored(name: str) -> None:
    members = Members()
    assert members.select(name) is None
    assert not members.violations
