"""A PeftModel in memory as the resident adapter that it should be, its terms worked out anew."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import layer as lora
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch import Tensor, nn

from adapters.manifest import BaseSpec
from adapters.pages import ResidentAdapter
from adapters.terms import (
    Affine,
    EmbeddingDelta,
    ParameterDelta,
    ReplacedRows,
    Replacement,
    Term,
    mapped,
)
from base_engine.model import Decoder
from tests.base_engine.workload import Dense, Layout

NAME = "default"


def random_peft(
    base: Any,
    seed: int,
    *,
    vocab_size: int = 0,
    retrained: Collection[str] = (),
    **lora_config: Any,
) -> Any:
    """A PeftModel over `base` (which it takes over) whose trained tensors are all random.

    `vocab_size`: embedding and head are first resized to it, with random rows, as a trainer that
    adds tokens does. `retrained`: the weights of these modules are first moved, as those below
    the LoRA of an embedding or head are that were saved with it.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in base.named_modules():
        if name.rpartition(".")[2] in retrained:
            module.weight.data += 0.05 * torch.randn(module.weight.shape, generator=generator)
    if vocab_size:
        base.resize_token_embeddings(vocab_size, mean_resizing=False)
        for module in {base.get_input_embeddings(), base.get_output_embeddings()}:
            module.weight.data += 0.05 * torch.randn(module.weight.shape, generator=generator)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**(options | lora_config)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            is_lora = any(part in name for part in ("lora_A", "lora_B", "lora_embedding"))
            parameter.data = noise * 0.2 if is_lora else parameter.detach() + noise * 0.1
    return model.eval()


def resident(model: Any, decoder: Decoder, layout: Layout) -> ResidentAdapter:
    """Its LoRA in the layout's pages; everything else as terms, from PEFT's tensors alone."""
    spec = decoder.spec
    modules = {name: module for name, module in model.base_model.model.named_modules() if name}
    base = _base_parameters(modules, decoder)
    pages: dict[tuple[int, int], Dense] = {}
    terms: dict[str, list[Term]] = {}
    vectors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, tensor in base.items():
        path, _, own = name.rpartition(".")
        if _differ(decoder.parameter(name), tensor) and not (
            path in spec.module_index and own == "bias"
        ):
            terms.setdefault(path, []).append(Replacement({own: tensor}))
    for name, module in modules.items():
        path = name.replace(".base_layer", "").replace(".token_adapter", "")
        if type(module) is lora.Linear:
            a, b, scale = *_sides(module.lora_A, module.lora_B), module.scaling[NAME]
            target = spec.module_index[path]
            if len(b) == spec.targets[target[0]].out_features:
                pages[target] = Dense(a, b, scale)
            else:
                delta = ParameterDelta("weight", scale, False, a[None], b[None])
                terms.setdefault(path, []).append(delta)
            vectors[path] = _vectors(module, a, b, scale)
        elif (term := _term(path, module, spec)) is not None:
            terms.setdefault(path, []).append(term)
    for path in spec.module_index:
        if (affine := _affine(path, base, vectors.get(path), decoder)) is not None:
            terms.setdefault(path, []).append(affine)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return replace(
        layout.add_dense(pages),
        terms={p: tuple(mapped(t, Tensor.detach) for t in found) for p, found in terms.items()},
        vocab_size=vocab_size if vocab_size > spec.vocab_size else 0,
    )


def _term(path: str, module: Any, spec: BaseSpec) -> Term | None:
    if isinstance(module, lora.Embedding):
        a, b = (side[NAME] for side in (module.lora_embedding_A, module.lora_embedding_B))
        scale, gain = module.scaling[NAME], None
        if module.use_dora[NAME]:
            norm = (module.get_base_layer().weight.T + scale * b @ a).norm(dim=1)
            gain = module.lora_magnitude_vector[NAME].weight / norm
        return EmbeddingDelta(scale, a.T.contiguous(), b.T.contiguous(), gain)
    if isinstance(module, lora.ParamWrapper):
        a, b = _sides(module.lora_A, module.lora_B)
        a = a.view(module.num_experts, -1, a.shape[1])
        b = b.view(len(b), -1, module.num_experts).permute(2, 0, 1)
        transposed = f"{path}.{module.parameter_name}" in spec.transposed
        return ParameterDelta(module.parameter_name, module.scaling[NAME], transposed, a, b)
    if isinstance(module, TrainableTokensLayer):
        rows = module.trainable_tokens_delta[NAME]
        return ReplacedRows(tuple(module.token_indices[NAME]), rows)
    return None


def _affine(
    path: str,
    base: dict[str, Tensor],
    vectors: tuple[Tensor, Tensor] | None,
    decoder: Decoder,
) -> Affine | None:
    none = torch.zeros(1)
    gain, extra = vectors or (torch.ones(1), none)
    bias = f"{path}.bias"
    old = decoder.parameter(bias) if bias in base else none
    shift = base.get(bias, none) + extra - gain * old
    if bool((gain == 1).all()) and bool((shift == 0).all()):
        return None
    target, _ = decoder.spec.module_index[path]
    width = max(decoder.spec.targets[target].out_features, len(shift))
    return Affine(gain.expand(width), shift.expand(width))


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or not torch.equal(one, other)


def _sides(*sides: Any) -> tuple[Tensor, ...]:
    return tuple(side[NAME].weight.detach() for side in sides)


def _vectors(module: Any, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What the output is multiplied by, and what is added."""
    gain, extra = torch.ones(1), torch.zeros(1)
    if module.use_dora[NAME]:
        weight = module.get_base_layer().weight
        weight = weight.T if module.fan_in_fan_out else weight
        gain = module.lora_magnitude_vector[NAME].weight / (weight + scale * b @ a).norm(dim=1)
    if module.lora_bias[NAME]:
        extra = scale * module.lora_B[NAME].bias
    return gain, extra


def _base_parameters(modules: dict[str, nn.Module], decoder: Decoder) -> dict[str, Tensor]:
    """The parameters of the base as the PeftModel has them, by the base's own names."""
    found: dict[str, Tensor] = {}
    for name, module in modules.items():
        if any(part in name for part in ("lora_", "original_module", "trainable_tokens")):
            continue
        for own, tensor in module.named_parameters(recurse=False):
            path = name.replace(".base_layer", "").replace(f".modules_to_save.{NAME}", "")
            path = path.replace(".token_adapter", "")
            if (key := f"{path}.{own}") in decoder.spec.parameters:
                found[key] = tensor.detach()
    return found
