"""What a base model offers to adapters, and what one adapter is. Pure data: no torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

#: Rank rows in one page of the device pool.
PAGE_RANK = 8

#: The two files that make up an adapter; everything else in an upload is ignored or refused.
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class TargetSpec:
    """One kind of adaptable linear across the layers, such as every layer's `self_attn.q_proj`.

    `modules` holds the full module paths; a module's position in it is its layer index within
    this target. All modules of a target share `in_features` and `out_features`.
    """

    name: str
    in_features: int
    out_features: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class BaseSpec:
    """What the resident base offers: its public name, its sizes and its adaptable linears.

    `output_module` is the head (`lm_head`), which PEFT's "all-linear" leaves out.
    `max_positions` is the context length in tokens. `tied_head`: head and embedding share weights.
    `digest` tells bases apart, also of equal name and sizes; it does not depend on the dtype in
    which they are loaded.

    `embedding` is the path of the input embedding, [vocab_size, hidden]. `parameters` are all
    parameters that can be exchanged for some rows of a batch, by path with their shapes: those of
    leaf modules that see the batch row by row (linears, norms, embeddings, routers, expert
    stacks). `model_type` is transformers' name of the architecture. `fused` maps the path of a
    projection that some bases hold in one piece (`…qkv_proj`, `…gate_up_proj`) to the paths of
    its parts and their output features, in order; either the whole or the parts are modules here.
    `transposed` are the weights of linears among `parameters` that are stored [in, out] (Conv1D),
    and the expert stacks stored [experts, in, out].
    """

    name: str
    vocab_size: int
    max_positions: int
    targets: tuple[TargetSpec, ...]
    output_module: str | None = None
    tied_head: bool = False
    digest: str = ""
    embedding: str = ""
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    model_type: str = ""
    fused: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()

    @cached_property
    def module_index(self) -> dict[str, tuple[int, int]]:
        """Module path -> (index into `targets`, layer index within that target)."""
        return {
            path: (t, layer)
            for t, target in enumerate(self.targets)
            for layer, path in enumerate(target.modules)
        }


@dataclass(frozen=True)
class ModuleLora:
    """The LoRA of one linear: y += scale * (x Aᵀ) Bᵀ, A [rank, in] and B [out, rank].

    Several of one module add up. `b_rows` are the rows of the file's B that are meant (None: all);
    they go to the outputs from `out_start` on: so a fused projection's LoRA is served on its parts,
    and the parts' on the whole.
    """

    module: str
    rank: int
    scale: float
    a_key: str
    b_key: str
    b_rows: tuple[int, int] | None = None
    out_start: int = 0


@dataclass(frozen=True)
class OutputVectors:
    """What one linear's output goes through besides its LoRA; keys of vectors [out] or None.

    `magnitude_key`: DoRA's m, with which y = m / ‖W + scale·BA‖ · (y − bias) + bias, norms per
    output row. `lora_bias_key`: the bias of B, added times the LoRA's scale. `bias_key`: replaces
    the linear's own bias.
    """

    module: str
    magnitude_key: str | None = None
    lora_bias_key: str | None = None
    bias_key: str | None = None


@dataclass(frozen=True)
class EmbeddingLora:
    """The LoRA of an embedding: y += scale * A[:, id] Bᵀ (times the embedding's own factor, if it
    has one), A [rank, vocab] and B [hidden, rank]; `magnitude_key` as for a linear, m [hidden]."""

    module: str
    rank: int
    scale: float
    a_key: str
    b_key: str
    magnitude_key: str | None = None


@dataclass(frozen=True)
class ReplacedParameter:
    """A parameter of the base, by path, that this adapter has a tensor of its own for.

    The tensor has the parameter's shape, but for embedding and head of an adapter with a larger
    vocabulary, which have `AdapterManifest.vocab_size` rows.
    """

    parameter: str
    key: str


@dataclass(frozen=True)
class ParameterLora:
    """The LoRA of a parameter that is no linear's weight: W[e] += scale * B_e A_e for each of
    `experts` (1 for a matrix), with PEFT's layout of `target_parameters`:
    A [experts * rank, in], B [out, rank * experts] (see `peft.tuners.lora.layer.ParamWrapper`).
    `transposed`: the parameter is stored [experts, in, out], so (B_e A_e)ᵀ is added.
    """

    parameter: str
    rank: int
    experts: int
    scale: float
    a_key: str
    b_key: str
    transposed: bool = False


@dataclass(frozen=True)
class TokenRows:
    """Rows `indices` of an embedding, or of a head, that are replaced by the tensor at `key`
    [len(indices), hidden], as PEFT's `trainable_token_indices` does."""

    module: str
    indices: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class AddedToken:
    """A token that an adapter's tokenizer has beyond the base's; flags as in `tokenizers`."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class AdapterManifest:
    """What a validated adapter holds. Filled by `adapters.validation`, stored with its record.

    `digest` is the sha256 of the canonical content (see `adapters.peft_files.content_digest`).
    `base_name` and `base_digest` are the base it was validated for, and answers with;
    `base_model` is what its own config names. `warnings` are things accepted but worth telling
    (ignored files, another base's name).

    `vocab_size` is 0, or the adapter's own number of token ids where it is larger than the base's.
    `invocation` are the tokens from whose last occurrence in the prompt on an activated LoRA
    applies; empty: everywhere. `mapped` pairs the names of tensors that were not taken literally
    with how they were read. `unused` pairs those that need not be applied with the reason.
    `effect` is the largest change of a logit in the smoke check, None before it ran.
    `added_tokens`, `chat_template`, `special_tokens` (its names for them that differ from the
    base's, such as eos_token) and `eos_ids` (tokens that end an answer, beside the base's) are the
    upload's own, kept only where the operator allows it; `tokenizer` tells what was found in its
    tokenizer files.
    """

    digest: str
    modules: tuple[ModuleLora, ...]
    parameters: int
    weights_bytes: int
    dtypes: tuple[str, ...]
    max_rank: int
    base_name: str = ""
    base_digest: str = ""
    base_model: str | None = None
    warnings: tuple[str, ...] = ()
    vectors: tuple[OutputVectors, ...] = ()
    embeddings: tuple[EmbeddingLora, ...] = ()
    replaced: tuple[ReplacedParameter, ...] = ()
    parameter_loras: tuple[ParameterLora, ...] = ()
    token_rows: tuple[TokenRows, ...] = ()
    vocab_size: int = 0
    invocation: tuple[int, ...] = ()
    mapped: tuple[tuple[str, str], ...] = ()
    unused: tuple[tuple[str, str], ...] = ()
    effect: float | None = None
    added_tokens: tuple[AddedToken, ...] = ()
    chat_template: str | None = None
    eos_ids: tuple[int, ...] = ()
    special_tokens: tuple[tuple[str, str], ...] = ()
    tokenizer: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it is LoRA on linears and nothing else: what can be weighted and added up."""
        rare = (self.vectors, self.embeddings, self.replaced, self.parameter_loras)
        return not any((*rare, self.token_rows, self.invocation, self.vocab_size))

    @property
    def speech(self) -> tuple[Any, ...]:
        """All that makes its prompts and answers other tokens than the base's; see `speaks`."""
        return self.added_tokens, self.chat_template, self.special_tokens, self.eos_ids

    @property
    def speaks(self) -> bool:
        """Whether prompts and answers go through a tokenizer or a chat template of its own."""
        return any(self.speech)

    @property
    def adapted(self) -> frozenset[str]:
        """The paths of all modules and parameters that it changes."""
        parts: Iterable[Any] = (*self.modules, *self.vectors, *self.embeddings, *self.token_rows)
        paths = {part.module for part in parts}
        paths |= {part.parameter.removesuffix(".weight") for part in self.replaced}
        return frozenset(paths | {part.parameter for part in self.parameter_loras})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AdapterManifest:
        """Raises KeyError or TypeError if `data` is not what `to_json` makes."""
        read = {name: _PARTS.get(name, _as_is)(value) for name, value in data.items()}
        return cls(**read)


def _as_is(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def read_parts(kind: type, values: Iterable[dict[str, Any]]) -> tuple[Any, ...]:
    """The parts of a manifest, all of one `kind`, back from JSON. Raises TypeError."""
    return tuple(kind(**{k: _as_is(v) for k, v in value.items()}) for value in values)


_PARTS: dict[str, Any] = {
    name: partial(read_parts, kind)
    for name, kind in {
        "modules": ModuleLora,
        "vectors": OutputVectors,
        "embeddings": EmbeddingLora,
        "replaced": ReplacedParameter,
        "parameter_loras": ParameterLora,
        "token_rows": TokenRows,
        "added_tokens": AddedToken,
    }.items()
} | {
    name: lambda pairs: tuple(map(tuple, pairs)) for name in ("mapped", "unused", "special_tokens")
}


@dataclass(frozen=True)
class AdapterRef:
    """An adapter version handed down to the engine: identity is the digest, nothing else.

    `folder` holds the two adapter files; `name` is for messages and metrics only.
    """

    digest: str
    name: str
    folder: Path
    manifest: AdapterManifest


@dataclass(frozen=True)
class WeightedAdapter:
    """One adapter of a request and the factor on its whole effect; only plain adapters may have
    another factor than 1, or company."""

    ref: AdapterRef
    weight: float = 1.0
