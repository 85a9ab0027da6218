"""What a base model offers to adapters, and what one adapter is. Pure data: no torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
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
    """

    name: str
    vocab_size: int
    max_positions: int
    targets: tuple[TargetSpec, ...]
    output_module: str | None = None
    tied_head: bool = False
    digest: str = ""

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
    """The LoRA of one module: y += scale * (x Aᵀ) Bᵀ, A [rank, in] and B [out, rank]."""

    module: str
    rank: int
    scale: float
    a_key: str
    b_key: str


@dataclass(frozen=True)
class AdapterManifest:
    """What a validated adapter holds. Filled by `adapters.validation`, stored with its record.

    `digest` is the sha256 of the canonical content (see `adapters.peft_files.content_digest`).
    `base_name` and `base_digest` are the base it was validated for, and answers with;
    `base_model` is what its own config names. `warnings` are things accepted but worth telling
    (ignored files, another base's name).
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> AdapterManifest:
        modules = tuple(ModuleLora(**m) for m in data["modules"])
        rest = {k: v for k, v in data.items() if k not in ("modules", "dtypes", "warnings")}
        return cls(
            modules=modules,
            dtypes=tuple(data["dtypes"]),
            warnings=tuple(data["warnings"]),
            **rest,
        )


@dataclass(frozen=True)
class AdapterRef:
    """An adapter version handed down to the engine: identity is the digest, nothing else.

    `folder` holds the two adapter files; `name` is for messages and metrics only.
    """

    digest: str
    name: str
    folder: Path
    manifest: AdapterManifest
