"""The adapted linear: the base's product, plus the LoRA of the rows that have one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from adapters.manifest import BaseSpec
from base_engine.base_spec import linear_sizes
from base_engine.kernels.dispatch import add_lora
from base_engine.kernels.segments import Segments


@dataclass(eq=False)
class LoraBinding:
    """What the linears of one model share; the runner sets it before each step.

    `buffer` is the flat device pool. `rows` are the segments of all tokens, `head` those of the
    rows that reach the output module; None means that no row has an adapter.
    """

    buffer: Tensor
    rows: Segments | None = None
    head: Segments | None = None


class LoraLinear(nn.Module):
    """Stands in for an `nn.Linear`, or for GPT-2's `Conv1D` (the same, its weight stored
    [in, out]), whose parameters it takes over, not copies."""

    def __init__(
        self,
        linear: nn.Linear | Conv1D,
        target: int,
        layer: int,
        binding: LoraBinding,
        *,
        head: bool,
    ) -> None:
        super().__init__()
        sizes = linear_sizes(linear)
        assert sizes is not None
        self.in_features, self.out_features = sizes
        self.weight = linear.weight
        self.bias = linear.bias
        self.transposed = isinstance(linear, Conv1D)
        self.target = target
        self.layer = layer
        self.binding = binding
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features], its leading dimensions flattening to the step's rows."""
        if self.transposed:
            y = torch.addmm(self.bias, x.reshape(-1, self.in_features), self.weight)
            y = y.view(*x.shape[:-1], -1)
        else:
            y = functional.linear(x, self.weight, self.bias)
        segments = self.binding.head if self.head else self.binding.rows
        if segments is not None:
            for target in segments.targets.get(self.target, ()):
                rows = x.reshape(-1, self.in_features)
                add_lora(
                    y.view(-1, self.out_features), rows, self.binding.buffer, target, self.layer
                )
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def install_lora(model: nn.Module, base: BaseSpec, binding: LoraBinding) -> None:
    """Replaces each module named in `base.targets` by a LoraLinear on the same parameters.

    All or nothing. Raises AttributeError for a path the model lacks, TypeError for a module that
    is not exactly a linear or Conv1D, ValueError for one whose sizes differ from the target's.
    """
    replacements: list[tuple[str, LoraLinear]] = []
    for path, (target, layer) in base.module_index.items():
        linear = model.get_submodule(path)
        spec = base.targets[target]
        sizes = linear_sizes(linear)
        if sizes is None or not isinstance(linear, (nn.Linear, Conv1D)):
            raise TypeError(f"{path} is a {type(linear).__name__}, not an nn.Linear or Conv1D")
        if sizes != (spec.in_features, spec.out_features):
            raise ValueError(
                f"{path} is {sizes[0]} → {sizes[1]}, but target {spec.name} "
                f"is {spec.in_features} → {spec.out_features}"
            )
        head = path == base.output_module
        replacements.append((path, LoraLinear(linear, target, layer, binding, head=head)))
    for path, module in replacements:
        model.set_submodule(path, module)
