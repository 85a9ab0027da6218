from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.errors import AdapterUnavailable
from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, AdapterRef, ModuleLora
from adapters.pages import PagedTarget, ResidentAdapter
from adapters.weights import AdapterWeights, layout, load_weights, page_sizes
from tests.adapters.stored import (
    BASE,
    assert_exact,
    device_bytes,
    every_module,
    reference,
    write_adapter,
)


def laid_out(weights: AdapterWeights) -> tuple[torch.Tensor, ResidentAdapter]:
    """The host pages one after the other, and where a copy of them would lie in that buffer."""
    flat, targets, end = [], {}, 0
    for t, target in weights.targets.items():
        size = target.pages.shape[1]
        offsets = tuple(range(end, end + target.pages.numel(), size))
        targets[t] = PagedTarget(offsets, target.ranks, target.scales)
        flat.append(target.pages.flatten())
        end += target.pages.numel()
    return torch.cat(flat), ResidentAdapter(weights.digest, 1, targets)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_pages_hold_the_files_tensors(
    tmp_path: Path, stored: torch.dtype, served: torch.dtype
) -> None:
    ref = write_adapter(tmp_path, "a", every_module(8), dtype=stored)
    weights = load_weights(ref, BASE, served)
    buffer, adapter = laid_out(weights)
    assert buffer.dtype == served
    assert weights.nbytes == buffer.nbytes == device_bytes(ref, served.itemsize)
    assert_exact(buffer, adapter, ref)


def test_mixed_ranks_and_missing_layers_take_pages_of_the_largest(tmp_path: Path) -> None:
    ranks = {
        "layers.0.q_proj": 1,
        "layers.2.q_proj": 17,
        "layers.1.k_proj": 8,
        "layers.0.up_proj": 9,
        "layers.1.up_proj": 16,
    }
    ref = write_adapter(tmp_path, "a", ranks)
    weights = load_weights(ref, BASE, torch.float32)
    assert {t: w.pages.shape[0] for t, w in weights.targets.items()} == {0: 3, 1: 1, 2: 2}
    assert weights.targets[0].ranks == (1, 0, 17)
    assert weights.targets[0].scales[1] == 0.0
    assert_exact(*laid_out(weights), ref)


def test_the_size_is_known_from_the_manifest_alone(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", every_module(12) | {"layers.0.q_proj": 40})
    sizes = page_sizes(layout(ref, BASE), BASE)
    assert 4 * sum(sizes) == load_weights(ref, BASE, torch.float32).nbytes


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_files_changed_after_validation_are_refused(tmp_path: Path, file: str) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    content = bytearray((ref.folder / file).read_bytes())
    content[-2] ^= 1
    (ref.folder / file).write_bytes(content)
    with pytest.raises(AdapterUnavailable, match="'a'.*damaged.*" + ref.digest):
        load_weights(ref, BASE, torch.float32)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    (ref.folder / file).unlink()
    with pytest.raises(AdapterUnavailable, match=f"'a'.*{file}"):
        load_weights(ref, BASE, torch.float32)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    (ref.folder / WEIGHTS_FILE).chmod(0)
    with pytest.raises(AdapterUnavailable, match=WEIGHTS_FILE):
        load_weights(ref, BASE, torch.float32)


def test_a_folder_without_tensors_in_it_is_refused(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    (ref.folder / WEIGHTS_FILE).write_bytes(b"not safetensors")
    ref = reference(ref.folder, "a", ref.manifest.modules)
    with pytest.raises(AdapterUnavailable, match="cannot be read"):
        load_weights(ref, BASE, torch.float32)


def rewritten(ref: AdapterRef, **tensors: torch.Tensor | None) -> AdapterRef:
    """`ref` with tensors of its first module replaced (None: removed), under its new digest."""
    stored = load_file(ref.folder / WEIGHTS_FILE)
    for side, tensor in tensors.items():
        key = getattr(ref.manifest.modules[0], side)
        if tensor is None:
            del stored[key]
        else:
            stored[key] = tensor
    save_file(stored, ref.folder / WEIGHTS_FILE)
    return reference(ref.folder, ref.name, ref.manifest.modules)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    ref = rewritten(write_adapter(tmp_path, "a", every_module(2)), b_key=None)
    with pytest.raises(AdapterUnavailable, match="layers.0.q_proj.lora_B.weight"):
        load_weights(ref, BASE, torch.float32)


@pytest.mark.parametrize("shape", [(3, 16), (2, 15), (32,), (1, 2, 16)])
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    ref = rewritten(write_adapter(tmp_path, "a", every_module(2)), a_key=torch.ones(shape))
    with pytest.raises(AdapterUnavailable, match=r"lora_A.weight' has shape .*, not \[2, 16\]"):
        load_weights(ref, BASE, torch.float32)


def test_a_value_that_overflows_the_served_dtype_is_refused(tmp_path: Path) -> None:
    large = torch.ones(2, 16)
    large[1, 3] = 70_000.0
    ref = rewritten(write_adapter(tmp_path, "a", every_module(2)), a_key=large)
    assert load_weights(ref, BASE, torch.float32).nbytes
    with pytest.raises(AdapterUnavailable, match="lora_A.weight.*float16"):
        load_weights(ref, BASE, torch.float16)


def test_a_manifest_of_another_base_is_refused(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    stray = ModuleLora("layers.9.q_proj", 2, 1.0, "x", "y")
    for modules, message in (
        ((*ref.manifest.modules, stray), "no module 'layers.9.q_proj'"),
        (ref.manifest.modules * 2, "'layers.0.q_proj' twice"),
    ):
        odd = replace(ref, manifest=replace(ref.manifest, modules=modules))
        with pytest.raises(AdapterUnavailable, match=message):
            load_weights(odd, BASE, torch.float32)
