"""What a manifest says, applied to the base's weights at once: the slow and simple way.

A linear change of a weight can be folded into it, so an adapter that is not activated by tokens is
a dense model. What the manifest means is right if that model agrees with PEFT's.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from adapters.manifest import WEIGHTS_FILE, AdapterManifest


def dense_logprobs(base: Path, folder: Path, manifest: AdapterManifest, ids: list[int]) -> Tensor:
    """Log-probabilities [len(ids), vocab] of the base with the adapter folded in."""
    model = _load(base, manifest.vocab_size)
    tensors = load_file(folder / WEIGHTS_FILE)
    with torch.no_grad():
        _untie(model)
        _fold(model, manifest, {name: tensor.float() for name, tensor in tensors.items()})
    return _logprobs(model, ids)


def peft_logprobs(base: Path, folder: Path, vocab_size: int, ids: list[int]) -> Tensor:
    """Those of PEFT, on a base that was resized to `vocab_size` (0: not) before."""
    return _logprobs(PeftModel.from_pretrained(_load(base, vocab_size), str(folder)).eval(), ids)


def base_logprobs(base: Path, ids: list[int]) -> Tensor:
    return _logprobs(_load(base, 0), ids)


def _load(base: Path, vocab_size: int) -> Any:
    model = copy.deepcopy(_load_once(base))
    if vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model.eval()


@lru_cache(maxsize=8)
def _load_once(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )


def _untie(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.clone())


def _fold(model: Any, manifest: AdapterManifest, tensors: dict[str, Tensor]) -> None:
    for own in manifest.replaced:
        model.get_parameter(own.parameter).copy_(tensors[own.key])
    for rows in manifest.token_rows:
        model.get_submodule(rows.module).weight[list(rows.indices)] = tensors[rows.key]
    for lora in manifest.modules:
        module = model.get_submodule(lora.module)
        b = tensors[lora.b_key][slice(*(lora.b_rows or (None,)))]
        delta = lora.scale * b @ tensors[lora.a_key]
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        weight[lora.out_start : lora.out_start + len(b)] += delta
    _fold_parameters(model, manifest, tensors)
    for embedded in manifest.embeddings:
        weight = model.get_submodule(embedded.module).weight
        weight += embedded.scale * (tensors[embedded.b_key] @ tensors[embedded.a_key]).T
        if embedded.magnitude_key:
            weight *= tensors[embedded.magnitude_key] / weight.norm(dim=0)
    _fold_vectors(model, manifest, tensors)


def _fold_parameters(model: Any, manifest: AdapterManifest, tensors: dict[str, Tensor]) -> None:
    for delta_lora in manifest.parameter_loras:
        parameter = model.get_parameter(delta_lora.parameter)
        rank, experts = delta_lora.rank, delta_lora.experts
        a = tensors[delta_lora.a_key].view(experts, rank, -1)
        b = tensors[delta_lora.b_key].view(-1, rank, experts).permute(2, 0, 1)
        change = delta_lora.scale * (b @ a)
        change = change.transpose(1, 2) if delta_lora.transposed else change
        parameter += change.view(parameter.shape)


def _fold_vectors(model: Any, manifest: AdapterManifest, tensors: dict[str, Tensor]) -> None:
    scales = {lora.module: lora.scale for lora in manifest.modules}
    for vectors in manifest.vectors:
        module = model.get_submodule(vectors.module)
        if vectors.magnitude_key:
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            weight *= (tensors[vectors.magnitude_key] / weight.norm(dim=1))[:, None]
        if vectors.bias_key:
            module.bias.copy_(tensors[vectors.bias_key])
        if vectors.lora_bias_key:
            bias = torch.zeros(1) if module.bias is None else module.bias
            shifted = bias + scales[vectors.module] * tensors[vectors.lora_bias_key]
            module.bias = nn.Parameter(shifted)


@torch.no_grad()
def _logprobs(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)
