"""Uploads that mean harm, or are broken: each made out of a good adapter's two files."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.archive_files import tar_of, tar_special, zip_of

Files = list[tuple[str, bytes]]
Change = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Hostile:
    """`make(config, weights)` gives the files of the upload; `codes` are the violations that it
    must at least be refused for."""

    name: str
    make: Callable[[bytes, bytes], Files]
    codes: frozenset[str]


def header_of(weights: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and data."""
    length = int.from_bytes(weights[:8], "little")
    return json.loads(weights[8 : 8 + length]), weights[8 + length :]


def with_header(header: str | dict[str, Any], data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data


def _weights(name: str, change: Change, *codes: str) -> Hostile:
    def make(config: bytes, weights: bytes) -> Files:
        return [(CONFIG_FILE, config), (WEIGHTS_FILE, change(weights))]

    return Hostile(name, make, frozenset(codes or ("corrupt_adapter",)))


def _header(name: str, change: Callable[[dict[str, Any]], object], *codes: str) -> Hostile:
    """`change` alters the header in place; the data stays."""

    def spoiled(weights: bytes) -> bytes:
        header, data = header_of(weights)
        change(header)
        return with_header(header, data)

    return _weights(name, spoiled, *codes)


def _config(name: str, text: str | bytes, *codes: str) -> Hostile:
    def make(config: bytes, weights: bytes) -> Files:
        content = text if isinstance(text, bytes) else text.encode()
        return [(CONFIG_FILE, content), (WEIGHTS_FILE, weights)]

    return Hostile(name, make, frozenset(codes or ("invalid_adapter_config",)))


def _fields(name: str, code: str, **changes: Any) -> Hostile:
    def make(config: bytes, weights: bytes) -> Files:
        changed = json.dumps(json.loads(config) | changes).encode()
        return [(CONFIG_FILE, changed), (WEIGHTS_FILE, weights)]

    return Hostile(name, make, frozenset({code}))


def _packed(name: str, make: Callable[[dict[str, bytes]], tuple[str, bytes]], code: str) -> Hostile:
    """One archive, of both files."""
    return Hostile(name, lambda c, w: [make({CONFIG_FILE: c, WEIGHTS_FILE: w})], frozenset({code}))


def _first(header: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = next(v for k, v in header.items() if k != "__metadata__")
    return tensor


def _overlap(header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


def _hole(weights: bytes) -> bytes:
    """A gap in front of the last tensor, as a sparse file would have."""
    header, data = header_of(weights)
    last = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])
    start, end = header[last]["data_offsets"]
    header[last]["data_offsets"] = [start + 4096, end + 4096]
    return with_header(header, data[:start] + bytes(4096) + data[start:])


def _twice(weights: bytes) -> bytes:
    header, data = header_of(weights)
    name = next(k for k in header if k != "__metadata__")
    text = json.dumps(header)
    return with_header(text[:-1] + f', "{name}": {json.dumps(header[name])}}}', data)


def _renamed(to: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        name = next(k for k in header if k.endswith("lora_A.weight"))
        header[to] = header.pop(name)

    return change


def _filled(value: float) -> Change:
    def change(weights: bytes) -> bytes:
        header, data = header_of(weights)
        return with_header(header, np.full(len(data) // 4, value, "<f4").tobytes())

    return change


def _one_value(value: float) -> Change:
    return lambda weights: weights[:-4] + struct.pack("<f", value)


class _Bomb:
    def __reduce__(self) -> Any:
        raise AssertionError("a pickle was made to run")


def _pickle(config: bytes, weights: bytes) -> Files:
    return [(CONFIG_FILE, config), ("adapter_model.bin", pickle.dumps({"a": 1}))]


def _zip_link(files: dict[str, bytes]) -> tuple[str, bytes]:
    link = zipfile.ZipInfo(WEIGHTS_FILE)
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    return "a.zip", zip_of([(CONFIG_FILE, files[CONFIG_FILE]), (link, b"/etc/passwd")])


def _tar_link(kind: bytes) -> Callable[[dict[str, bytes]], tuple[str, bytes]]:
    def make(files: dict[str, bytes]) -> tuple[str, bytes]:
        link = tar_special(WEIGHTS_FILE, kind, "/etc/passwd")
        return "a.tar.gz", tar_of([(CONFIG_FILE, files[CONFIG_FILE]), (link, b"")])

    return make


def _named(name: str) -> Callable[[dict[str, bytes]], tuple[str, bytes]]:
    return lambda files: ("a.zip", zip_of([*files.items(), (name, b"x")]))


def _zip_bomb(files: dict[str, bytes]) -> tuple[str, bytes]:
    return "a.zip", zip_of([*files.items(), ("zeros.txt", bytes(80 << 20))])


def _gzip_bomb(files: dict[str, bytes]) -> tuple[str, bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("zeros.txt")
        info.size = 80 << 20
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    return "a.tar.gz", gzip.compress(buffer.getvalue(), 1)


def _crowd(files: dict[str, bytes]) -> tuple[str, bytes]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for i in range(100_000):
            archive.writestr(f"{i}.txt", b"")
    return "a.zip", buffer.getvalue()


HOSTILE: tuple[Hostile, ...] = (
    _weights("empty file", lambda w: b""),
    _weights("six bytes", lambda w: w[:6]),
    _weights("cut short", lambda w: w[:-100]),
    _weights("padded", lambda w: w + bytes(64)),
    _weights("header of 4 exabytes", lambda w: struct.pack("<Q", 1 << 62) + w[8:]),
    _weights("header of 9 MB", lambda w: with_header(" " * (9 << 20) + "{}", b"")),
    _weights(
        "two million tensors",
        lambda w: with_header("{" + ",".join(f'"{i}":{{}}' for i in range(2_000_000)) + "}", b""),
    ),
    _weights("a header that is no JSON", lambda w: with_header("{nothing", w)),
    _weights("a header nested deeply", lambda w: with_header("[" * 100_000, b"")),
    _weights("an HTML page", lambda w: b"<!DOCTYPE html><html></html>"),
    _weights("a git-lfs pointer", lambda w: b"version https://git-lfs.github.com/spec/v1\noid"),
    _weights("a pickle by another name", lambda w: pickle.dumps({"a": bytes(1000)})),
    _weights("a hole", _hole),
    _weights("a tensor twice", _twice),
    _header("tensors that overlap", _overlap),
    _header("offsets past the end", lambda h: _first(h).update(data_offsets=[0, 1 << 40])),
    _header("offsets backwards", lambda h: _first(h).update(data_offsets=[64, 0])),
    _header("a shape that does not fit", lambda h: _first(h).update(shape=[1 << 31, 1 << 31])),
    _header("a shape below zero", lambda h: _first(h).update(shape=[-1, -64])),
    _header("an unknown type", lambda h: _first(h).update(dtype="F33")),
    _header("integers", lambda h: _first(h).update(dtype="I32"), "unsupported_dtype"),
    _header("a name with bidi marks", _renamed("a\u202eb.lora_A.weight"), "unexpected_key"),
    _header("a name with control characters", _renamed("a\x00\x1b[2J"), "unexpected_key"),
    _header("a name of 600 characters", _renamed("n" * 600)),
    _weights("NaN everywhere", _filled(float("nan")), "non_finite_weights"),
    _weights("one infinity", _one_value(float("inf")), "non_finite_weights"),
    _weights("huge values", _filled(1e30), "output_not_finite"),
    _weights("zeros", _filled(0.0), "no_effect"),
    _config("a config that is no JSON", "{peft"),
    _config("an empty config", ""),
    _config("a config that is a list", "[]"),
    _config("a config with NaN", '{"peft_type": "LORA", "r": NaN}'),
    _config("a key twice", '{"peft_type": "LORA", "r": 4, "r": 8}'),
    _config("a config nested deeply", '{"a":' * 50_000),
    _config("a config that is not UTF-8", b'{"peft_type": "\xff"}'),
    _config("a config of 2 MB", json.dumps({"peft_type": "LORA", "x": "y" * (2 << 20)})),
    _fields("rank 0", "invalid_adapter_config", r=0),
    _fields("rank 1e9", "rank_mismatch", r=10**9),
    _fields("rank as a text", "invalid_adapter_config", r="4"),
    _fields("alpha 1e308", "scale_over_limit", lora_alpha=1e308),
    _fields("alpha below zero", "invalid_adapter_config", lora_alpha=-8),
    _fields("alpha beyond any float", "invalid_adapter_config", lora_alpha=10**400),
    _fields("a pattern that backtracks", "module_not_targeted", target_modules="(((a+)+)+)+$"),
    _fields("a pattern with look-behind", "invalid_pattern", target_modules="(?<=a)b"),
    _fields("a pattern that is none", "invalid_pattern", target_modules="(("),
    _fields(
        "rank patterns that backtrack", "invalid_pattern", rank_pattern={"(a*)*" * 5000 + "[": 4}
    ),
    _fields("an unknown option", "unknown_field", future_option={"a": 1}),
    _fields("another method", "unsupported_peft_type", peft_type="NOPE"),
    _fields("replicated layers", "unsupported_feature", layer_replication=[[0, 2]]),
    Hostile("a pickle", _pickle, frozenset({"unexpected_weights"})),
    _packed("a symbolic link in a zip", _zip_link, "archive_member"),
    _packed("a symbolic link in a tar", _tar_link(tarfile.SYMTYPE), "archive_member"),
    _packed("a hard link in a tar", _tar_link(tarfile.LNKTYPE), "archive_member"),
    _packed("a device in a tar", _tar_link(tarfile.CHRTYPE), "archive_member"),
    _packed("a way out", _named("../adapter_config.json"), "unsafe_name"),
    _packed("an absolute name", _named("/etc/cron.d/x"), "unsafe_name"),
    _packed("a drive's name", _named("C:\\x"), "unsafe_name"),
    _packed("a member with control characters", _named("a\x07b"), "unsafe_name"),
    _packed("a member with bidi marks", _named("a\u202eb.txt"), "unsafe_name"),
    _packed("an archive in the archive", _named("more.zip"), "nested_archive"),
    _packed("a zip bomb", _zip_bomb, "archive_member"),
    _packed("a gzip bomb", _gzip_bomb, "archive_refused"),
    _packed("100,000 members", _crowd, "archive_refused"),
    _packed("a damaged zip", lambda f: ("a.zip", b"PK\x03\x04" + bytes(100)), "archive_unreadable"),
)
