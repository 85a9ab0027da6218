"""Pickled weights become safetensors, and nothing in them is ever run."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapters.errors import AdapterRejected, Violation
from adapters.manifest import WEIGHTS_FILE
from adapters.pickles import PICKLE_FILE, convert_pickle


def pickled(folder: Path, value: object, **options: Any) -> Path:
    path = folder / PICKLE_FILE
    torch.save(value, path, **options)
    return path


def converted(source: Path, **options: Any) -> tuple[dict[str, Tensor], list[str]]:
    target = source.parent / WEIGHTS_FILE
    notes = convert_pickle(source, target, **options)
    return load_file(target), notes


def refusal(source: Path, **options: Any) -> Violation:
    with pytest.raises(AdapterRejected) as error:
        convert_pickle(source, source.parent / WEIGHTS_FILE, **options)
    (violation,) = error.value.violations
    assert violation.subject in (PICKLE_FILE, WEIGHTS_FILE)
    assert sorted(path.name for path in source.parent.iterdir()) == [PICKLE_FILE]
    return violation


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_every_tensor_keeps_its_name_dtype_and_bits(tmp_path: Path, options: Any) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(2, 2, dtype=torch.bfloat16),
        "c": torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float16),
        "turned": torch.randn(4, 5).T,
        "part": torch.randn(10, 4)[2:4],
        "trained": torch.nn.Parameter(torch.randn(2)),
    }
    found, notes = converted(pickled(tmp_path, tensors, **options))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(
            found[name].view(torch.uint8), tensor.detach().contiguous().view(torch.uint8)
        )
    assert notes == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [PICKLE_FILE, WEIGHTS_FILE]


def test_tied_tensors_are_both_written_out(tmp_path: Path) -> None:
    table = torch.randn(4, 3)
    found, notes = converted(pickled(tmp_path, {"one": table, "two": table, "row": table[1:2]}))
    assert torch.equal(found["one"], table) and torch.equal(found["two"], table)
    assert torch.equal(found["row"], table[1:2])
    assert len(notes) == 2 and "'two' shares memory with 'one'" in notes[0]


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_state_dict_inside_a_checkpoint_is_taken_and_said(tmp_path: Path, key: str) -> None:
    weight = torch.randn(2, 2)
    found, notes = converted(pickled(tmp_path, {key: {"w": weight}, "epoch": 3}))
    assert torch.equal(found["w"], weight)
    assert key in notes[0] and "'epoch'" in notes[1]


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_a_malicious_pickle_runs_nothing(tmp_path: Path, options: Any) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "upload").mkdir()
    source = pickled(tmp_path / "upload", {"w": torch.ones(1), "x": Malicious(marker)}, **options)
    violation = refusal(source)
    assert violation.code == "unsafe_pickle" and "mkdir" in violation.message
    assert not marker.exists()
    torch.load(source, weights_only=False)
    assert marker.exists()


def test_a_plain_malicious_pickle_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "upload").mkdir()
    source = tmp_path / "upload" / PICKLE_FILE
    source.write_bytes(pickle.dumps(Malicious(marker)))
    refusal(source)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([torch.ones(1)], "list"),
        ({"w": torch.ones(1), "config": {"r": 4}}, "'config'"),
        ({"w": torch.ones(1), "state_dict": {"v": torch.ones(1)}}, "'state_dict'"),
        ({"state_dict": {"a": {"b": torch.ones(1)}}}, "'a'"),
        ({3: torch.ones(1)}, "3"),
        ({"__metadata__": torch.ones(1)}, "__metadata__"),
        ({"w": torch.eye(3).to_sparse()}, "'w'"),
        ({"w": torch.empty(3, device="meta")}, "'w'"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, "safetensors"),
        ({}, "no tensors"),
    ],
)
def test_only_a_flat_dict_of_dense_tensors_is_taken(
    tmp_path: Path, value: object, words: str
) -> None:
    violation = refusal(pickled(tmp_path, value))
    assert violation.code == "unreadable_pickle" and words in violation.message


@pytest.mark.parametrize("cut", [0, 1, 100, 700])
def test_a_cut_or_foreign_file_is_refused(tmp_path: Path, cut: int) -> None:
    source = pickled(tmp_path, {"w": torch.ones(64)})
    source.write_bytes(source.read_bytes()[:cut])
    assert refusal(source).code == "unreadable_pickle"
    source.write_bytes(b"<!doctype html>" * 9)
    assert refusal(source).code == "unreadable_pickle"


def test_a_compressed_archive_is_refused_not_misread(tmp_path: Path) -> None:
    source = pickled(tmp_path, {"w": torch.zeros(4096)})
    with zipfile.ZipFile(source) as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    assert "compressed" in refusal(source).message


def test_sizes_are_bounded_before_anything_is_written(tmp_path: Path) -> None:
    source = pickled(tmp_path, {"w": torch.ones(1).expand(1 << 20, 1 << 20)})
    violation = refusal(source)
    assert violation.code == "pickle_too_large" and str(4 << 40) in violation.message
    assert refusal(source, max_bytes=100).code == "pickle_too_large"


def test_an_existing_file_is_kept_unless_told(tmp_path: Path) -> None:
    source = pickled(tmp_path, {"w": torch.ones(2)})
    target = tmp_path / WEIGHTS_FILE
    target.write_bytes(b"mine")
    with pytest.raises(AdapterRejected) as error:
        convert_pickle(source, target)
    assert error.value.violations[0].code == "file_exists"
    assert target.read_bytes() == b"mine"
    assert torch.equal(converted(source, overwrite=True)[0]["w"], torch.ones(2))
