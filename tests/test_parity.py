"""Every feature of PEFT's LoRA family is served exactly or refused, and docs/parity.md says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.features import FEATURES, Feature
from tests.parity import CONDITIONS, PAGE, TOLERANCE, measure, right
from tests.tiny import tiny_base

#: PEFT warns of much that it then does, such as LoRA on a tied head.
pytestmark = pytest.mark.filterwarnings("ignore::Warning:peft")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> a tiny base, made when first asked for."""

    class Bases(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            self[family] = tiny_base(tmp_path_factory.mktemp(family) / "base", family)
            return self[family]

    return Bases()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_equals_peft_or_is_refused(
    feature: Feature, bases: dict[str, Path], tmp_path: Path
) -> None:
    found = measure(feature, bases[feature.family], tmp_path)
    assert right(feature, found), found
    assert _page()[feature.name, feature.family] == {
        condition: feature.refused or "equal" for condition in CONDITIONS
    }


def test_the_page_lists_these_features_and_no_others() -> None:
    assert list(_page()) == [(feature.name, feature.family) for feature in FEATURES]


def _page() -> dict[tuple[str, str], dict[str, str]]:
    """(feature, family) -> condition -> the code of the refusal, or "equal"."""
    rows = re.findall(r"^\| (.+?) \| (\S+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    page = {}
    for name, family, cells in rows:
        if name != "feature":
            shown = map(_outcome, cells.split(" | "))
            page[name, family] = dict(zip(CONDITIONS, shown, strict=True))
    return page


def _outcome(cell: str) -> str:
    if cell.startswith("refused: "):
        return cell.removeprefix("refused: ")
    return "equal" if float(cell) <= TOLERANCE else f"off by {cell}"
