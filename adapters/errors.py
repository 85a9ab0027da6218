"""What can go wrong with an adapter.

AdapterError
├── AdapterRejected      the uploaded content is refused; carries every violation found
└── AdapterUnavailable   an accepted adapter cannot be loaded now (blob gone, corrupted, unreadable)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One reason to refuse an upload.

    `code` is a stable identifier (`rank_mismatch`), `subject` names the file, config field or
    tensor concerned, `message` says what was found and what is allowed.
    """

    code: str
    subject: str
    message: str


class AdapterError(Exception):
    """Base of all adapter failures."""


class AdapterRejected(AdapterError):
    """The content of an upload is refused; nothing of it was kept."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{v.subject}: {v.message}" for v in violations))


class AdapterUnavailable(AdapterError):
    """An accepted adapter cannot be loaded: its stored files are missing or damaged."""
