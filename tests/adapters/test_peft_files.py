from __future__ import annotations

import hashlib
import os
import re
import subprocess
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from adapters.errors import AdapterRejected
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from adapters.peft_files import (
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    content_digest,
    read_config,
    read_header,
)
from tests.adapters.lora_files import write_safetensors


def test_header_gives_each_tensor_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS_FILE
    tensors = {
        "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
        "brain": torch.ones(4, dtype=torch.bfloat16),
        "full": torch.arange(5, dtype=torch.float32),
        "scalar": torch.tensor(7.0),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    raw = path.read_bytes()

    table = read_header(path)

    assert {t.name: (t.dtype, t.shape) for t in table.tensors} == {
        "half": ("F16", (2, 3)),
        "brain": ("BF16", (4,)),
        "full": ("F32", (5,)),
        "scalar": ("F32", ()),
    }
    for entry in table.tensors:
        data = tensors[entry.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw[entry.offset : entry.offset + entry.nbytes] == data
    assert table.nbytes == 12 + 8 + 20 + 4


def _entry(begin: int, end: int, shape: Any = None, dtype: str = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "trailing bytes": ({"a": _entry(0, 4)}, bytes(68), "describes"),
    "missing bytes": ({"a": _entry(0, 8)}, bytes(4), "describes"),
    "overlap": ({"a": _entry(0, 8), "b": _entry(4, 12)}, bytes(12), "overlaps"),
    "same bytes twice": ({"a": _entry(0, 4), "b": _entry(0, 4)}, bytes(4), "overlaps"),
    "hole": ({"a": _entry(0, 4), "b": _entry(8, 12)}, bytes(12), "hole"),
    "late start": ({"a": _entry(4, 8)}, bytes(8), "hole"),
    "size not that of the shape": ({"a": _entry(0, 4, [2])}, bytes(4), "4 bytes"),
    "negative size": ({"a": _entry(0, 4, [-1])}, bytes(4), "malformed"),
    "backwards": ({"a": _entry(4, 0, [1])}, bytes(4), "-4 bytes"),
    "empty tensor": ({"a": _entry(0, 0, [0, 1 << 60])}, b"", "none of them 0"),
    "overflowing shape": ({"a": _entry(0, 4, [1 << 62, 1 << 62])}, bytes(4), "4 bytes"),
    "many dimensions": ({"a": _entry(0, 4, [1] * 1000)}, bytes(4), "dimensions"),
    "unknown dtype": ({"a": _entry(0, 4, dtype="F13")}, bytes(4), "F13"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4), "malformed"),
    "extra field": ({"a": _entry(0, 4) | {"x": 1}}, bytes(4), "malformed"),
    "number for a tensor": ({"a": 3}, b"", "malformed"),
    "fractional size": ({"a": _entry(0, 4, [1.5])}, bytes(4), "malformed"),
    "bool for a size": ({"a": _entry(0, 4, [True])}, bytes(4), "malformed"),
    "metadata with numbers": ({"__metadata__": {"a": 1}}, b"", "malformed"),
    "array": ([], b"", "no JSON object"),
    "long name": ({"n" * 5000: _entry(0, 4)}, bytes(4), "5000 characters"),
    "same key twice": (
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
        "twice",
    ),
    "not UTF-8": (b'{"\xff":1}', b"", "JSON|UTF-8"),
    "lone surrogate": (r'{"\ud800":1}', b"", "JSON"),
    "NaN": ('{"a":NaN}', b"", "JSON"),
    "deep nesting": ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", b"", "deep"),
    "garbage": ("{]", b"", "JSON"),
    "leading space": (" {}", b"", "no JSON object"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_header_that_does_not_describe_its_file_is_refused(tmp_path: Path, case: str) -> None:
    header, data, reason = BAD_HEADERS[case]
    path = write_safetensors(tmp_path / WEIGHTS_FILE, header, data)
    assert re.search(reason, _only_message(path, "corrupt_adapter"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"\x08\x00\x00", "cut short"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n", "git-lfs"),
        (b"PK\x03\x04" + bytes(100), "PyTorch"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "cut short"),
        (((1 << 64) - 1).to_bytes(8, "little") + b"{}", "cut short"),
    ],
)
def test_a_file_that_is_something_else_is_named(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(content)
    assert reason in _only_message(path, "corrupt_adapter")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS_FILE
    save_file({"a": torch.ones(100), "b": torch.ones(50)}, path)
    whole = path.read_bytes()
    for size in (0, 6, 8, 40, len(whole) - 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        _only_message(path, "corrupt_adapter")


def test_what_is_accepted_the_library_reads_too(tmp_path: Path) -> None:
    path = write_safetensors(
        tmp_path / WEIGHTS_FILE, {"b": _entry(4, 12), "a": _entry(0, 4)}, bytes(12)
    )
    assert [t.name for t in read_header(path).tensors] == ["a", "b"]
    with safe_open(path, "pt") as file:
        assert sorted(file.keys()) == ["a", "b"]
    write_safetensors(path, {"a": _entry(0, 4)}, bytes(5))
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass


def test_millions_of_tensors_are_refused_at_once_and_in_little_memory(tmp_path: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    over = write_safetensors(
        tmp_path / "over", "{" + ",".join(entry % i for i in range(2_000_000)) + "}"
    )
    under = write_safetensors(
        tmp_path / "under", "{" + ",".join(f'"{i}":{{}}' for i in range(600_000)) + "}"
    )
    tracemalloc.start()
    start = time.perf_counter()
    assert f"at most {MAX_HEADER_BYTES}" in _only_message(over, "corrupt_adapter")
    assert "too many" in _only_message(under, "corrupt_adapter")
    assert time.perf_counter() - start < 10
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_tensors_are_counted(tmp_path: Path) -> None:
    header = {f"{i}": _entry(4 * i, 4 * i + 4) for i in range(MAX_TENSORS + 1)}
    path = write_safetensors(tmp_path / WEIGHTS_FILE, header, bytes(4 * (MAX_TENSORS + 1)))
    assert f"at most {MAX_TENSORS}" in _only_message(path, "corrupt_adapter")
    del header[f"{MAX_TENSORS}"]
    write_safetensors(path, header, bytes(4 * MAX_TENSORS))
    assert len(read_header(path).tensors) == MAX_TENSORS


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    save_file({"a": torch.ones(1)}, secret)
    link = tmp_path / WEIGHTS_FILE
    link.symlink_to(secret)
    assert "regular" in _only_message(link, "corrupt_adapter")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "regular" in _only_message(pipe, "corrupt_adapter")
    assert "missing" in _only_message(tmp_path / "none", "missing_file")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'{"r": NaN}', "JSON"),
        (b'{"r": 1e999}', "JSON"),
        (b'{"lora_alpha": -Infinity}', "JSON"),
        (b'{"r": 4, "r": 8}', "'r' twice"),
        (b'{"x": {"k": 1, "k": 1}}', "'k' twice"),
        (b'{"x": "\xff"}', "JSON"),
        (rb'{"x": "\ud800"}', "JSON"),
        (b'{"x":' * 100_000, "deep"),
        (b'{"r": ' + b"9" * 5000 + b"}", ""),
        (b"[" + b"1," * 400_000 + b"1]", "too many"),
        (b" " * (MAX_CONFIG_BYTES + 1), f"at most {MAX_CONFIG_BYTES}"),
        (b"<html>", "HTML"),
    ],
)
def test_a_config_that_is_no_strict_json_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / CONFIG_FILE
    path.write_bytes(content)
    with pytest.raises(AdapterRejected) as error:
        read_config(path)
    (violation,) = error.value.violations
    assert violation.code == "invalid_adapter_config"
    assert reason in violation.message
    assert len(violation.message) < 1000


def test_digest_can_be_redone_with_coreutils(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(b"{}")
    (tmp_path / WEIGHTS_FILE).write_bytes(os.urandom(100_000))
    (tmp_path / "README.md").write_bytes(b"not part of it")
    command = f"sha256sum {CONFIG_FILE} {WEIGHTS_FILE} | sha256sum"
    output = subprocess.check_output(["sh", "-c", command], cwd=tmp_path, text=True)

    assert content_digest(tmp_path) == output.split()[0]

    (tmp_path / CONFIG_FILE).write_bytes(b"{} ")
    assert content_digest(tmp_path) != output.split()[0]
    assert len(content_digest(tmp_path)) == hashlib.sha256().digest_size * 2


def _only_message(path: Path, code: str) -> str:
    with pytest.raises(AdapterRejected) as error:
        read_header(path)
    (violation,) = error.value.violations
    assert (violation.code, violation.subject) == (code, path.name)
    assert len(violation.message) < 1000
    return violation.message
