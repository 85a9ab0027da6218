"""Uploads that must be refused, each with the code it is refused for.

All are made from one good adapter; some are what other servers crashed on, or wrongly took.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.fuzz.hostile_archives import Files, hostile_archives, hostile_members


@dataclass(frozen=True)
class Hostile:
    """One upload, `files` with the form's other `fields`; `code` is that of a violation (or, with
    `status` 400, of the error) it must be answered with."""

    name: str
    code: str
    files: Files
    fields: Mapping[str, str] = field(default_factory=dict)
    status: int = 422


def corpus(good: Mapping[str, bytes], base: Path, marker: Path) -> Iterator[Hostile]:
    """All of them; `good` are an adapter's two files, `base` is the folder of its base, `marker` a
    file that the pickles among them would create."""
    yield from _weights(good)
    yield from _values(good)
    yield from _configs(good)
    yield from _pickles(good, marker)
    yield from _sets(good)
    yield from (Hostile(*one) for one in (*hostile_members(good), *hostile_archives(good)))
    yield from _references(good, base)


def _weights(good: Mapping[str, bytes]) -> Iterator[Hostile]:
    """Headers and lengths that lie, and what is no safetensors file."""
    whole = good[WEIGHTS_FILE]
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    names = sorted(name for name in header if name != "__metadata__")
    first, second = names[:2]
    entry = header[first]
    end = len(data)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}

    def changed(**change: Any) -> bytes:
        return _framed(json.dumps(header | {first: entry | change}).encode(), data)

    twice = json.dumps(header)[:-1] + ", " + json.dumps({first: entry})[1:]
    many = ",".join(f'"{i}":{json.dumps(empty)}' for i in range(100_000))
    files = {
        "cut by 100 bytes": whole[:-100],
        "cut in the header": whole[:200],
        "of 0 bytes": b"",
        "of 6 bytes": whole[:6],
        "with 64 bytes more": whole + bytes(64),
        "with a header of 2**62 bytes": (1 << 62).to_bytes(8, "little") + whole[8:],
        "with a header of 2**64 - 1 bytes": b"\xff" * 8 + whole[8:],
        "with a header of 9 MiB": _framed(b"{" + b" " * (9 << 20) + b"}", b""),
        "with 100,000 empty tensors": _framed(b"{" + many.encode() + b"}", b""),
        "with a tensor listed twice": _framed(twice.encode(), data),
        "with a deep header": _framed(b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b""),
        "with NaN in the header": _framed(b'{"a":NaN}', b""),
        "with overlapping tensors": changed(data_offsets=header[second]["data_offsets"]),
        "with offsets out of range": changed(data_offsets=[end, end + 64]),
        "with offsets that overflow": changed(data_offsets=[2**63, 2**64 - 1]),
        "with negative offsets": changed(data_offsets=[-16, 0]),
        "with a shape that overflows": changed(shape=[2**32, 2**32]),
        "with a hole": _framed(json.dumps(header).encode(), data + bytes(1 << 20)),
        "that is a web page": b"<!DOCTYPE html><html>Sign in</html>",
        "that is a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\nsize 12\n",
    }
    for name, content in files.items():
        yield Hostile(
            f"weights {name}",
            "corrupt_adapter",
            [*_but(good, WEIGHTS_FILE), (WEIGHTS_FILE, content)],
        )


def _values(good: Mapping[str, bytes]) -> Iterator[Hostile]:
    """Tensors that no adapter may hold."""

    def one(name: str, code: str, change: Callable[[dict[str, Tensor], str, str], Any]) -> Hostile:
        tensors = load(good[WEIGHTS_FILE])
        a = next(key for key in tensors if "lora_A" in key)
        change(tensors, a, a.replace("lora_A", "lora_B"))
        return Hostile(name, code, [*_but(good, WEIGHTS_FILE), (WEIGHTS_FILE, save(tensors))])

    def set_to(value: float) -> Callable[[dict[str, Tensor], str, str], Any]:
        return lambda tensors, a, b: tensors[b][1].fill_(value)

    def typed(dtype: torch.dtype) -> Callable[[dict[str, Tensor], str, str], Any]:
        return lambda tensors, a, b: tensors.update({a: tensors[a].to(dtype)})

    yield one("NaN", "non_finite_weights", set_to(math.nan))
    yield one("infinity", "non_finite_weights", set_to(-math.inf))
    yield one("values whose product overflows", "output_not_finite", _overflowing)
    for dtype in (torch.int8, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn):
        yield one(f"{dtype} factors", "unsupported_dtype", typed(dtype))
    yield one("no B", "incomplete_adapter", lambda tensors, a, b: tensors.pop(b))
    yield one(
        "a rank other than the config's",
        "rank_mismatch",
        lambda tensors, a, b: tensors.update(
            {a: tensors[a][:1].clone(), b: tensors[b][:, :1].clone()}
        ),
    )
    yield one(
        "a tensor of nothing the base has",
        "unexpected_key",
        lambda tensors, a, b: tensors.update({"\u202eevil\n": torch.ones(1)}),
    )
    yield one(
        "an adapter without effect",
        "no_effect",
        lambda tensors, a, b: [t.zero_() for n, t in tensors.items() if "lora_B" in n],
    )


def _overflowing(tensors: dict[str, Tensor], a: str, b: str) -> None:
    for tensor in tensors.values():
        tensor.fill_(3e38)


def _configs(good: Mapping[str, bytes]) -> Iterator[Hostile]:
    """Degenerate numbers, patterns that explode, features that are unknown."""
    config = json.loads(good[CONFIG_FILE])

    def of(name: str, code: str, text: bytes) -> Hostile:
        return Hostile(f"config with {name}", code, [*_but(good, CONFIG_FILE), (CONFIG_FILE, text)])

    invalid: list[dict[str, Any]] = [
        *_each("r", 0, -4, "4", 4.0, None, True, [4]),
        *_each("lora_alpha", None, -8, "16", 10**400, []),
        {"target_modules": 7},
        {"target_modules": [["q_proj"]]},
        {"base_model_name_or_path": "x" * 5000},
        {"use_dora": "yes"},
    ]
    for change in invalid:
        shown = ", ".join(f"{key} {str(value)[:30]!r}" for key, value in change.items())
        text = json.dumps(config | change).encode()
        yield of(shown, "invalid_adapter_config", text)
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        text = json.dumps(config | {"lora_alpha": "?"}).encode().replace(b'"?"', number)
        yield of(f"alpha {number.decode()}", "invalid_adapter_config", text)
    text = json.dumps(config | {"lora_alpha": 1e308}).encode()
    yield of("alpha 1e308", "scale_over_limit", text)
    yield of("rank 10**9", "rank_mismatch", json.dumps(config | {"r": 10**9}).encode())
    for pattern, code in _TARGETS.items():
        text = json.dumps(config | {"target_modules": pattern}).encode()
        yield of(f"target_modules {pattern[:40]!r} of {len(pattern)}", code, text)
        if code == "invalid_pattern":
            text = json.dumps(config | {"exclude_modules": pattern}).encode()
            yield of(f"exclude_modules {pattern[:40]!r} of {len(pattern)}", code, text)
            text = json.dumps(config | {"rank_pattern": {pattern: 4}}).encode()
            yield of(f"rank_pattern {pattern[:40]!r} of {len(pattern)}", code, text)
    twice = json.dumps(config)[:-1] + ', "r": 8}'
    yield of("a key twice", "invalid_adapter_config", twice.encode())
    yield of("deep nesting", "invalid_adapter_config", b'{"a":' * 100_000)
    yield of("a megabyte of blanks", "invalid_adapter_config", good[CONFIG_FILE] + b" " * (1 << 20))
    yield of("a list", "invalid_adapter_config", b"[]")
    yield of("nothing", "invalid_adapter_config", b"")
    changes: dict[str, dict[str, Any]] = {
        "unknown_field": {"future_option": {"a": 1}},
        "unsupported_feature": {"layer_replication": [[0, 2], [1, 2]]},
        "unsupported_peft_type": {"peft_type": "NOPE"},
        "unsupported_task_type": {"task_type": "SEQ_CLS"},
    }
    for code, change in changes.items():
        yield of(str(change), code, json.dumps(config | change).encode())
    untyped = {key: value for key, value in config.items() if key != "peft_type"}
    yield of("no peft_type", "unsupported_peft_type", json.dumps(untyped).encode())


def _each(field: str, *values: Any) -> list[dict[str, Any]]:
    return [{field: value} for value in values]


#: Patterns as `target_modules` -> the code: they leave out what the file holds, or cover what it
#: does not hold, or cannot be evaluated in linear time.
_TARGETS = {
    r"(a+)+$": "module_not_targeted",
    r"(.*)*x": "module_not_targeted",
    r"((a|a)*)*b": "module_not_targeted",
    ".*" * 50 + "=x": "module_not_targeted",
    "|".join(f"a{i}.*" for i in range(2000)): "module_not_targeted",
    "|".join(f"a{i}.*" for i in range(5000)): "invalid_pattern",
    "(" * 8000 + ")" * 8000: "module_not_targeted",
    "\u202eproj_q": "module_not_targeted",
    r"(model|model|mod.*)*proj": "incomplete_adapter",
    "(x{1000}){1000}": "invalid_pattern",
    "(((.{1,100}){1,100}){1,100})": "invalid_pattern",
    ".{0,1000}" * 50: "invalid_pattern",
    r"(?=.*q)(?!x)\1": "invalid_pattern",
    r"[[:alpha:]]+": "invalid_pattern",
    r"x{,3}": "invalid_pattern",
    "\\": "invalid_pattern",
    "[": "invalid_pattern",
    "*": "invalid_pattern",
}


class _Marking:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


def _pickles(good: Mapping[str, bytes], marker: Path) -> Iterator[Hostile]:
    config = [(CONFIG_FILE, good[CONFIG_FILE])]
    evil = pickle.dumps(_Marking(marker))
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(1)}, buffer)
    array = io.BytesIO()
    np.save(array, np.array([_Marking(marker)], dtype=object), allow_pickle=True)
    for name, content in (
        ("adapter_model.bin", evil),
        ("adapter_model.bin", buffer.getvalue()),
        ("pytorch_model.pt", evil),
        ("weights.npz", array.getvalue()),
        ("training.pkl", evil),
    ):
        yield Hostile(
            f"{name} of {len(content)} bytes", "unexpected_weights", [*config, (name, content)]
        )
    both = [*good.items(), ("adapter_model.bin", evil)]
    yield Hostile("a pickle beside the weights", "unexpected_weights", both)
    yield Hostile(
        "a pickle by the weights' name", "corrupt_adapter", [*config, (WEIGHTS_FILE, evil)]
    )


def _sets(good: Mapping[str, bytes]) -> Iterator[Hostile]:
    """Too few files, too many, or the wrong ones."""
    yield Hostile("no config", "missing_file", _but(good, CONFIG_FILE))
    yield Hostile("no weights", "missing_file", _but(good, WEIGHTS_FILE))
    more = [*good.items(), ("step-250.safetensors", good[WEIGHTS_FILE])]
    yield Hostile("another weights file", "unexpected_weights", more)
    inside = [(CONFIG_FILE, good[CONFIG_FILE]), (f"checkpoint-10/{WEIGHTS_FILE}", b"x")]
    yield Hostile("weights of a checkpoint", "several_folders", inside)
    yield Hostile("a config twice", "duplicate_file", [*good.items(), (CONFIG_FILE, b"{}")])
    flood = [(f"{i}.txt", b"") for i in range(1050)]
    yield Hostile("1,050 files", "too_many_files", [*good.items(), *flood])


def _references(good: Mapping[str, bytes], base: Path) -> Iterator[Hostile]:
    """Fields that name something for the server to fetch, and digests that are none."""
    files = list(good.items())
    for name, value in (
        ("path", str(base)),
        ("url", "http://169.254.169.254/latest"),
        ("repo_id", "someone/adapter"),
        ("lora_path", "/etc/passwd"),
        ("files", "file:///etc/passwd"),
    ):
        code = "missing_file" if name == "files" else "unknown_parameter"
        yield Hostile(f"a field {name}", code, files, {name: value}, 400)
    yield Hostile("another digest", "digest_mismatch", files, {"digest": "0" * 64})
    yield Hostile("a short digest", "invalid_value", files, {"digest": "ab12"}, 400)


def _but(good: Mapping[str, bytes], name: str) -> Files:
    return [(other, content) for other, content in good.items() if other != name]


def _framed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data
