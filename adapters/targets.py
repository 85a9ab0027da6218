"""Which modules a PEFT config means, decided as PEFT 0.21 does but in bounded time.

PEFT runs a config's regular expressions through `re`, where a hostile one takes exponential time.
Here they run through RE2, whose time is linear in the text; what RE2 cannot express (look-around,
back-references) or reads differently from `re` is refused with a PatternError.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import re2  # type: ignore[import-untyped]

#: `target_modules` spelt so means every linear layer but the head.
ALL_LINEAR = "all-linear"

MAX_PATTERN_LENGTH = 16 << 10
MAX_GROUPS = 100
MAX_PATTERNS = 64
MAX_PATTERN_ENTRIES = 4096

T = TypeVar("T")


class PatternError(ValueError):
    """A pattern of the config cannot be evaluated; the message quotes it and says why."""


@dataclass(frozen=True)
class LayerFilter:
    """`layers_to_transform` and `layers_pattern`: keep the modules whose layer number is listed."""

    layers: frozenset[int]
    patterns: tuple[Any, ...] = ()

    @classmethod
    def of(cls, layers: Iterable[int], patterns: Iterable[str] = ()) -> LayerFilter:
        """Raises PatternError."""
        compiled = (_compile(rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\.", p, capture=True) for p in patterns)
        return cls(frozenset(layers), tuple(compiled))

    def layer_of(self, path: str) -> int | None:
        """The layer number in a module path, None where it has none."""
        for pattern in self.patterns or (_FIRST_NUMBER,):
            found = pattern.match(path)
            if found is not None:
                digits = found.group("idx")
                return int(digits) if digits else None
        return None


@dataclass(frozen=True)
class NameSelector:
    """A list of module names or one regular expression, as in `target_modules`."""

    names: frozenset[str] = frozenset()
    pattern: Any = None

    @classmethod
    def of(cls, value: str | list[str]) -> NameSelector:
        """Raises PatternError."""
        if isinstance(value, str):
            return cls(pattern=_compile(value, value))
        return cls(names=frozenset(value))

    def matches(self, path: str, layers: LayerFilter | None = None) -> bool:
        """Whether `path` is meant; a path listed in full is meant whatever its layer."""
        if self.pattern is not None:
            return self.pattern.fullmatch(path) is not None
        if path in self.names:
            return True
        if not any(path[i + 1 :] in self.names for i, char in enumerate(path) if char == "."):
            return False
        return layers is None or layers.layer_of(path) in layers.layers


@dataclass(frozen=True)
class Targets:
    """The modules a config adapts: `include` (None: all-linear) less `exclude`, in `layers`.

    `saved` are those in `modules_to_save` and all within them, which PEFT keeps LoRA off.
    """

    include: NameSelector | None
    exclude: NameSelector | None = None
    layers: LayerFilter | None = None
    saved: NameSelector | None = None

    def select(
        self, linears: Collection[str], output_module: str | None, others: Collection[str] = ()
    ) -> frozenset[str]:
        """The paths among `linears` and `others` (embeddings and the like) that PEFT would adapt.

        `others` are no part of "all-linear", nor is the head.
        """
        include = self.include or NameSelector(frozenset(linears) - {output_module or ""})
        return frozenset(
            path
            for path in (*linears, *others)
            if include.matches(path, self.layers)
            and not (self.exclude and self.exclude.matches(path))
            and not (self.saved and self.saved.matches(path))
        )


class PatternValues(Generic[T]):
    """`rank_pattern` or `alpha_pattern`: the value of the first key that matches a module path.

    A key matches as `(.*\\.)?(key)$`. Plain names, of which a config may hold one per module, are
    looked up without a regular expression; a `.` in them still stands for any character.
    """

    def __init__(self, values: Mapping[str, T]) -> None:
        """Raises PatternError."""
        if len(values) > MAX_PATTERN_ENTRIES:
            raise PatternError(f"holds {len(values)} entries; at most {MAX_PATTERN_ENTRIES}")
        self._keys = list(values)
        self._values = list(values.values())
        self._literals: dict[int, list[tuple[int, str]]] = {}
        self._patterns: list[tuple[int, Any]] = []
        self._used: set[int] = set()
        for index, key in enumerate(self._keys):
            if _LITERAL.fullmatch(key):
                self._literals.setdefault(len(key), []).append((index, key))
            else:
                _compile(key, key)
                self._patterns.append((index, _compile(rf"(?:.*\.)?(?:{key})", key)))
        if len(self._patterns) > MAX_PATTERNS:
            raise PatternError(
                f"holds {len(self._patterns)} regular expressions; at most {MAX_PATTERNS}"
            )

    def get(self, path: str, default: T) -> T:
        index = self._first_match(path)
        if index is None:
            return default
        self._used.add(index)
        return self._values[index]

    @property
    def unused(self) -> list[str]:
        """Keys that gave no value to any path asked for so far."""
        return [key for index, key in enumerate(self._keys) if index not in self._used]

    def _first_match(self, path: str) -> int | None:
        found = []
        starts = [0, *(i + 1 for i, char in enumerate(path) if char == ".")]
        for suffix in (path[start:] for start in starts):
            for index, key in self._literals.get(len(suffix), ()):
                if all(k in (".", char) for k, char in zip(key, suffix, strict=True)):
                    found.append(index)
                    break
        for index, pattern in self._patterns:
            if pattern.fullmatch(path):
                found.append(index)
                break
        return min(found, default=None)


_FIRST_NUMBER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
_LITERAL = re.compile(r"[A-Za-z0-9_.]+")


def _compile(expression: str, shown: str, *, capture: bool = False) -> Any:
    if len(shown) > MAX_PATTERN_LENGTH:
        raise PatternError(f"is {len(shown)} characters long; at most {MAX_PATTERN_LENGTH}")
    # `re` and RE2 read these two differently: a POSIX class, a repetition without lower bound.
    for construct in ("[:", "{,"):
        if construct in shown:
            raise PatternError(f"{_short(shown)} uses {construct!r}, which is not supported")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 4 << 20
    # RE2 gives back every group at each match: thousands of them would take seconds.
    options.never_capture = not capture
    try:
        compiled = re2.compile(expression, options)
    except re2.error as error:
        reason = error.args[0]
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise PatternError(
            f"{_short(shown)} cannot be evaluated in linear time or is no regular expression "
            f"({_short(text)})"
        ) from None
    finally:
        re2.purge()  # its cache would keep tenants' patterns alive
    if compiled.groups > MAX_GROUPS:
        raise PatternError(f"{_short(shown)} has {compiled.groups} groups; at most {MAX_GROUPS}")
    return compiled


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "…")
