from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.errors import AdapterUnavailable
from adapters.layout import layout
from adapters.manifest import CONFIG_FILE, PAGE_RANK, WEIGHTS_FILE, AdapterRef, ModuleLora
from adapters.pages import PagedTarget, ResidentAdapter
from adapters.terms import EmbeddingDelta, ParameterDelta, Replacement, tensors
from adapters.weights import AdapterWeights
from adapters.weights import load_weights as load
from tests.adapters.stored import (
    BASE,
    EVERY_TERM,
    assert_exact,
    base_parameter,
    device_bytes,
    every_module,
    reference,
    write_adapter,
)


def load_weights(ref: AdapterRef, dtype: torch.dtype) -> AdapterWeights:
    return load(ref, BASE, dtype, base_parameter)


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
    weights = load_weights(ref, served)
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
    weights = load_weights(ref, torch.float32)
    assert {t: w.pages.shape[0] for t, w in weights.targets.items()} == {0: 3, 1: 1, 2: 2}
    assert weights.targets[0].ranks == (1, 0, 17)
    assert weights.targets[0].scales[1] == 0.0
    assert_exact(*laid_out(weights), ref)


def test_the_size_is_known_from_the_manifest_alone(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", every_module(12) | {"layers.0.q_proj": 40})
    plan = layout(ref.manifest, BASE)
    assert 4 * plan.elements == load_weights(ref, torch.float32).nbytes == device_bytes(ref)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_files_changed_after_validation_are_refused(tmp_path: Path, file: str) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    content = bytearray((ref.folder / file).read_bytes())
    content[-2] ^= 1
    (ref.folder / file).write_bytes(content)
    with pytest.raises(AdapterUnavailable, match="'a'.*damaged.*" + ref.digest):
        load_weights(ref, torch.float32)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    (ref.folder / file).unlink()
    with pytest.raises(AdapterUnavailable, match=f"'a'.*{file}"):
        load_weights(ref, torch.float32)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    (ref.folder / WEIGHTS_FILE).chmod(0)
    with pytest.raises(AdapterUnavailable, match=WEIGHTS_FILE):
        load_weights(ref, torch.float32)


def test_a_folder_without_tensors_in_it_is_refused(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    (ref.folder / WEIGHTS_FILE).write_bytes(b"not safetensors")
    ref = reference(ref.folder, "a", ref.manifest.modules)
    with pytest.raises(AdapterUnavailable, match="cannot be read"):
        load_weights(ref, torch.float32)


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
        load_weights(ref, torch.float32)


@pytest.mark.parametrize("shape", [(3, 16), (2, 15), (32,), (1, 2, 16)])
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    ref = rewritten(write_adapter(tmp_path, "a", every_module(2)), a_key=torch.ones(shape))
    with pytest.raises(AdapterUnavailable, match=r"lora_A.weight' has shape .*, not \[2, 16\]"):
        load_weights(ref, torch.float32)


def test_a_value_that_overflows_the_served_dtype_is_refused(tmp_path: Path) -> None:
    large = torch.ones(2, 16)
    large[1, 3] = 70_000.0
    ref = rewritten(write_adapter(tmp_path, "a", every_module(2)), a_key=large)
    assert load_weights(ref, torch.float32).nbytes
    with pytest.raises(AdapterUnavailable, match="lora_A.weight.*float16"):
        load_weights(ref, torch.float16)


def test_a_manifest_of_another_base_is_refused(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", every_module(2))
    modules = (*ref.manifest.modules, ModuleLora("layers.9.q_proj", 2, 1.0, "x", "y"))
    odd = replace(ref, manifest=replace(ref.manifest, modules=modules))
    with pytest.raises(
        AdapterUnavailable, match="'a': base 'tiny' has no module 'layers.9.q_proj'"
    ):
        load_weights(odd, torch.float32)


def test_a_plain_adapter_asks_nothing_of_the_base(tmp_path: Path) -> None:
    def refuse(path: str) -> torch.Tensor:
        raise AssertionError(f"{path} was asked for")

    ref = write_adapter(tmp_path, "a", every_module(2))
    assert not load(ref, BASE, torch.float32, refuse).terms


@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_terms_are_in_the_served_dtype_and_the_order_of_the_layout(
    tmp_path: Path, served: torch.dtype
) -> None:
    ref = write_adapter(tmp_path, "a", every_module(3, "q_proj"), terms=EVERY_TERM)
    weights = load_weights(ref, served)
    plan = layout(ref.manifest, BASE)
    assert weights.nbytes == device_bytes(ref, served.itemsize)
    assert list(weights.terms) == list(plan.terms)
    for module, terms in weights.terms.items():
        found = [tensor for term in terms for tensor in tensors(term)]
        assert tuple(tuple(tensor.shape) for tensor in found) == plan.terms[module]
        assert all(tensor.dtype == served and tensor.is_contiguous() for tensor in found)
    kinds = {module: [type(term) for term in terms] for module, terms in weights.terms.items()}
    assert kinds["embed"] == [Replacement, EmbeddingDelta]
    assert kinds["experts"] == [ParameterDelta, ParameterDelta]


def test_terms_outlive_the_file(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", {}, terms=EVERY_TERM)
    weights = load_weights(ref, torch.float32)
    read = [
        tensor for terms in weights.terms.values() for term in terms for tensor in tensors(term)
    ]
    before = [tensor.clone() for tensor in read]
    path = ref.folder / WEIGHTS_FILE
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    for tensor, kept in zip(read, before, strict=True):
        assert torch.equal(tensor, kept)


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("norm", torch.ones(15), r"'norm' has shape \[15\], not \[16\]"),
        ("e", torch.ones(32, 16), r"'e' has shape \[32, 16\], not \[35, 16\]"),
        ("rows", torch.ones(2, 16), r"'rows' has shape \[2, 16\], not \[3, 16\]"),
        ("down.b", torch.ones(16, 5), r"'down.b' has shape \[16, 5\], not \[16, 6\]"),
        ("q.m", torch.full((16,), torch.inf), "'q.m' has values that torch.float32 cannot hold"),
        ("k.bias", torch.full((8,), torch.nan), "'k.bias' has values"),
        ("embed.a", torch.full((5, 35), torch.nan), "'embed.a' has values"),
    ],
)
def test_a_terms_tensor_that_is_not_as_it_was_is_named(
    tmp_path: Path, key: str, tensor: torch.Tensor, message: str
) -> None:
    ref = write_adapter(tmp_path, "a", {}, terms=EVERY_TERM)
    path = ref.folder / WEIGHTS_FILE
    save_file(load_file(path) | {key: tensor}, path)
    ref = reference(ref.folder, "a", (), **EVERY_TERM)
    with pytest.raises(AdapterUnavailable, match=f"'a': tensor {message}"):
        load_weights(ref, torch.float32)


def test_loras_of_one_module_lie_one_behind_the_other_across_pages(tmp_path: Path) -> None:
    ref = write_adapter(tmp_path, "a", {"layers.0.q_proj": 5, "layers.1.q_proj": 13})
    stored = load_file(ref.folder / WEIGHTS_FILE)
    first, second = (replace(m, module="layers.2.q_proj") for m in ref.manifest.modules)
    first, second = replace(first, scale=-0.5), replace(second, scale=0.125)
    both = reference(ref.folder, "a", (first, second))
    target = load_weights(both, torch.float32).targets[0]
    assert (target.ranks, target.scales) == ((0, 0, 18), (0.0, 0.0, -0.5))
    split = 3 * PAGE_RANK * 16
    a = target.pages[:, :split].view(3, 3, PAGE_RANK, 16)
    b = target.pages[:, split:].view(3, 3, PAGE_RANK, 16)
    assert not a[:, :2].any() and not b[:, :2].any()
    expected = sum(m.scale * stored[m.b_key] @ stored[m.a_key] for m in (first, second))
    delta = -0.5 * b[:, 2].reshape(-1, 16).T @ a[:, 2].reshape(-1, 16)
    torch.testing.assert_close(delta, expected)


@pytest.mark.parametrize(
    ("rows", "out_start", "fits"),
    [
        (None, 0, True),
        (None, 1, False),
        ((0, 16), 0, True),
        ((3, 9), 10, True),
        ((3, 9), 11, False),
        ((9, 17), 0, False),
        ((4, 4), 0, False),
    ],
)
def test_rows_of_b_that_are_not_there_are_refused(
    tmp_path: Path, rows: tuple[int, int] | None, out_start: int, fits: bool
) -> None:
    ref = write_adapter(tmp_path, "a", {"layers.0.q_proj": 2})
    lora = replace(ref.manifest.modules[0], b_rows=rows, out_start=out_start)
    ref = reference(ref.folder, "a", (lora,))
    if fits:
        assert load_weights(ref, torch.float32).targets[0].ranks == (2, 0, 0)
    else:
        with pytest.raises(AdapterUnavailable, match=r"lora_B.weight' has shape \[16, 2\]"):
            load_weights(ref, torch.float32)
