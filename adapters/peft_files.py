"""The two files of an adapter, read strictly and in bounded memory.

Nothing here trusts the files: sizes are checked before reading, JSON must be strict (no duplicate
keys, no NaN), and the tensors must fill the weights file exactly, without hole or overlap.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from adapters.errors import AdapterRejected, Violation
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from adapters.peft_config import PeftConfig, parse_config

MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 10_000
MAX_NAME_LENGTH = 512
MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file: `dtype` in safetensors' spelling, `offset` in bytes from the start of
    the file, `nbytes` long, row-major and little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorTable:
    """What a safetensors file holds: its tensors in the order they lie in the file."""

    tensors: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def read_config(path: Path) -> PeftConfig:
    """The config in the file at `path`; what is wrong with its fields is in its `violations`.

    Raises AdapterRejected where the file is missing or no JSON object of at most MAX_CONFIG_BYTES.
    """
    with _open(path) as (file, size):
        if size > MAX_CONFIG_BYTES:
            raise _reject(
                "invalid_adapter_config",
                path.name,
                f"is {size} bytes long; at most {MAX_CONFIG_BYTES} are allowed",
            )
        raw = file.read(MAX_CONFIG_BYTES)
    try:
        data = _strict_json(raw, max_commas=4 * MAX_TENSORS)
    except ValueError as error:
        raise _reject("invalid_adapter_config", path.name, str(error) + _seems(raw)) from None
    if not isinstance(data, dict):
        raise _reject("invalid_adapter_config", path.name, "must hold one JSON object")
    return parse_config(data)


def read_header(path: Path) -> TensorTable:
    """The tensor table of the safetensors file at `path`.

    Raises AdapterRejected where the file is missing, is no safetensors file, is cut or padded, or
    exceeds MAX_HEADER_BYTES or MAX_TENSORS.
    """
    with _open(path) as (file, size):
        start = file.read(64)
        length = int.from_bytes(start[:8], "little")
        if size < 8 or 8 + length > size:
            raise _corrupt(
                path.name, f"is cut short or no safetensors file ({size} bytes){_seems(start)}"
            )
        if length > MAX_HEADER_BYTES:
            raise _corrupt(
                path.name, f"has a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed"
            )
        file.seek(8)
        raw = file.read(length)
    try:
        return TensorTable(tuple(_entries(raw, 8 + length, size)))
    except ValueError as error:
        raise _corrupt(path.name, str(error) + _seems(start)) from None


def content_digest(folder: Path) -> str:
    """The sha256 that identifies an adapter's content, 64 hexadecimal digits.

    It is the digest of the two files' `sha256sum` lines sorted by name, so that it can be redone in
    the adapter's folder by

        sha256sum adapter_config.json adapter_model.safetensors | sha256sum

    Raises OSError where a file cannot be read.
    """
    lines = []
    for name in sorted((CONFIG_FILE, WEIGHTS_FILE)):
        with open(folder / name, "rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# Bits of one element, for every dtype that safetensors 0.8 writes.
_DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
}

_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _TensorInfo(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Natural]
    data_offsets: tuple[_Natural, _Natural]


def _entries(raw: bytes, data_start: int, file_size: int) -> Iterator[TensorEntry]:
    """The entries of a header in file order. Raises ValueError."""
    header = _strict_json(raw, max_commas=8 * MAX_TENSORS)
    if raw[:1] != b"{" or not isinstance(header, dict):
        raise ValueError("has a header that is no JSON object")
    try:
        msgspec.convert(header.pop("__metadata__", {}), dict[str, str])
        infos = msgspec.convert(header, dict[str, _TensorInfo])
    except msgspec.ValidationError as error:
        raise ValueError(f"has a malformed header: {error}") from None
    if len(infos) > MAX_TENSORS:
        raise ValueError(f"holds {len(infos)} tensors; at most {MAX_TENSORS} are allowed")
    end = 0
    for name, info in sorted(infos.items(), key=lambda item: item[1].data_offsets):
        _check_info(name, info)
        begin, stop = info.data_offsets
        if begin != end:
            kind = "overlaps the tensor before it" if begin < end else "leaves a hole before it"
            raise ValueError(f"is not contiguous: tensor {name!r} {kind}")
        end = stop
        yield TensorEntry(name, info.dtype, tuple(info.shape), data_start + begin, stop - begin)
    if data_start + end != file_size:
        raise ValueError(
            f"is {file_size} bytes long, but its header describes {data_start + end} bytes"
        )


def _check_info(name: str, info: _TensorInfo) -> None:
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(
            f"names a tensor with {len(name)} characters; at most {MAX_NAME_LENGTH} are allowed"
        )
    if info.dtype not in _DTYPE_BITS:
        raise ValueError(f"gives tensor {name!r} the unknown dtype {info.dtype[:32]!r}")
    if len(info.shape) > MAX_DIMENSIONS or 0 in info.shape:
        raise ValueError(
            f"gives tensor {name!r} the shape {info.shape[: MAX_DIMENSIONS + 1]}; at most "
            f"{MAX_DIMENSIONS} dimensions are allowed, and none of them 0"
        )
    size = info.data_offsets[1] - info.data_offsets[0]
    if math.prod(info.shape) * _DTYPE_BITS[info.dtype] != 8 * size:
        raise ValueError(
            f"gives tensor {name!r} of shape {info.shape} and dtype {info.dtype} {size} bytes"
        )


def _strict_json(raw: bytes, max_commas: int) -> Any:
    """Parse JSON without duplicate keys, NaN or lone surrogates. Raises ValueError."""
    # Commas bound the number of values, and so the memory parsing takes, before any parsing.
    if raw.count(b",") > max_commas:
        raise ValueError("holds too many values")
    try:
        msgspec.json.decode(raw)
        return json.loads(raw, object_pairs_hook=_unique)
    except msgspec.DecodeError as error:
        raise ValueError(f"is no strict JSON: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("is no UTF-8 text") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"gives the key {twice[:MAX_NAME_LENGTH]!r} twice")
    return found


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file, never a link, and its size in bytes."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        raise _reject("missing_file", path.name, "is missing from the upload") from None
    if not stat.S_ISREG(mode):
        raise _corrupt(path.name, "is not a regular file")
    with open(path, "rb") as file:
        yield file, os.fstat(file.fileno()).st_size


def _seems(start: bytes) -> str:
    """What a file that is not what its name says seems to be, for the end of a message."""
    head = start[:64].lstrip().lower()
    if not start:
        return ": it is empty"
    if head.startswith(b"version https://git-lfs"):
        return ": it is a git-lfs pointer, not the file itself"
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        return ": it is an HTML page"
    if head.startswith((b"pk\x03\x04", b"\x80\x02")):
        return ": it is a pickled PyTorch file, save it as safetensors"
    return ""


def _corrupt(subject: str, message: str) -> AdapterRejected:
    return _reject("corrupt_adapter", subject, message)


def _reject(code: str, subject: str, message: str) -> AdapterRejected:
    return AdapterRejected([Violation(code, subject, message)])
