from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from adapters.fused import placed
from adapters.manifest import BaseSpec, ModuleLora, TargetSpec

LAYER = "model.layers.{}.{}"
QKV = (("self_attn.q_proj", 64), ("self_attn.k_proj", 32), ("self_attn.v_proj", 32))
GATE_UP = (("mlp.gate_proj", 128), ("mlp.up_proj", 128))
WHOLES = {"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}
LAYERS = 2


def base_with(*linears: tuple[str, int]) -> BaseSpec:
    """A base with these linears [size, 64] in each layer, as Llama or as Phi-3 has them."""
    return BaseSpec(
        name="t",
        vocab_size=8,
        max_positions=8,
        targets=tuple(
            TargetSpec(name, 64, size, tuple(LAYER.format(i, name) for i in range(LAYERS)))
            for name, size in linears
        ),
        fused={
            LAYER.format(i, whole): tuple((LAYER.format(i, part), size) for part, size in parts)
            for i in range(LAYERS)
            for whole, parts in WHOLES.items()
        },
    )


SPLIT = base_with(*QKV, *GATE_UP)
WHOLE = base_with(("self_attn.qkv_proj", 128), ("mlp.gate_up_proj", 256))


class File:
    """LoRA entries and their tensors, as a file would hold them."""

    def __init__(self) -> None:
        self.loras: list[ModuleLora] = []
        self.tensors: dict[str, Tensor] = {}

    def add(self, name: str, rows: int, rank: int = 4, scale: float = 2.0, layer: int = 0) -> None:
        module = LAYER.format(layer, name)
        generator = torch.Generator().manual_seed(len(self.tensors))
        a, b = f"{module}.A", f"{module}.B"
        self.tensors[a] = torch.randn(rank, 64, generator=generator)
        self.tensors[b] = torch.randn(rows, rank, generator=generator)
        self.loras.append(ModuleLora(module, rank, scale, a, b))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}

    def delta(self, lora: ModuleLora) -> Tensor:
        rows = slice(*lora.b_rows) if lora.b_rows else slice(None)
        return lora.scale * self.tensors[lora.b_key][rows] @ self.tensors[lora.a_key]

    def weights(self, loras: list[ModuleLora], base: BaseSpec) -> dict[str, Tensor]:
        """What all `loras` add to each module's weight."""
        found = {
            path: torch.zeros(target.out_features, target.in_features)
            for target in base.targets
            for path in target.modules
        }
        for lora in loras:
            delta = self.delta(lora)
            found[lora.module][lora.out_start : lora.out_start + len(delta)] += delta
        return found


