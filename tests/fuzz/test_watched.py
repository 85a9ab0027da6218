"""The watch notices everything that may go wrong."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.fuzz.watched import MAX_BYTES, Watched, Wrong

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="limits and measures a process by what Linux says of it"
)


@pytest.mark.parametrize(
    ("spell", "message"),
    [
        ("raise", "ZeroDivisionError"),
        ("sleep", "no answer"),
        ("loop", "takes more than"),
        ("allocate", "MemoryError"),
        ("crash", "ended it"),
    ],
)
def test_what_goes_wrong_is_noticed(spell: str, message: str) -> None:
    with closing(Watched(_bewitched, silence=1 if spell == "sleep" else 60)) as watched:
        assert watched.run("") == "well"
        with pytest.raises(Wrong, match=message):
            watched.run(spell)
        assert watched.run("") == "well"


def test_memory_within_the_limit_is_measured() -> None:
    with closing(Watched(_bewitched)) as watched:
        watched.run("some")
        assert 64 << 20 < watched.found.nbytes < MAX_BYTES
        watched.run("")
        assert watched.found.inputs == 2


def _bewitched() -> Callable[[str, Path], str]:
    def run(spell: str, _: Path) -> str:
        match spell:
            case "raise":
                raise ZeroDivisionError
            case "sleep":
                time.sleep(100)
            case "loop":
                pow(3, 10**9)  # one call into C, which no Python handler can interrupt
            case "allocate":
                bytearray(MAX_BYTES + (8 << 20))
            case "some":
                bytearray(b"x" * (64 << 20))
            case "crash":
                os._exit(7)
        return "well"

    return run
