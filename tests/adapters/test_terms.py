from __future__ import annotations

import pytest
import torch

from adapters import terms as terms_module
from adapters.terms import (
    Affine,
    EmbeddingDelta,
    ParameterDelta,
    ReplacedRows,
    Replacement,
    Term,
    dora_gain,
    mapped,
    tensors,
)


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (Affine(None, torch.tensor([1.0])), [1]),
        (Affine(torch.tensor([1.0]), torch.tensor([2.0])), [1, 2]),
        (Replacement({"weight": torch.tensor([1.0]), "bias": torch.tensor([2.0])}), [1, 2]),
        (ParameterDelta("w", 2.0, False, torch.tensor([1.0]), torch.tensor([2.0])), [1, 2]),
        (EmbeddingDelta(2.0, *(torch.tensor([n]) for n in (1.0, 2.0, 3.0))), [1, 2, 3]),
        (ReplacedRows((5,), torch.tensor([1.0])), [1]),
    ],
)
def test_tensors_are_replaced_in_the_order_in_which_they_are_told(
    term: Term, expected: list[int]
) -> None:
    assert [int(tensor) for tensor in tensors(term)] == expected
    seen = []

    def place(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(int(tensor))
        return tensor + 10

    moved = mapped(term, place)
    assert type(moved) is type(term) and seen == expected
    assert [int(tensor) for tensor in tensors(moved)] == [n + 10 for n in expected]


@pytest.mark.parametrize("at_once", [1, 7 * 24, 1 << 24])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dora_gain_is_magnitude_over_norm_of_each_output(
    monkeypatch: pytest.MonkeyPatch, at_once: int, transposed: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(terms_module, "_AT_ONCE", at_once)
    torch.manual_seed(0)
    weight, a, b = (torch.randn(*s).to(dtype) for s in ((24, 17), (3, 17), (24, 3)))
    magnitude = torch.rand(24)
    dense = weight.double() + 0.7 * b.double() @ a.double()
    expected = magnitude / dense.norm(dim=1)
    stored = weight.T.contiguous() if transposed else weight
    before = stored.clone()
    gain = dora_gain(magnitude, stored, a, b, 0.7, transposed=transposed)
    assert gain.dtype == torch.float32
    torch.testing.assert_close(gain.double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(stored, before)
