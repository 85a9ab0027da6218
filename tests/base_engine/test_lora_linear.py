"""LoraLinear in models, against PEFT's own layer."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import layer as lora_layer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.manifest import BaseSpec, TargetSpec
from base_engine.kernels.segments import Run, Segments
from base_engine.lora_linear import LoraBinding, LoraLinear, install_lora
from tests.base_engine.workload import Dense, Layout

BASE = BaseSpec(
    name="base",
    vocab_size=48,
    max_positions=32,
    targets=(
        TargetSpec("q_proj", 16, 32, ("layers.0.q_proj", "layers.1.q_proj")),
        TargetSpec("lm_head", 32, 48, ("lm_head",)),
    ),
    output_module="lm_head",
)


class Layer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 32, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.q_proj(x)
        return y


class Decoder(nn.Module):
    """Two projections and a head that sees only the rows `wanted`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(bias=i == 1) for i in range(2))
        self.lm_head = nn.Linear(32, 48, bias=False)

    def forward(self, x: Tensor, wanted: Tensor | None = None) -> Tensor:
        first, second = self.layers
        hidden = first(x) + second(x)
        hidden = hidden if wanted is None else hidden[:, wanted]
        logits: Tensor = self.lm_head(hidden)
        return logits


def from_peft(config: LoraConfig, seed: int) -> tuple[nn.Module, dict[tuple[int, int], Dense]]:
    """A PEFT model over a fresh Decoder with random A and B, and its weights."""
    model = get_peft_model(Decoder(), config)
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for path, (target, layer) in BASE.module_index.items():
        lora = model.get_submodule(f"base_model.model.{path}")
        if isinstance(lora, lora_layer.Linear):
            weights = [side.get_parameter("default.weight") for side in (lora.lora_A, lora.lora_B)]
            a, b = (w.data.copy_(torch.randn(w.shape, generator=generator)) for w in weights)
            modules[target, layer] = Dense(a, b, lora.scaling["default"])
    return model.eval(), modules


@torch.no_grad()
def test_a_mixed_batch_equals_peft_row_by_row() -> None:
    configs = [
        LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]),
        LoraConfig(r=3, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "lm_head"]),
        LoraConfig(
            r=4, target_modules=["q_proj", "lm_head"], rank_pattern={"lm_head": 19},
            alpha_pattern={"layers.1.q_proj": 3}, layers_to_transform=None,
        ),
        LoraConfig(r=5, lora_alpha=10, target_modules=["layers.1.q_proj"]),
    ]  # fmt: skip
    oracles = [from_peft(config, seed) for seed, config in enumerate(configs)]
    layout = Layout(BASE)
    adapters = [layout.add_dense(modules) for _, modules in oracles]

    model, binding = Decoder(), LoraBinding(layout.buffer)
    install_lora(model, BASE, binding)
    rows = [(0, 3, 0), (3, 5, None), (5, 6, 1), (6, 10, 2), (10, 11, 3), (11, 12, 1)]
    runs = [Run(s, e, () if n is None else ((adapters[n], 1.0),)) for s, e, n in rows]
    binding.rows = Segments.build(runs, BASE, "cpu")
    # The head sees the last row of each run, so its rows are numbered anew.
    ends = [Run(i, i + 1, run.adapters) for i, run in enumerate(runs)]
    binding.head = Segments.build(ends, BASE, "cpu")

    x = torch.randn(1, 12, 16)
    logits = model(x, torch.tensor([e - 1 for _, e, _ in rows]))
    for i, (start, end, number) in enumerate(rows):
        oracle = Decoder() if number is None else oracles[number][0]
        expected = oracle(x[:, start:end])[0, -1]
        torch.testing.assert_close(logits[0, i], expected, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_base_rows_do_not_notice_their_mates() -> None:
    layout = Layout(BASE)
    adapters = [layout.add([r, r], [5.0, 5.0]) for r in (7, 9)]
    model, binding = Decoder(), LoraBinding(layout.buffer)
    x = torch.randn(1, 5, 16)
    alone = model(x)
    install_lora(model, BASE, binding)
    runs = [Run(1, 2, ((adapters[0], 1.0),)), Run(3, 4, ((adapters[1], 1.0),))]
    binding.rows = Segments.build(runs, BASE, "cpu")
    mixed = model(x)
    torch.testing.assert_close(mixed[:, [0, 2, 4]], alone[:, [0, 2, 4]], atol=1e-5, rtol=0)
    assert (mixed[:, [1, 3]] - alone[:, [1, 3]]).abs().min(dim=-1).values.gt(0).all()
    binding.rows = None
    assert torch.equal(model(x), alone)


@torch.no_grad()
def test_parameters_stay_where_they_were_tied_ones_too() -> None:
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    names, ids = dict(model.named_parameters()), torch.arange(12)[None]
    expected = model(ids).logits
    head = TargetSpec("lm_head", 32, 48, ("lm_head",))
    down = TargetSpec("down", 16, 32, tuple(f"model.layers.{i}.mlp.down_proj" for i in range(2)))
    base = BaseSpec("base", 48, 32, (down, head), "lm_head", tied_head=True)
    layout = Layout(base)
    binding = LoraBinding(layout.buffer)
    install_lora(model, base, binding)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in names.items()}
    replaced = model.get_submodule("lm_head")
    assert isinstance(replaced, LoraLinear)
    assert replaced.weight is model.get_input_embeddings().weight
    assert (replaced.in_features, replaced.out_features) == (32, 48) and replaced.bias is None
    assert torch.equal(model(ids).logits, expected)

    adapter = layout.add([3], [1.0], target=1)
    binding.rows = Segments.build([Run(0, 12, ((adapter, 1.0),))], base, "cpu")
    assert torch.equal(model(ids).logits, expected), "the head must not read the token segments"
    binding.head = Segments.build([Run(0, 1, ((adapter, 1.0),))], base, "cpu")
    assert not torch.equal(model(ids, logits_to_keep=1).logits, expected[:, -1:])


class Scaled(nn.Linear):
    """A linear that computes something else."""


@pytest.mark.parametrize(
    ("path", "sizes", "error", "message"),
    [
        ("layers.0.k_proj", (16, 32), AttributeError, "k_proj"),
        ("layers.0", (16, 32), TypeError, "layers.0 is a Layer, not an nn.Linear or Conv1D"),
        ("layers.1.q_proj", (16, 33), ValueError, "is 16 → 32, but target bad is 16 → 33"),
        ("odd", (16, 32), TypeError, "odd is a Scaled, not an nn.Linear or Conv1D"),
    ],
)
def test_a_path_that_cannot_be_adapted_is_refused_and_nothing_replaced(
    path: str, sizes: tuple[int, int], error: type[Exception], message: str
) -> None:
    model = Decoder()
    model.odd = Scaled(16, 32)
    base = BaseSpec("base", 48, 32, (BASE.targets[1], TargetSpec("bad", *sizes, (path,))))
    with pytest.raises(error, match=message):
        install_lora(model, base, LoraBinding(torch.empty(0)))
    assert type(model.lm_head) is nn.Linear


def test_segments_past_the_rows_that_arrive_are_refused() -> None:
    layout = Layout(BASE)
    model, binding = Decoder(), LoraBinding(layout.buffer)
    install_lora(model, BASE, binding)
    adapter = layout.add([4, 4], [1.0, 1.0])
    binding.rows = Segments.build([Run(0, 9, ((adapter, 1.0),))], BASE, "cpu")
    with pytest.raises(ValueError, match="segments reach row 9, but there are 5 rows"):
        model(torch.randn(1, 5, 16))
