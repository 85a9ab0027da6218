"""The adapted linear: the base's product, plus the LoRA of the rows that have one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from adapters.manifest import BaseSpec
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
    """Stands in for an `nn.Linear`, whose parameters it takes over, not copies."""

    def __init__(
        self, linear: nn.Linear, target: int, layer: int, binding: LoraBinding, *, head: bool
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.target = target
        self.layer = layer
        self.binding = binding
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features], its leading dimensions flattening to the step's rows."""
        y = functional.linear(x, self.weight, self.bias)
        segments = self.binding.head if self.head else self.binding.rows
        if segments is not None:
            target = segments.targets.get(self.target)
            if target is not None:
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
    is not an `nn.Linear`, ValueError for one whose sizes differ from the target's.
    """
    replacements: list[tuple[str, LoraLinear]] = []
    for path, (target, layer) in base.module_index.items():
        linear = model.get_submodule(path)
        spec = base.targets[target]
        # A subclass may compute something else than the plain product.
        if type(linear) is not nn.Linear:
            raise TypeError(f"{path} is a {type(linear).__name__}, not an nn.Linear")
        if (linear.in_features, linear.out_features) != (spec.in_features, spec.out_features):
            raise ValueError(
                f"{path} is {linear.in_features} → {linear.out_features}, but target {spec.name} "
                f"is {spec.in_features} → {spec.out_features}"
            )
        head = path == base.output_module
        replacements.append((path, LoraLinear(linear, target, layer, binding, head=head)))
    for path, module in replacements:
        model.set_submodule(path, module)
