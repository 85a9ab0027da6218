"""What is fed with anything. Each target takes one input, and takes or refuses it in good order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.fuzz.folders import folder_target
from tests.fuzz.transfers import take_archive, take_form


def targets(bases: Mapping[str, Path]) -> Callable[[Any, Path], str]:
    """Takes (target, input): "archive", "form", or the name of one of `bases`, folders of models,
    for which the files of an upload come."""
    known: dict[str, Callable[[Any, Path], str]] = {"archive": take_archive, "form": take_form}
    known |= {name: folder_target(base) for name, base in bases.items()}
    return lambda value, folder: known[value[0]](value[1], folder)
