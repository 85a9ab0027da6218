"""The resident base: loaded through transformers, then given paged attention and LoRA."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from adapters.manifest import BaseSpec, TargetSpec
from base_engine.attention import (
    ATTENTION,
    STEP,
    AttentionProbe,
    KVShape,
    StepAttention,
    UnsupportedAttention,
)
from base_engine.errors import ModelUnsupported
from base_engine.lora_linear import LoraBinding, install_lora

log = logging.getLogger(__name__)

#: Rotary embeddings whose frequencies depend on the longest sequence of the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")

_PROBE_TOKENS = 5
_PROBE_LOGITS = 2

#: Values of each parameter that a base is told by.
_SIGNS = 4096


class Decoder:
    """A resident base model: token ids and positions in, logits out.

    `spec` says what adapters can adapt, `kv_shapes` what the KV cache must hold, `binding` is
    where the runner puts each step's adapters. Any decoder runs that transformers can load and
    that goes through its attention interface; what would not be computed exactly is refused when
    the model is loaded (ModelUnsupported).
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        self.kv_shapes, adaptable = _probe(model)
        self.spec = _base_spec(model, name, adaptable)
        self.eos_ids = _eos_ids(model)
        self.binding = LoraBinding(torch.empty(0))
        install_lora(model, self.spec, self.binding)

    @classmethod
    def load(cls, model: str | Path, *, name: str | None, dtype: str, device: str) -> Decoder:
        """Load `model` (a folder or a Hugging Face id) in `dtype` onto `device`.

        Raises ModelUnsupported, or OSError/ValueError as transformers does for a bad path or id.
        """
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        loaded = AutoModelForCausalLM.from_pretrained(
            model,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation=ATTENTION,
            trust_remote_code=False,
        )
        module: nn.Module = loaded
        module.to(device).eval().requires_grad_(False)
        return cls(loaded, name or _public_name(model))

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor, attention: StepAttention
    ) -> Tensor:
        """One pass over a flattened batch.

        input_ids and positions [T] int64, logit_rows [R] indices into T → logits [R, vocab] fp32.
        """
        return _call(self.model, input_ids, positions, logit_rows, attention)


def _call(
    model: PreTrainedModel,
    input_ids: Tensor,
    positions: Tensor,
    logit_rows: Tensor,
    attention: StepAttention | AttentionProbe,
) -> Tensor:
    output = model(
        input_ids=input_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logit_rows,
        **{STEP: attention},
    )
    logits: Tensor = output.logits[0].float()
    return logits


def _probe(model: PreTrainedModel) -> tuple[dict[int, KVShape], set[str]]:
    """Run once to learn each layer's KV sizes and which linears see the batch row by row.

    A linear that is fed anything but all tokens in order (an expert, say) cannot be adapted by
    row segments, so it is not offered to adapters.
    """
    attention = AttentionProbe()
    adaptable: set[str] = set()
    hooks = []
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if type(module) is nn.Linear:
            tokens = _PROBE_LOGITS if module is head else _PROBE_TOKENS
            expected = (1, tokens, module.in_features)

            def note(
                _: nn.Module,
                args: tuple[Tensor, ...],
                path: str = path,
                expected: tuple[int, ...] = expected,
            ) -> None:
                if tuple(args[0].shape) == expected:
                    adaptable.add(path)
                else:
                    adaptable.discard(path)

            hooks.append(module.register_forward_pre_hook(note))
    ids = torch.arange(_PROBE_TOKENS, device=model.device) % _text_config(model).vocab_size
    rows = torch.arange(_PROBE_LOGITS, device=model.device)
    try:
        with torch.inference_mode():
            logits = _call(model, ids, torch.zeros_like(ids), rows, attention)
    except (UnsupportedAttention, KeyError, TypeError) as error:
        raise ModelUnsupported(f"{type(model).__name__} cannot be served: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    layers = _text_config(model).num_hidden_layers
    if len(attention.shapes) != layers or logits.shape[0] != _PROBE_LOGITS:
        raise ModelUnsupported(
            f"{type(model).__name__} cannot be served: {len(attention.shapes)} of its {layers} "
            "layers go through the attention interface"
        )
    return attention.shapes, adaptable


def _base_spec(model: PreTrainedModel, name: str, adaptable: set[str]) -> BaseSpec:
    groups: dict[tuple[str, int, int], list[str]] = {}
    head = model.get_output_embeddings()
    head_path = None
    for path, module in model.named_modules():
        if module is head:
            head_path = path
        if path in adaptable and isinstance(module, nn.Linear):
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", path)
            key = (pattern, module.in_features, module.out_features)
            groups.setdefault(key, []).append(path)
    targets = tuple(
        TargetSpec(pattern.rpartition("*.")[2], in_features, out_features, tuple(paths))
        for (pattern, in_features, out_features), paths in groups.items()
    )
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    return BaseSpec(
        name=name,
        vocab_size=embedding.shape[0],
        max_positions=_max_positions(_text_config(model)),
        targets=targets,
        output_module=head_path,
        tied_head=head is not None and head.weight is embedding,
        digest=_digest(model),
    )


def _digest(model: PreTrainedModel) -> str:
    """Hex sha256 of the signs of up to _SIGNS values spread over each parameter.

    Signs are the same in every dtype; and any training flips many of those near zero.
    """
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(f"{name} {list(parameter.shape)}\n".encode())
        stride = max(1, parameter.numel() // _SIGNS)
        signs = torch.signbit(parameter.flatten()[::stride][:_SIGNS])
        found.update(np.packbits(signs.cpu().numpy()).tobytes())
    return found.hexdigest()


def _max_positions(config: PretrainedConfig) -> int:
    limit: int = config.max_position_embeddings
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
    for parameters in kinds:
        if parameters.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            original: int = (
                parameters.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or limit
            )
            if original < limit:
                log.warning(
                    "rope type %r changes with the longest sequence of a batch; the context is "
                    "limited to the original %d tokens, where it does not",
                    parameters["rope_type"],
                    original,
                )
            limit = min(limit, original)
    return limit


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for config in (model.generation_config, _text_config(model)):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            ids.update(value if isinstance(value, Seq) else [value])
    return frozenset(ids)


def _text_config(model: PreTrainedModel) -> PretrainedConfig:
    config: PretrainedConfig = model.config.get_text_config(decoder=True)
    return config


def _public_name(model: str | Path) -> str:
    path = Path(model)
    return path.resolve().name if path.exists() else str(model)
