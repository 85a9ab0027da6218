"""A module's own forward with other weights, the module itself left as it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adapters.terms import ParameterDelta, Replacement
from base_engine.lora_linear import LoraBinding


def forward_exchanged(
    module: nn.Module,
    terms: Sequence[Replacement | ParameterDelta],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    binding: LoraBinding | None = None,
) -> Any:
    """What `module` returns for these inputs with its weights replaced and merged as in `terms`.

    A LoraLinear reads `binding` instead of its own. Of a stack of experts, only those that the
    rows are routed to are merged, so that the cost follows the experts used.
    """
    weights: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    for term in terms:
        if isinstance(term, Replacement):
            weights |= term.parameters
    deltas = {term.parameter: term for term in terms if isinstance(term, ParameterDelta)}
    attributes: dict[str, Any] = {} if binding is None else {"binding": binding}
    hit = None
    if deltas and _is_expert_stack(module, args):
        hit, index = torch.unique(args[1], return_inverse=True)
        args = (args[0], index, *args[2:])
        attributes["num_experts"] = len(hit)
        weights = {name: weight[hit] for name, weight in weights.items()}
    for name, delta in deltas.items():
        weights[name] = _merged(weights[name], delta, hit)
    return _twin(module, weights, attributes).forward(*args, **kwargs)


def _is_expert_stack(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether it is called with (hidden states, experts of each token, their weights), as every
    module that transformers' experts interface decorates; those have `is_transposed`."""
    return hasattr(module, "is_transposed") and hasattr(module, "num_experts") and len(args) == 3


def _merged(weight: Tensor, delta: ParameterDelta, hit: Tensor | None) -> Tensor:
    a, b = delta.a.to(weight.dtype), delta.b.to(weight.dtype)
    if hit is not None:
        a, b = a[hit], b[hit]
    left, right = (a.mT, b.mT) if delta.transposed else (b, a)
    stack = weight if weight.ndim == 3 else weight[None]
    return torch.baddbmm(stack, left, right, alpha=delta.scale).view_as(weight)


def _twin(
    module: nn.Module, weights: Mapping[str, Tensor], attributes: Mapping[str, Any]
) -> nn.Module:
    """A shallow copy with these parameters and attributes.

    Not `torch.func.functional_call`: that changes the module for the time of the call, and goes
    through its hooks, from where this is called.
    """
    twin = copy.copy(module)
    vars(twin).update(attributes, _parameters={**vars(module)["_parameters"], **weights})
    return twin
