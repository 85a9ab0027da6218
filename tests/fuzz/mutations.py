"""Good bytes and good JSON, spoilt: strategies of hypothesis."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from hypothesis import strategies as st

P = ParamSpec("P")
T = TypeVar("T")

#: Numbers at which sizes, offsets and counts break.
EDGES = (
    0,
    1,
    7,
    8,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63,
    2**64 - 1,
)

#: Patterns that take exponential time or much memory in some engine, or mean several things.
PATTERNS = (
    r"(a+)+$",
    r"(.*)*x",
    r"((a|a)*)*b",
    r".*.*.*.*.*.*.*.*.*.*=x",
    r"(model|model|mod.*)*proj",
    "(" * 500 + "q" + ")" * 500,
    "(x{1000}){1000}",
    "(((.{1,100}){1,100}){1,100})",
    ".{0,1000}" * 50,
    "|".join(f"a{i}.*" for i in range(5000)),
    r"\p{L}{500}",
    r"(?=.*q)(?!x)\1",
    r"(?i)Q_PROJ",
    r"[[:alpha:]]+",
    r"x{,3}",
    "\\",
    "[",
    "*",
    "",
    "\0",
    "q_proj\n",
    "\u202eproj_q",
)

#: Texts that need care wherever they go.
TEXTS = (
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "C:\\x",
    "q_proj",
    "model.layers.0.self_attn.q_proj",
    "file:///etc/passwd",
    "http://127.0.0.1:1/x",
    "\0",
    "a\nb",
    "\u202eexe.nosj",
    "\u200b",
    "\ufeff",
    "é" * 300,
    "x" * 5000,
    "." * 3000,
    "\U0001f99c",
    "all-linear",
    "none",
    "__class__",
    "{0.__class__}",
    "%s%n",
    "[bold red]",
)

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(EDGES),
    st.sampled_from([-1, -(2**63), 10**400, 0.5, -0.0, 1e308, 5e-324, 4.0, 1e-9]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(TEXTS),
    st.sampled_from(PATTERNS),
    st.text(max_size=20).filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text)),
)
VALUES = st.one_of(
    _SCALARS,
    st.recursive(
        _SCALARS,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=4)
        ),
        max_leaves=8,
    ),
    st.sampled_from([[], {}, [[]], [{}], {"": {}}, [0] * 3000, ["x"] * 300]),
)

#: Pieces of JSON that no object makes.
_RAW = (
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-",
    b"01",
    b"'x'",
    b"\xff",
    b"\xed\xa0\x80",
    b'"\\ud800"',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"9" * 100_000,
    b"\xef\xbb\xbf",
    b"//x",
    b"/**/",
    b",",
    b'"\x00"',
    b'"\\u0000"',
)


def drawn(
    draw_one: Callable[Concatenate[st.DrawFn, P], T],
) -> Callable[P, st.SearchStrategy[T]]:
    """As `st.composite`, but the strategy does not show its arguments, which may be megabytes."""

    def strategy(*args: P.args, **kwargs: P.kwargs) -> st.SearchStrategy[T]:
        @st.composite
        def one(draw: st.DrawFn) -> T:
            return draw_one(draw, *args, **kwargs)

        return one()

    return strategy


def rarely(draw: st.DrawFn, one_in: int) -> bool:
    """True once in a while; hypothesis draws the ends of a range too often for that."""
    return draw(st.integers(1, one_in)) == one_in // 2


@drawn
def spoilt_json(draw: st.DrawFn, good: Any) -> bytes:
    """The JSON of `good` after some changes of its values, its keys and its text."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(0, 3))):
        value = _changed(draw, value)
    text = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    kind = draw(st.sampled_from(["text"] * 6 + ["twice", "raw", "bytes", "wrapped"]))
    if kind == "twice":
        keys = list(value) if isinstance(value, dict) and value else ["x"]
        again = json.dumps({draw(st.sampled_from(keys)): draw(VALUES)}, default=str).encode()
        return text[:-1] + b"," + again[1:]
    if kind == "raw":
        at = draw(st.integers(0, len(text)))
        return text[:at] + draw(st.sampled_from(_RAW)) + text[at:]
    if kind == "bytes":
        return draw(spoilt_bytes(text))
    if kind == "wrapped":
        return draw(st.sampled_from([b" ", b"\n", b"\xef\xbb\xbf", b"["])) + text
    return text


@drawn
def spoilt_bytes(draw: st.DrawFn, good: bytes, other: bytes = b"") -> bytes:
    """`good` after some changes: bits, bytes, whole numbers, parts cut, doubled, or of `other`."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(_KINDS))
        if kind == "number":
            form = draw(st.sampled_from("BHIQ"))
            raw = struct.pack(
                "<" + form, draw(st.sampled_from(EDGES)) % 256 ** struct.calcsize(form)
            )
            data[at : at + len(raw)] = raw if draw(st.booleans()) else raw[::-1]
        elif kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 600))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=64))
        elif kind == "append":
            data += draw(st.binary(max_size=64)) * draw(st.sampled_from([1, 1, 1000]))
        elif kind == "splice":
            source = other or good
            start = draw(st.integers(0, len(source)))
            data[at:] = source[start:]
    return bytes(data)


_KINDS = ("number", "number", "flip", "flip", "cut", "drop", "double", "insert", "append", "splice")


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """`value` with one of its nodes, at any depth, replaced, dropped or renamed."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        kind = draw(st.sampled_from(["in"] * 5 + ["drop", "rename", "add"]))
        if kind == "in":
            return value | {key: _changed(draw, value[key])}
        if kind == "add":
            return value | {draw(st.sampled_from(TEXTS)): draw(VALUES)}
        rest = {k: v for k, v in value.items() if k != key}
        if kind == "drop":
            return rest
        return rest | {draw(st.sampled_from(TEXTS)): value[key]}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _changed(draw, value[at]), *value[at + 1 :]]
    return draw(VALUES)
