from __future__ import annotations

from adapters.errors import Violation
from api.members import MAX_MEMBERS, Members, printable


def test_a_pickle_is_answered_with_the_way_out() -> None:
    members = Members()
    assert members.select("adapter_model.bin") is None
    (violation,) = members.violations
    assert "convert it to safetensors" in violation.message


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
