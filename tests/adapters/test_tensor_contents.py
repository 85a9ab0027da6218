from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from adapters import tensor_contents
from adapters.errors import AdapterRejected
from adapters.peft_files import TensorEntry, read_header
from adapters.tensor_contents import Contents

CHUNK = 64


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def table(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, TensorEntry], Tensor]:
    """A file of tensors longer than a chunk, and the values of its first."""
    monkeypatch.setattr(tensor_contents, "READ_BYTES", CHUNK)
    values = torch.randn(7, 11, generator=torch.Generator().manual_seed(1)).to(request.param)
    other = values.clone()
    other[-1, -1] += 1
    tensors = {
        "a": values,
        "same": values.clone(),
        "other": other,
        "flat": values.flatten().clone(),
    }
    save_file(tensors | {"whole": torch.ones(3, dtype=torch.int8)}, tmp_path / "file")
    entries = {entry.name: entry for entry in read_header(tmp_path / "file").tensors}
    return tmp_path / "file", entries, values


Table = tuple[Path, dict[str, TensorEntry], Tensor]


def test_tensors_of_a_file_are_compared_whole(table: Table) -> None:
    path, entries, _ = table
    contents = Contents(path)
    assert contents.same(entries["a"], entries["same"])
    assert not contents.same(entries["a"], entries["other"])
    assert not contents.same(entries["a"], entries["flat"])
    assert not contents.same(entries["whole"], entries["whole"])


@pytest.mark.parametrize("resident", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_is_compared_with_the_resident_one_in_its_dtype(
    table: Table, resident: torch.dtype
) -> None:
    path, entries, values = table
    contents = Contents(path, lambda _: values.to(resident))
    assert contents.equals_base(entries["a"], "w") is True
    assert contents.equals_base(entries["other"], "w") is False


def test_what_cannot_be_compared_is_neither_equal_nor_not(table: Table) -> None:
    path, entries, values = table
    assert Contents(path).equals_base(entries["a"], "w") is None
    assert Contents(path, lambda _: values.flatten()).equals_base(entries["a"], "w") is None
    quantised = torch.zeros(7, 11, dtype=torch.int8)
    assert Contents(path, lambda _: quantised).equals_base(entries["a"], "w") is None


def test_a_resident_parameter_need_not_be_contiguous(table: Table) -> None:
    path, entries, values = table
    assert Contents(path, lambda _: values.T.contiguous().T).equals_base(entries["a"], "w")


def test_a_file_that_is_cut_while_it_is_read_is_refused(table: Table) -> None:
    path, entries, values = table
    path.write_bytes(path.read_bytes()[:-CHUNK])
    contents = Contents(path, lambda _: values)
    tensors = list(entries.values())
    with pytest.raises(AdapterRejected, match="was cut"):
        for tensor in tensors:
            contents.same(tensor, tensor)
