"""The resident base: loaded through transformers, then given paged attention and LoRA."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from base_engine.attention import (
    ATTENTION,
    STEP,
    AttentionProbe,
    KVShape,
    StepAttention,
    UnsupportedAttention,
)
from base_engine.base_spec import base_spec, text_config
from base_engine.errors import ModelUnsupported
from base_engine.lora_linear import LoraBinding, install_lora
from base_engine.row_layout import RowLayout, learned_layouts

#: Tokens of the trial run: at least a few, and an odd number, which fewer things have.
_PROBE_TOKENS = range(5, 200, 2)
_PROBE_LOGITS = 2


class Decoder:
    """A resident base model: token ids and positions in, logits out.

    `spec` says what adapters can adapt, `kv_shapes` what the KV cache must hold, `layouts` (by
    path) where the modules that see the batch row by row carry its rows, `binding` is where the
    runner puts each step's adapters. Any decoder runs that transformers can load and
    that goes through its attention interface; what would not be computed exactly is refused when
    the model is loaded (ModelUnsupported).
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model = model
        self.device = model.device
        self.dtype = model.dtype
        self.kv_shapes, self.layouts = _probe(model)
        self.spec = base_spec(model, name, self.layouts)
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
        if getattr(loaded, "_hf_peft_config_loaded", False):
            raise ModelUnsupported(
                f"{_public_name(model)} holds an adapter, which transformers put into the base; "
                "a base must be served without: take adapter_config.json out of its folder"
            )
        module: nn.Module = loaded
        module.to(device).eval().requires_grad_(False)
        return cls(loaded, name or _public_name(model))

    def parameter(self, path: str) -> Tensor:
        """The resident parameter of that name in the checkpoint; either name of a tied one.

        It is the base's own memory, never to be written. Raises AttributeError for no such path.
        """
        return self.model.get_parameter(path)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, logit_rows: Tensor, attention: StepAttention
    ) -> Tensor:
        """One pass over a flattened batch.

        input_ids and positions [T] int64, logit_rows [R] indices into T → logits [R, vocab] fp32;
        while a step's terms are attached, vocab is that of the widest adapter among them.
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


def _probe(model: PreTrainedModel) -> tuple[dict[int, KVShape], dict[str, RowLayout]]:
    """Run once to learn each layer's KV sizes and which modules see the batch row by row.

    What is fed anything but all tokens in order (an expert of its own, say) cannot be adapted by
    row segments, so it is not offered to adapters.
    """
    attention = AttentionProbe()
    tokens = _probe_tokens(model)
    ids = torch.arange(tokens, device=model.device) % text_config(model).vocab_size
    rows = torch.arange(_PROBE_LOGITS, device=model.device)
    head = model.get_output_embeddings()
    try:
        with torch.inference_mode(), learned_layouts(model, tokens, head, len(rows)) as layouts:
            logits = _call(model, ids, torch.zeros_like(ids), rows, attention)
    except (UnsupportedAttention, KeyError, TypeError) as error:
        raise ModelUnsupported(f"{type(model).__name__} cannot be served: {error}") from error
    layers = text_config(model).num_hidden_layers
    if len(attention.shapes) != layers or logits.shape[0] != _PROBE_LOGITS:
        raise ModelUnsupported(
            f"{type(model).__name__} cannot be served: {len(attention.shapes)} of its {layers} "
            "layers go through the attention interface"
        )
    return attention.shapes, layouts


def _probe_tokens(model: PreTrainedModel) -> int:
    """A number of tokens that is the size of nothing in the model, so that it tells their rows."""
    taken = {size for parameter in model.parameters() for size in parameter.shape}
    taken |= {v for v in text_config(model).to_dict().values() if isinstance(v, int)}
    return next(count for count in _PROBE_TOKENS if count not in taken)


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for config in (model.generation_config, text_config(model)):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            ids.update(value if isinstance(value, Seq) else [value])
    return frozenset(ids)


def _public_name(model: str | Path) -> str:
    path = Path(model)
    return path.resolve().name if path.exists() else str(model)
