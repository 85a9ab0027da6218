"""Anything at all is fed to what parses uploads. LORIKEET_FUZZ_MINUTES=30 goes on for as long."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.archives import archives
from tests.fuzz.forms import forms
from tests.fuzz.good import expert_uploads, mlx_uploads, peft_uploads, tokenizer_uploads
from tests.fuzz.mutations import drawn
from tests.fuzz.targets import targets
from tests.fuzz.uploads import uploads
from tests.fuzz.watched import Found, Watched, Wrong
from tests.tiny import tiny_base

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="limits and measures a process by what Linux says of it"
)

#: Minutes for all targets together; 0 means the numbers of inputs in `KINDS`.
MINUTES = float(os.environ.get("LORIKEET_FUZZ_MINUTES", "0"))
#: Kind of input -> how many a short run has, and the target that takes them.
KINDS = {
    "archives": (120, "archive"),
    "forms": (100, "form"),
    "peft": (150, "llama"),
    "mlx": (80, "llama"),
    "tokenizers": (80, "llama"),
    "experts": (60, "mixtral"),
}


class Input:
    """What is fed, not shown: it may be megabytes."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __repr__(self) -> str:
        return f"an input of {len(pickle.dumps(self.content))} bytes"

    def keep(self) -> str:
        with tempfile.NamedTemporaryFile(prefix="fuzz-", delete=False) as file:
            pickle.dump(self.content, file)
        return file.name


#: Inputs between two looks at the clock.
_ROUND = 500


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    families = {"llama": "llama-bias", "mixtral": "mixtral"}
    return {name: tiny_base(root / name, family) for name, family in families.items()}


@pytest.fixture(scope="module")
def watched(bases: dict[str, Path]) -> Iterator[Watched]:
    with closing(Watched(partial(targets, bases))) as watched:
        yield watched


@pytest.mark.timeout(300 + 60 * MINUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_is_taken_or_refused_in_good_order(
    kind: str,
    watched: Watched,
    bases: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    count, target = KINDS[kind]
    inputs = _inputs(kind, bases, tmp_path)
    watched.found = Found()
    end = time.monotonic() + 60 * MINUTES / len(KINDS)
    number = 0
    while number == 0 or time.monotonic() < end:
        _feed(watched, target, inputs, count if number == 0 else _ROUND, number)
        number += 1
    if MINUTES:
        with capsys.disabled():
            print(f"\n{kind}: {watched.found}")
    outcomes = watched.found.outcomes
    assert len(outcomes) > 2 and "taken" in outcomes, "the inputs are all alike"


def _inputs(kind: str, bases: dict[str, Path], root: Path) -> st.SearchStrategy[Any]:
    match kind:
        case "archives":
            return archives()
        case "forms":
            return forms()
        case "peft":
            return uploads(peft_uploads(bases["llama"], root))
        case "mlx":
            return uploads(mlx_uploads(bases["llama"], root))
        case "tokenizers":
            return uploads(tokenizer_uploads(bases["llama"], root))
        case _:
            return uploads(expert_uploads(bases["mixtral"], root))


@drawn
def _fed(draw: st.DrawFn, inputs: st.SearchStrategy[Any]) -> Input:
    return Input(draw(inputs))


def _feed(
    watched: Watched, target: str, inputs: st.SearchStrategy[Any], count: int, number: int
) -> None:
    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(_fed(inputs))
    def run(value: Input) -> None:
        try:
            watched.run((target, value.content))
        except Wrong as error:
            error.add_note(f"the input is kept, pickled, in {value.keep()}")
            raise

    run()
