"""What the tensors of a weights file hold, read in memory for one chunk, whatever their size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from adapters.errors import AdapterRejected, Violation
from adapters.peft_files import TensorEntry, TensorTable
from adapters.terms import BaseParameters

READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Contents:
    """The data of the weights file at `path`; `parameters` are the resident base's, if at hand."""

    path: Path
    parameters: BaseParameters | None = None

    def non_finite(self, table: TensorTable, served: str) -> Iterator[Violation]:
        """One violation for each tensor of a served dtype with a value that the dtype `served`
        cannot hold. Raises AdapterRejected where the file ends early."""
        with open(self.path, "rb", buffering=0) as file:
            for tensor in table.tensors:
                if tensor.dtype not in _BITS:
                    continue
                dtype = _BITS[tensor.dtype]
                magnitude, least = np.iinfo(dtype).max >> 1, _TOO_LARGE[served][tensor.dtype]
                bad = 0
                for chunk in _chunks(file, tensor):
                    bits = np.frombuffer(chunk, dtype)
                    bad += int(np.count_nonzero((bits & magnitude) >= least))
                if bad:
                    message = f"holds {bad} values that are NaN, infinite or too large for {served}"
                    yield Violation("non_finite_weights", tensor.name, message)

    def same(self, one: TensorEntry, other: TensorEntry) -> bool:
        """Whether two tensors of the file hold the same, bit for bit."""
        if (one.dtype, one.shape) != (other.dtype, other.shape) or one.dtype not in _BITS:
            return False
        with open(self.path, "rb", buffering=0) as a, open(self.path, "rb", buffering=0) as b:
            pairs = zip(_chunks(a, one), _chunks(b, other), strict=True)
            return all(mine == others for mine, others in pairs)

    def equals_base(self, tensor: TensorEntry, parameter: str) -> bool | None:
        """Whether the base's parameter has the same values, once those of the file are cast to its
        dtype; None where that cannot be known."""
        if self.parameters is None or tensor.dtype not in _TORCH:
            return None
        resident = self.parameters(parameter)
        if tuple(resident.shape) != tensor.shape or not resident.is_floating_point():
            return None
        values, start = resident.reshape(-1), 0
        with open(self.path, "rb", buffering=0) as file:
            for chunk in _chunks(file, tensor):
                mine = torch.frombuffer(bytearray(chunk), dtype=_TORCH[tensor.dtype])
                theirs = values[start : start + len(mine)].cpu()
                if not torch.equal(mine.to(theirs.dtype), theirs):
                    return False
                start += len(mine)
        return True


# For each stored dtype, its bits as an unsigned integer; for each served one, the least bits (but
# for the sign) that are NaN, infinite, or round to infinity in it.
_BITS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<u4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
}
_TOO_LARGE = {
    "float32": {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80},
    "bfloat16": {"F32": 0x7F7F_8000, "F16": 0x7C00, "BF16": 0x7F80},
    "float16": {"F32": 0x477F_F000, "F16": 0x7C00, "BF16": 0x4780},
}
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _chunks(file: BinaryIO | Any, tensor: TensorEntry) -> Iterator[bytes]:
    """A tensor's bytes, at most READ_BYTES at a time and always whole elements."""
    file.seek(tensor.offset)
    left = tensor.nbytes
    while left:
        chunk: bytes = file.read(min(left, READ_BYTES))
        if not chunk or len(chunk) % _BITS[tensor.dtype].itemsize:
            message = "was cut while it was read"
            raise AdapterRejected([Violation("corrupt_adapter", Path(file.name).name, message)])
        yield chunk
        left -= len(chunk)
