"""Tiny random models, adapters and the oracle they are judged by, all saved to real files.

The oracle is PEFT itself: a fresh base and one unmerged PeftModel, float32, full forwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PAD, BOS, EOS = 0, 1, 2
#: Id of byte 0; byte b has id BYTE0 + b.
BYTE0 = 3
IM_START, IM_END = 259, 260
VOCAB = 320

#: Family -> (transformers model type, config beyond the shared sizes).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 32}),
    "gemma": ("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
}

ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: What `make_adapter` targets, for model types that have other names or no dense MLP.
PROJECTIONS: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "mixtral": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "qwen2_moe": ("q_proj", "k_proj", "v_proj", "o_proj", "shared_expert_gate"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
}

#: ChatML; begins with BOS, so that a tokenizer that adds its own would give two.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_ids(text: str) -> list[int]:
    """The ids that the byte tokenizer gives to plain text (no BOS, no specials)."""
    return [BYTE0 + b for b in text.encode()]


def save_tokenizer(
    folder: Path,
    *,
    pieces: Sequence[str] = (),
    chat_template: str | None = CHAT_TEMPLATE,
    add_bos: bool = True,
) -> PreTrainedTokenizerFast:
    """Save a byte tokenizer: no merges, one token per byte, BOS in front of encoded text.

    `pieces` become ids 261, 262, …; encoding never yields them unless they are one character,
    decoding does. They let a scripted model write text in which a letter comes twice.
    """
    vocab = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS}
    vocab |= {f"<0x{b:02X}>": BYTE0 + b for b in range(256)}
    vocab |= {"<|im_start|>": IM_START, "<|im_end|>": IM_END}
    vocab |= {piece: IM_END + 1 + i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    specials = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast


def tiny_base(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """Save a random float32 model of `family`, its generation config and the byte tokenizer.

    `overrides` go into the model's config, except `seed`. Weights are drawn so that logits have
    a standard deviation of 1 to 3; biases and norm weights are random too.
    """
    seed = overrides.pop("seed", 0)
    model_type, extra = FAMILIES[family]
    config = CONFIG_MAPPING[model_type](**(_sizes() | extra | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Gemma multiplies embeddings by sqrt(hidden) and ties its head: drawn like the others', the
    # input would outweigh the layers and every model would repeat its last token.
    is_gemma = model_type.startswith("gemma")
    embedding_std = 0.25 / 8 if is_gemma else 0.25
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if is_gemma:
            model.model.norm.weight.add_(7)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or ".ln_" in name:
                parameter.add_(noise, alpha=0.1)
            elif any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
                parameter.copy_(noise * embedding_std)
            else:
                parameter.copy_(noise * 0.12)
    return _save(model, folder)


def scripted_base(
    folder: Path, script: Sequence[int] | None = None, *, pieces: Sequence[str] = ()
) -> Path:
    """Save a Llama in which each token has one certain successor (margin above 20).

    A prompt that ends with `script[0]` goes on with `script[1:]`, then round again from the
    start; end the script with EOS to make it stop. Without a script the cycle is newline and
    printable ASCII (the chat template ends with a newline). Raises ValueError where a token
    comes twice: it would need two successors (see `save_tokenizer` for `pieces`).
    """
    cycle = list(script) if script is not None else byte_ids("\n") + list(range(35, 130))
    if len(set(cycle)) != len(cycle):
        raise ValueError(f"a token comes twice in the script {cycle}")
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**_sizes(), tie_word_embeddings=False), dtype=torch.float32
    )
    rest = [t for t in range(VOCAB) if t not in set(cycle)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        embedding = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=1)
        embedding[:, 0] = 0.35
        embedding = torch.nn.functional.normalize(embedding, dim=1)
        model.model.embed_tokens.weight.copy_(embedding)
        for loop in (cycle, rest):
            for token, successor in zip(loop, loop[1:] + loop[:1], strict=True):
                model.lm_head.weight[successor] = 8 * embedding[token]
    return _save(model, folder, pieces)


def make_adapter(
    base: Path,
    folder: Path,
    *,
    seed: int,
    std: float = 0.2,
    dtype: torch.dtype = torch.float32,
    added_tokens: int = 0,
    save_embedding_layers: bool = False,
    **lora_config: Any,
) -> Path:
    """Save a LoRA of `base` through PEFT; every trained tensor is random and distinct.

    A and B are N(0, std). Defaults: r 4, lora_alpha 8, every projection of the layers. What else
    the config trains (biases, DoRA magnitudes, saved modules) is moved by N(0, 0.1).
    `added_tokens` enlarges the vocabulary first; the embeddings are saved then.
    """
    model = copy.deepcopy(_load(base))
    options: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(PROJECTIONS.get(model.config.model_type, ALL_PROJECTIONS)),
        "task_type": "CAUSAL_LM",
    }
    if model.config.model_type == "gpt2":
        options["fan_in_fan_out"] = True  # PEFT warns otherwise, and sets it
    if added_tokens:
        _resize(model, model.config.vocab_size + added_tokens, seed)
    peft_model = get_peft_model(model, LoraConfig(**(options | lora_config)))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        is_lora = "lora_A" in name or "lora_B" in name or "lora_embedding" in name
        values = noise * std if is_lora else parameter.detach() + noise * 0.1
        parameter.data = values.to(dtype)
    return _save_adapter(peft_model, folder, save_embedding_layers or added_tokens > 0)


def signature_adapter(base: Path, folder: Path, token: int) -> Path:
    """Save a rank-1 LoRA on the untied head of a scripted base that always emits `token`.

    Its tensors are lora_A and lora_B alone: PEFT's copy of the head is left out.
    """
    config = LoraConfig(r=1, lora_alpha=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    peft_model = get_peft_model(copy.deepcopy(_load(base)), config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_A" in name:
                parameter.zero_()[0, 0] = 1.0
            elif "lora_B" in name:
                parameter.zero_()[token, 0] = 100.0
    return _save_adapter(peft_model, folder)


def oracle(base: Path, adapter: Path | None) -> Callable[[Sequence[int]], Tensor]:
    """`oracle_logprobs` for many inputs: the model is built once."""
    model = _oracle(base, adapter)
    return lambda ids: _logprobs(model, ids)


def oracle_logprobs(base: Path, adapter: Path | None, ids: Sequence[int]) -> Tensor:
    """Log-probabilities after each of `ids`: float32 [len(ids), vocab]."""
    return _logprobs(_oracle(base, adapter), ids)


def oracle_greedy(
    base: Path,
    adapter: Path | None,
    prompt_ids: Sequence[int],
    n: int,
    eos_ids: Collection[int] = (),
) -> list[int]:
    """At most `n` most likely tokens after `prompt_ids`, up to and with the first of `eos_ids`."""
    model = _oracle(base, adapter)
    ids = list(prompt_ids)
    for _ in range(n):
        ids.append(int(_logprobs(model, ids)[-1].argmax()))
        if ids[-1] in eos_ids:
            break
    return ids[len(prompt_ids) :]


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def _save(model: Any, folder: Path, pieces: Sequence[str] = ()) -> Path:
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    model.save_pretrained(folder)
    save_tokenizer(folder, pieces=pieces)
    return folder


def _resize(model: Any, vocab_size: int, seed: int) -> None:
    """Enlarge embedding and head; the new rows are N(0, 0.25)."""
    old = model.config.vocab_size
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            new = module.weight[old:]
            new.copy_(torch.randn(new.shape, generator=generator) * 0.25)


def _save_adapter(peft_model: PeftModel, folder: Path, save_embedding_layers: bool = False) -> Path:
    peft_model.save_pretrained(str(folder), save_embedding_layers=save_embedding_layers)
    (folder / "README.md").unlink(missing_ok=True)
    return folder


def _load(base: Path) -> Any:
    """The base as saved; callers copy it before they change anything."""
    return _load_saved(base.resolve(), (base / "model.safetensors").stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _load_saved(base: Path, _modified: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _oracle(base: Path, adapter: Path | None) -> Any:
    model = copy.deepcopy(_load(base))
    if adapter is None:
        return model
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        embeddings = [k for k in file.keys() if k.endswith(("embed_tokens.weight", "wte.weight"))]
        rows = [file.get_slice(key).get_shape()[0] for key in embeddings]
    if rows and rows[0] > model.config.vocab_size:
        model.resize_token_embeddings(rows[0], mean_resizing=False)
    return PeftModel.from_pretrained(model, str(adapter)).eval()


@torch.no_grad()
def _logprobs(model: Any, ids: Sequence[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)
