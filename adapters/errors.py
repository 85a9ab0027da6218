"""What can go wrong with an adapter.

AdapterError
├── AdapterRejected      the uploaded content is refused; carries every violation found
└── AdapterUnavailable   an accepted adapter cannot be loaded now (blob gone, corrupted, unreadable)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Violation:
    """One reason to refuse an upload.

    `code` is a stable identifier (`rank_mismatch`), `subject` names the file, config field or
    tensor concerned, `message` says what was found and what is allowed. One that sums up others,
    which are not listed, has their `count`.
    """

    code: str
    subject: str
    message: str
    count: int = 1

    def to_json(self) -> dict[str, str]:
        return {"code": self.code, "subject": self.subject, "message": self.message}


class AdapterError(Exception):
    """Base of all adapter failures."""


class AdapterRejected(AdapterError):
    """The content of an upload is refused; nothing of it was kept.

    Its text is a summary of at most 400 characters; `violations` has every detail, `report`, where
    one was made, tells it tensor by tensor (see `adapters.report`).
    """

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = tuple(violations)
        self.report: dict[str, Any] | None = None
        super().__init__(_summary(self.violations))


class AdapterUnavailable(AdapterError):
    """An accepted adapter cannot be loaded: its stored files are missing or damaged."""


def printable(text: str) -> str:
    """`text` with control characters, marks of direction and the like escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_MOST_CHARACTERS = 400
_MOST_CODES = 3
#: What an adapter of another base model is refused for, tensor by tensor.
_FOREIGN = ("shape_mismatch", "unknown_module", "layer_out_of_range")


def _summary(violations: Sequence[Violation]) -> str:
    """How many violations there are, and the first of each code."""
    groups: dict[str, list[Violation]] = {}
    for violation in violations:
        groups.setdefault(violation.code, []).append(violation)
    counts = {code: sum(v.count for v in group) for code, group in groups.items()}
    foreign = sum(counts.get(code, 0) for code in _FOREIGN)
    hint = ""
    if foreign > 2 and 2 * foreign > sum(counts.values()):
        hint = "This adapter seems to be trained on another base model. "
    if len(violations) == 1:
        text = f"{hint}The adapter is refused: {_described(violations[0])}."
    else:
        causes = [
            f"{code} ({counts[code]}){', first' if counts[code] > 1 else ''}: "
            + _cut(_described(group[0]), 120)
            for code, group in list(groups.items())[:_MOST_CODES]
        ]
        if len(groups) > _MOST_CODES:
            causes.append(f"and {len(groups) - _MOST_CODES} more kinds")
        text = f"{hint}Refused for {sum(counts.values())} reasons: {'; '.join(causes)}."
    return _cut(printable(text), _MOST_CHARACTERS)


def _described(violation: Violation) -> str:
    return f"{violation.subject}: {violation.message}".removesuffix(".")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
