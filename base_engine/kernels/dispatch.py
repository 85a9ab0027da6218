"""The only place that picks an implementation of `add_lora`."""

from __future__ import annotations

from torch import Tensor

from base_engine.kernels.cpu import add_lora_cpu
from base_engine.kernels.segments import TargetSegments


def add_lora(y: Tensor, x: Tensor, buffer: Tensor, target: TargetSegments, layer: int) -> None:
    """Adds every row's LoRA to y in place; see `reference.add_lora_reference` for the semantics.

    y [T, out_features] and x [T, in_features] on the buffer's device, last dimension contiguous.
    Raises ValueError if the shapes do not fit the target or the segments reach past the rows.
    """
    spec = target.spec
    if x.shape != (len(y), spec.in_features) or y.shape[1] != spec.out_features:
        raise ValueError(
            f"{spec.name} takes x [rows, {spec.in_features}] and y [rows, {spec.out_features}], "
            f"not {list(x.shape)} and {list(y.shape)}"
        )
    if target.end > len(x):
        raise ValueError(f"segments reach row {target.end}, but there are {len(x)} rows")
    if y.is_cuda:
        # Triton is needed, and there to be imported, only where a CUDA tensor arrives.
        from base_engine.kernels.triton_sgmv import add_lora_triton

        add_lora_triton(y, x, buffer, target, layer)
    else:
        add_lora_cpu(y, x, buffer, target, layer)