def fused_weights(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """A split model's weights as the fused model has them."""
    return {
        whole: torch.cat([parts[path] for path, _ in held]) for whole, held in WHOLE.fused.items()
    }


def test_lora_of_a_whole_is_served_on_its_parts() -> None:
    file = File()
    file.add("mlp.gate_up_proj", 256, rank=3, scale=0.5)
    file.add("self_attn.qkv_proj", 128)
    file.add("self_attn.qkv_proj", 128, rank=9, layer=1)
    loras, violations, notes = placed(file.loras, file.shapes, SPLIT)
    assert not violations
    served = file.weights(loras, SPLIT)
    for lora in file.loras:
        held = [served[path] for path, _ in SPLIT.fused[lora.module]]
        assert [len(part) for part in held] == [size for _, size in SPLIT.fused[lora.module]]
        assert torch.equal(torch.cat(held), file.delta(lora))

    order = list(SPLIT.module_index)
    assert [lora.module for lora in loras] == [
        path for path in sorted(order, key=SPLIT.module_index.__getitem__) if served[path].any()
    ]
    assert {key for key, _ in notes} == set(file.tensors)
    noted = dict(notes)[LAYER.format(0, "self_attn.qkv_proj.B")]
    assert (
        noted == "split: rows 0 to 63 on q_proj, rows 64 to 95 on k_proj, rows 96 to 127 on v_proj"
    )


def test_lora_of_any_parts_is_served_on_the_whole() -> None:
    file = File()
    file.add("self_attn.v_proj", 32, rank=16, scale=0.25)
    file.add("self_attn.q_proj", 64)
    file.add("mlp.up_proj", 128, rank=1)
    file.add("self_attn.k_proj", 32, layer=1)
    loras, violations, notes = placed(file.loras, file.shapes, WHOLE)
    assert not violations
    served = file.weights(loras, WHOLE)
    alone = {path: torch.zeros(size, 64) for held in WHOLE.fused.values() for path, size in held}
    alone |= {lora.module: file.delta(lora) for lora in file.loras}
    for whole, expected in fused_weights(alone).items():
        assert torch.equal(served[whole], expected)
    assert [(lora.module[15:], lora.out_start) for lora in loras] == [
        ("self_attn.qkv_proj", 0),
        ("self_attn.qkv_proj", 96),
        ("self_attn.qkv_proj", 64),
        ("mlp.gate_up_proj", 128),
    ]
    assert len(notes) == 8


@pytest.mark.parametrize("whole", [False, True])
def test_there_and_back_is_the_same_model(whole: bool) -> None:
    """One adapter's delta on the split weights and on the fused ones, in dense algebra."""
    file = File()
    if whole:
        file.add("self_attn.qkv_proj", 128)
        file.add("mlp.gate_up_proj", 256)
    else:
        for seed, (name, size) in enumerate((*QKV, *GATE_UP)):
            file.add(name, size, rank=1 + seed, scale=1.0 + seed)
    generator = torch.Generator().manual_seed(7)
    split = {
        path: torch.randn(target.out_features, 64, generator=generator)
        for target in SPLIT.targets
        for path in target.modules
    }
    x = torch.randn(5, 64, generator=generator)
    outputs = []
    for base, weights in ((SPLIT, split), (WHOLE, fused_weights(split))):
        loras, violations, _ = placed(file.loras, file.shapes, base)
        assert not violations
        added = file.weights(loras, base)
        outputs.append({path: x @ (weights[path] + added[path]).T for path in weights})
    apart, together = outputs
    for path, held in WHOLE.fused.items():
        torch.testing.assert_close(torch.cat([apart[p] for p, _ in held], 1), together[path])


def test_what_the_base_has_stays_in_its_order() -> None:
    file = File()
    file.add("self_attn.k_proj", 32, layer=1)
    file.add("self_attn.k_proj", 32)
    file.add("self_attn.q_proj", 64)
    loras, violations, notes = placed(file.loras, file.shapes, SPLIT)
    assert loras == file.loras[::-1]
    assert not violations and not notes


@pytest.mark.parametrize(
    ("base", "name", "rows", "expected"),
    [
        (SPLIT, "self_attn.qkv_proj", 192, "[128, 4]"),
        (SPLIT, "mlp.gate_up_proj", 128, "[256, 4]"),
        (WHOLE, "self_attn.k_proj", 64, "[32, 4]"),
        (WHOLE, "self_attn.q_proj", 128, "[64, 4]"),
    ],
)
def test_rows_that_do_not_add_up_are_refused_with_both_sizes(
    base: BaseSpec, name: str, rows: int, expected: str
) -> None:
    file = File()
    file.add(name, rows)
    loras, (violation,), notes = placed(file.loras, file.shapes, base)
    assert not loras and not notes
    assert (violation.code, violation.subject) == ("shape_mismatch", file.loras[0].b_key)
    assert expected in violation.message and f"[{rows}, 4]" in violation.message


def test_wrong_columns_or_dimensions_are_refused() -> None:
    for side, shape in (("A", (4, 32)), ("A", (3, 64)), ("B", (128,)), ("B", (128, 4, 1))):
        file = File()
        file.add("self_attn.qkv_proj", 128)
        key = f"{file.loras[0].module}.{side}"
        _, (violation,), _ = placed(file.loras, file.shapes | {key: shape}, SPLIT)
        assert (violation.code, violation.subject) == ("shape_mismatch", key)


def test_one_wrong_entry_leaves_the_others() -> None:
    file = File()
    file.add("self_attn.qkv_proj", 127)
    file.add("mlp.gate_up_proj", 256)
    loras, violations, notes = placed(file.loras, file.shapes, SPLIT)
    assert [lora.module for lora in loras] == [LAYER.format(0, p) for p, _ in GATE_UP]
    assert len(violations) == 1 and len(notes) == 2


@pytest.mark.parametrize("base", [SPLIT, WHOLE])
def test_a_whole_and_its_part_in_one_file_are_refused(base: BaseSpec) -> None:
    file = File()
    file.add("self_attn.qkv_proj", 128)
    file.add("self_attn.k_proj", 32)
    _, (violation,), _ = placed(file.loras, file.shapes, base)
    assert violation.code == "duplicate_tensor"
    assert "qkv_proj" in violation.message and "k_proj" in violation.message


def test_what_stands_in_for_nothing_comes_last_as_it_was() -> None:
    lacking = replace(SPLIT, targets=SPLIT.targets[1:])  # no q_proj
    file = File()
    file.add("self_attn.qkv_proj", 128)
    file.add("self_attn.other", 7)
    file.add("mlp.up_proj", 128)
    loras, violations, notes = placed(file.loras, file.shapes, lacking)
    assert loras == [file.loras[2], file.loras[0], file.loras[1]]
    assert not violations and not notes
