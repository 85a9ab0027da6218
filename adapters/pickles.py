"""A pickled PyTorch state dict written anew as safetensors, without running what is in it."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from adapters.errors import AdapterRejected, Violation

#: The name that PEFT gave to weights before it wrote safetensors.
PICKLE_FILE = "adapter_model.bin"

#: Larger files are refused, and files whose tensors would be larger once written.
MAX_BYTES = 8 << 30

#: Under these keys training frameworks keep the state dict in a checkpoint.
_NESTED = ("state_dict", "model")
_GLOBAL = re.compile(r"GLOBAL ([^\s`]{1,200})")


def convert_pickle(
    source: Path, target: Path, *, max_bytes: int = MAX_BYTES, overwrite: bool = False
) -> list[str]:
    """Write the tensors of the pickle `source` to the safetensors file `target`.

    Names, shapes, dtypes and values stay. Returns notes on what was not one plain dict of tensors.
    `target` appears whole or not at all. Only tensors are unpickled (`weights_only`), nothing is
    called. Raises AdapterRejected for anything but a dict of dense tensors, for what is larger than
    `max_bytes`, and where `target` exists unless told to `overwrite`; OSError.
    """
    if target.exists() and not overwrite:
        raise _reject("file_exists", target, "exists already and is not overwritten")
    tensors, notes = _state_dict(source, _load(source, max_bytes))
    notes += _written_out(source, tensors, max_bytes)
    _save(source, tensors, target)
    return notes


def _load(source: Path, max_bytes: int) -> Any:
    size = source.stat().st_size
    if size > max_bytes:
        raise _reject(
            "pickle_too_large", source, f"is {size} bytes long; at most {max_bytes} are taken"
        )
    zipped = zipfile.is_zipfile(source)
    try:
        # Mapped, a compressed member would be taken for values as it is.
        if zipped and _is_compressed(source):
            raise _reject("unreadable_pickle", source, "is compressed; torch.save does not do that")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(source, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise _not_weights(source, str(error)) from None
    except OSError:
        raise
    except AdapterRejected:
        raise
    # On a damaged file torch's readers raise nearly anything.
    except Exception as error:
        why = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise _reject("unreadable_pickle", source, f"cannot be read: {why}") from None


def _is_compressed(source: Path) -> bool:
    with zipfile.ZipFile(source) as file:
        return any(member.compress_type != zipfile.ZIP_STORED for member in file.infolist())


def _not_weights(source: Path, text: str) -> AdapterRejected:
    found = _GLOBAL.search(text)
    if found is None:
        return _reject("unreadable_pickle", source, "is no pickle of plain tensors, or is damaged")
    message = (
        f"holds more than tensors: it would call {found[1]!r}; nothing of it was run. Do not load "
        "it elsewhere either, unless you trust its author; ask for a safetensors file"
    )
    return _reject("unsafe_pickle", source, message)


def _state_dict(source: Path, loaded: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The dict of tensors in what was unpickled, and a note if it lay inside another one."""
    if not isinstance(loaded, Mapping):
        kind = type(loaded).__name__
        raise _reject("unreadable_pickle", source, f"holds a {kind}, not a dict of tensors")
    notes: list[str] = []
    nested = [key for key in _NESTED if isinstance(loaded.get(key), Mapping)]
    if len(nested) == 1 and not any(isinstance(value, Tensor) for value in loaded.values()):
        left_out = [repr(key)[:60] for key in loaded if key != nested[0]]
        notes.append(f"the tensors were taken from {nested[0]!r} in {source.name}")
        if left_out:
            more = f" and {len(left_out) - 10} more" if len(left_out) > 10 else ""
            notes.append(f"left out, being no tensors: {', '.join(left_out[:10])}{more}")
        loaded = loaded[nested[0]]
    tensors: dict[str, Tensor] = {}
    for key, value in loaded.items():
        if not isinstance(key, str) or key == "__metadata__":
            raise _reject(
                "unreadable_pickle", source, f"has the key {key!r:.100}, no tensor's name"
            )
        if not isinstance(value, Tensor):
            message = f"holds a {type(value).__name__} at {key!r:.100}; only tensors are taken"
            raise _reject("unreadable_pickle", source, message)
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            message = f"holds a tensor at {key!r:.100} that is sparse, quantised or empty of values"
            raise _reject("unreadable_pickle", source, message)
        tensors[key] = value.detach()
    if not tensors:
        raise _reject("unreadable_pickle", source, "holds no tensors")
    return tensors, notes


def _written_out(source: Path, tensors: dict[str, Tensor], max_bytes: int) -> Iterator[str]:
    """Give each tensor memory of its own, row-major, as safetensors has it."""
    # Strides of 0 make a few bytes a tensor of any size.
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > max_bytes:
        message = f"holds tensors of {size} bytes; at most {max_bytes} are taken"
        raise _reject("pickle_too_large", source, message)
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        owner = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
        if owner != name:
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
            yield f"{name!r} shares memory with {owner!r}; each is written out by itself"
        else:
            tensors[name] = tensor.contiguous()


def _save(source: Path, tensors: dict[str, Tensor], target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        try:
            save_file(tensors, made, metadata={"format": "pt"})
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            message = f"cannot be written as safetensors: {str(error)[:200]}"
            raise _reject("unreadable_pickle", source, message) from None
        with open(made, "rb") as file:
            os.fsync(file.fileno())
        made.replace(target)


def _reject(code: str, path: Path, message: str) -> AdapterRejected:
    return AdapterRejected([Violation(code, path.name, message)])
