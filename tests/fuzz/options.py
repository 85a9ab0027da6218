"""Options of PEFT's LoraConfig, as a strategy of hypothesis: all that goes together in PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.features import INVOCATION
from tests.tiny import ALL_PROJECTIONS, FAMILIES, PROJECTIONS

#: `make_adapter`'s keywords.
Options = dict[str, Any]


@dataclass(frozen=True)
class Names:
    """What a family calls its parts; `layer` is the path of layer 0."""

    layer: str
    embedding: str
    saved: tuple[str, ...]
    groups: tuple[str, ...]

    @property
    def places(self) -> dict[str, str]:
        """Each projection's path within a layer."""
        attention, mlp = self.groups
        inner = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "c_fc")
        leaves = {*ALL_PROJECTIONS, *PROJECTIONS["phi3"], *PROJECTIONS["gpt2"]}
        return {leaf: f"{mlp if leaf in inner else attention}.{leaf}" for leaf in leaves}


_LLAMA = Names(
    "model.layers.0",
    "embed_tokens",
    ("lm_head", "embed_tokens", "input_layernorm", "norm", "mlp", "q_proj"),
    ("self_attn", "mlp"),
)
NAMES = {
    "llama": _LLAMA,
    "llama-tied": _LLAMA,
    "llama-bias": _LLAMA,
    "qwen3": Names(
        "model.layers.0", "embed_tokens", (*_LLAMA.saved, "q_norm"), ("self_attn", "mlp")
    ),
    "gemma2": Names(
        "model.layers.0",
        "embed_tokens",
        ("lm_head", "embed_tokens", "post_feedforward_layernorm", "norm", "mlp"),
        ("self_attn", "mlp"),
    ),
    "phi3": Names(
        "model.layers.0",
        "embed_tokens",
        ("lm_head", "embed_tokens", "input_layernorm", "norm", "mlp"),
        ("self_attn", "mlp"),
    ),
    "gpt2": Names(
        "transformer.h.0", "wte", ("lm_head", "wte", "ln_1", "ln_f", "mlp"), ("attn", "mlp")
    ),
}


@st.composite
def options(draw: st.DrawFn, family: str) -> Options:
    """Options for `family`: each feature once in a while, ranks mostly small."""
    names = NAMES[family]
    found: Options = {
        "seed": draw(st.integers(0, 1000)),
        "r": draw(st.integers(1, 16) | st.sampled_from([1, 2, 7, 8, 9, 31, 64, 100, 256])),
        "lora_alpha": draw(st.sampled_from([1, 2, 3.5, 8, 16])),
        "use_rslora": draw(st.booleans()),
        "init_lora_weights": draw(st.sampled_from([True, False, "gaussian", "orthogonal"])),
    }
    if found["init_lora_weights"] == "orthogonal":
        found["r"] += found["r"] % 2
    found["std"] = 0.2 if found["r"] <= 16 else 0.05
    found |= draw(_targets(family))
    for feature in draw(st.lists(st.sampled_from(sorted(_FEATURES)), max_size=3, unique=True)):
        found |= _FEATURES[feature](draw, family, names, found)
    return found


@st.composite
def _targets(draw: st.DrawFn, family: str) -> Options:
    """`target_modules` in each of its forms."""
    names = NAMES[family]
    leaves = PROJECTIONS.get(FAMILIES[family][0], ALL_PROJECTIONS)
    chosen = draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=4, unique=True))
    stack = names.layer.rpartition(".")[0]
    layer = stack.replace(".", r"\.")
    form = draw(st.sampled_from(["names"] * 4 + ["pattern", "paths", "all", "group", "ends"]))
    if form == "pattern":
        found = rf"{layer}\.(0|1)\..*\.({'|'.join(chosen)})"
        return {"target_modules": draw(st.sampled_from([found, rf".*\.1\..*({chosen[0]})"]))}
    if form == "paths":
        return {"target_modules": [f"{stack}.{draw(st.integers(0, 1))}.{names.places[chosen[0]]}"]}
    if form == "all":
        return {"target_modules": draw(st.sampled_from(["all-linear", "ALL-linear"]))}
    if form == "ends":
        extra = draw(
            st.sampled_from([[names.embedding], ["lm_head"], [names.embedding, "lm_head"]])
        )
        return {"target_modules": [*draw(st.sampled_from([[], chosen])), *extra]}
    if form == "group":
        group = draw(st.sampled_from(names.groups))
        return {"target_modules": rf".*\.{group}\.[a-z_]*"}
    return {"target_modules": chosen}


def _layers(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    if isinstance(found["target_modules"], str):
        return {}
    stack = names.layer.split(".")[1]
    patterns = [None, stack, [stack], [stack, "blocks"]]
    return {
        "layers_to_transform": draw(st.sampled_from([0, 1, [0], [1], [0, 1]])),
        "layers_pattern": draw(st.sampled_from(patterns)),
    }


def _excluded(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    leaf = PROJECTIONS.get(FAMILIES[family][0], ALL_PROJECTIONS)[0]
    values = [[leaf], rf".*\.0\..*{leaf}", [f"{names.layer}.mlp"], r".*\.1\..*", ["lm_head"]]
    return {"exclude_modules": draw(st.sampled_from(values))}


def _patterns(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    leaves = PROJECTIONS.get(FAMILIES[family][0], ALL_PROJECTIONS)
    keys = st.sampled_from(
        [*leaves, names.layer, rf"{names.layer}.*{leaves[0]}", rf".*\.1\..*{leaves[-1]}", "proj"]
        + [f"{group}.{leaf}" for group in names.groups for leaf in leaves[:2]]
        + ["lm_head", names.embedding, rf"^{names.layer}", r".*(0|1).*"]
    )
    ranks = st.dictionaries(keys, st.integers(1, 20), max_size=3)
    return {
        "rank_pattern": draw(ranks),
        "alpha_pattern": draw(st.dictionaries(keys, st.sampled_from([1, 4, 9.5]), max_size=3)),
    }


def _saved(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    some = st.lists(st.sampled_from(names.saved), min_size=1, max_size=2, unique=True)
    return {"modules_to_save": draw(some)}


def _tokens(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    rows = st.lists(st.sampled_from([0, 3, 35, 60, 75, 100, 319]), min_size=1, unique=True)
    form = draw(st.sampled_from(["list", "embedding", "head", "both"]))
    if form == "list":
        return {"trainable_token_indices": draw(rows)}
    ends = {"embedding": [names.embedding], "head": ["lm_head"]}
    chosen = ends.get(form, [names.embedding, "lm_head"])
    return {"trainable_token_indices": {name: draw(rows) for name in chosen}}


def _variant(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    some = [{"use_dora": True}, {"lora_bias": True}]
    return draw(st.sampled_from([*some, {"alora_invocation_tokens": list(INVOCATION)}]))


def _bias(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    return {"bias": draw(st.sampled_from(["all", "lora_only"]))}


def _vocabulary(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    return {"added_tokens": draw(st.integers(1, 9))}


def _copies(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    return {"save_embedding_layers": True}


def _dtype(draw: st.DrawFn, family: str, names: Names, found: Options) -> Options:
    return {"dtype": draw(st.sampled_from([torch.float16, torch.bfloat16]))}


_FEATURES = {
    "bias": _bias,
    "copies": _copies,
    "dtype": _dtype,
    "excluded": _excluded,
    "layers": _layers,
    "patterns": _patterns,
    "saved": _saved,
    "tokens": _tokens,
    "variant": _variant,
    "vocabulary": _vocabulary,
}
