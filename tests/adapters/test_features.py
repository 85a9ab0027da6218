"""Every feature of PEFT's LoRA is described as PEFT loads it, or refused when a part is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adapters.errors import AdapterRejected
from adapters.manifest import WEIGHTS_FILE, AdapterManifest
from adapters.validation import Limits, validate
from tests.adapters.dense import base_logprobs, dense_logprobs, peft_logprobs
from tests.adapters.lora_files import edit_weights, parameters_of, spec_of
from tests.tiny import make_adapter, tiny_base

# PEFT advises against most of what is tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]

IDS = [1, 5, 9, 77, 200, 3, 64, 310, 5, 17, 41, 2]


@dataclass(frozen=True)
class Feature:
    """A base of some family, and the options of an adapter on it."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    ids: tuple[int, ...] = ()


QV = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FEATURES = {
    "dora": Feature("llama", {"use_dora": True}),
    "dora on linears with biases": Feature("llama-bias", {"use_dora": True}),
    "dora on conv1d": Feature("gpt2", {"use_dora": True}),
    "dora on an embedding": Feature(
        "llama",
        {"target_modules": ["embed_tokens"], "use_dora": True, "save_embedding_layers": False},
    ),
    "dora on an embedding that is saved too": Feature(
        "gpt2", {"target_modules": ["wte"], "use_dora": True, "save_embedding_layers": True}
    ),
    "dora on a tied head": Feature("llama-tied", {"target_modules": ["lm_head"], "use_dora": True}),
    "dora with trained biases": Feature("llama-bias", {"use_dora": True, "bias": "all"}),
    "dora on fused projections": Feature("phi3", {"use_dora": True}),
    "lora_bias": Feature("llama", {"target_modules": QV, "lora_bias": True}),
    "lora_bias beside biases": Feature("llama-bias", {"lora_bias": True, "bias": "lora_only"}),
    "bias all": Feature("llama-bias", {"target_modules": QV, "bias": "all"}),
    "bias lora_only": Feature("llama-bias", {"target_modules": QV, "bias": "lora_only"}),
    "bias all without biases": Feature("llama", {"target_modules": QV, "bias": "all"}),
    "bias all with layer norms": Feature("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "bias all beside a saved linear": Feature(
        "llama-bias", {"target_modules": QV, "bias": "all", "modules_to_save": ["k_proj"]}
    ),
    "bias all beside a saved norm": Feature(
        "gpt2", {"target_modules": ["c_attn"], "bias": "all", "modules_to_save": ["ln_f"]}
    ),
    "embedding and head": Feature(
        "llama", {"target_modules": ["embed_tokens", "lm_head"], "save_embedding_layers": True}
    ),
    "embedding and head, tied": Feature(
        "llama-tied", {"target_modules": ["embed_tokens", "lm_head"], "save_embedding_layers": True}
    ),
    "embedding of gemma": Feature("gemma", {"target_modules": ["embed_tokens", "q_proj"]}),
    "saved head": Feature("llama", {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "saved head and embedding": Feature(
        "llama", {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}
    ),
    "saved head and embedding, tied": Feature(
        "llama-tied", {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}
    ),
    "saved embedding, tied": Feature(
        "llama-tied", {"target_modules": QV, "modules_to_save": ["embed_tokens"]}
    ),
    "saved norms": Feature("llama", {"target_modules": QV, "modules_to_save": ["input_layernorm"]}),
    "saved by the end of a name": Feature(
        "llama", {"target_modules": QV, "modules_to_save": ["norm", "score"]}
    ),
    "saved mlp": Feature("llama", {"target_modules": QV, "modules_to_save": ["mlp"]}),
    "saved instead of adapted": Feature("llama", {"modules_to_save": ["q_proj", "mlp"]}),
    "token rows": Feature("llama", {"target_modules": QV, "trainable_token_indices": [5, 3, 310]}),
    "token rows, tied": Feature(
        "llama-tied", {"target_modules": QV, "trainable_token_indices": [5, 3, 310]}
    ),
    "token rows of both": Feature(
        "llama",
        {
            "target_modules": QV,
            "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [7]},
        },
    ),
    "token rows of both, tied": Feature(
        "llama-tied",
        {
            "target_modules": QV,
            "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [7]},
        },
    ),
    "equal token rows of both, tied": Feature(
        "llama-tied",
        {
            "target_modules": QV,
            "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [3, 5]},
        },
    ),
    "token rows of gpt2": Feature(
        "gpt2", {"target_modules": ["c_attn"], "trainable_token_indices": [3, 5]}
    ),
    "token rows of gemma": Feature(
        "gemma", {"target_modules": QV, "trainable_token_indices": [3, 5]}
    ),
    "added tokens": Feature("llama", {"target_modules": QV, "added_tokens": 4}, (321, 323)),
    "added tokens, tied": Feature(
        "llama-tied", {"target_modules": QV, "added_tokens": 4}, (321, 323)
    ),
    "added tokens, saved": Feature(
        "llama",
        {"target_modules": QV, "added_tokens": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
        (320, 323),
    ),
    "added tokens and a saved tied head": Feature(
        "llama-tied",
        {"target_modules": QV, "added_tokens": 4, "modules_to_save": ["lm_head"]},
        (320, 323),
    ),
    "bias all within a saved mlp": Feature(
        "llama-bias", {"target_modules": QV, "bias": "all", "modules_to_save": ["mlp"]}
    ),
    "added token rows": Feature(
        "llama",
        {"target_modules": QV, "added_tokens": 4, "trainable_token_indices": [3, 321]},
        (321, 323),
    ),
    "added token rows, tied": Feature(
        "llama-tied",
        {"target_modules": QV, "added_tokens": 4, "trainable_token_indices": [3, 321]},
        (321, 323),
    ),
    "added tokens and LoRA of a tied embedding": Feature(
        "llama-tied", {"target_modules": ["q_proj", "embed_tokens"], "added_tokens": 4}, (322,)
    ),
    "conv1d": Feature("gpt2", {"fan_in_fan_out": True}),
    "experts": Feature("mixtral", {"target_modules": QV, "target_parameters": EXPERTS}),
    "one of the experts' parameters": Feature(
        "mixtral", {"target_modules": [], "target_parameters": EXPERTS[1:]}
    ),
    "experts of equal shapes and a router": Feature(
        "qwen3-moe",
        {
            "target_modules": QV,
            "target_parameters": ["mlp.gate.weight", *EXPERTS],
            "rank_pattern": {"experts.down_proj": 2, "q_proj": 3},
            "alpha_pattern": {".*gate_up_proj": 5},
            "use_rslora": True,
        },
    ),
    "experts of square parameters": Feature(
        "square-moe", {"target_modules": QV, "target_parameters": ["gate_up_proj", "down_proj"]}
    ),
    "experts beside shared ones": Feature(
        "qwen2-moe", {"target_modules": ["gate_proj", "down_proj"], "target_parameters": EXPERTS}
    ),
    "experts by their old names": Feature(
        "mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}
    ),
    "all linears of a model with experts": Feature("qwen3-moe", {"target_modules": "all-linear"}),
    "weights of linears": Feature(
        "llama",
        {
            "target_modules": ["v_proj"],
            "target_parameters": ["q_proj.weight", "lm_head.weight"],
            "rank_pattern": {"q_proj.weight": 2, "v_proj": 3},
        },
    ),
    "weight of an embedding": Feature(
        "llama-tied", {"target_modules": None, "target_parameters": ["embed_tokens.weight"]}
    ),
    "targets less some": Feature(
        "llama",
        {"exclude_modules": ["k_proj", "lm_head"], "layers_to_transform": [1]},
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64}
    made = {
        f: tiny_base(root / f, f)
        for f in {feature.family for feature in FEATURES.values()} - {"square-moe"}
    }
    # down_proj [experts, 64, 64] and gate_up_proj [experts, 128, 64]: B alone tells them apart.
    return made | {"square-moe": tiny_base(root / "square", "qwen3-moe", **sizes)}


@pytest.fixture(scope="module", params=FEATURES)
def made(
    request: pytest.FixtureRequest,
    bases: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Feature, Path, Path]]:
    """A feature, its base and an adapter that has it."""
    feature = FEATURES[request.param]
    folder = tmp_path_factory.mktemp("adapter")
    base = bases[feature.family]
    yield feature, base, make_adapter(base, folder, seed=3, **feature.options)


def test_a_manifest_means_what_peft_computes(made: tuple[Feature, Path, Path]) -> None:
    feature, base, folder = made
    manifest = _validated(base, folder)

    ids = [*IDS, *feature.ids]
    own = dense_logprobs(base, folder, manifest, ids)
    theirs = peft_logprobs(base, folder, manifest.vocab_size, ids)

    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-4)
    if not manifest.vocab_size:
        assert (own - base_logprobs(base, ids)).abs().max() > 0.01
    assert AdapterManifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_every_tensor_is_applied_or_known_not_to_matter(made: tuple[Feature, Path, Path]) -> None:
    _, base, folder = made
    manifest = _validated(base, folder)
    applied, unused = _applied(manifest), {name for name, _ in manifest.unused}
    assert not applied & unused
    assert applied | unused == set(load_file(folder / WEIGHTS_FILE))


def test_no_tensor_may_be_missing_or_of_another_shape(
    made: tuple[Feature, Path, Path], tmp_path: Path
) -> None:
    _, base, folder = made
    manifest = _validated(base, folder)
    for name in sorted(_applied(manifest)):
        if ".1." in name:
            continue
        for change in ("drop", "widen", "flatten"):
            spoiled = Path(shutil.copytree(folder, tmp_path / "spoiled", dirs_exist_ok=True))

            def spoil(
                tensors: dict[str, torch.Tensor], name: str = name, how: str = change
            ) -> None:
                tensor = tensors.pop(name)
                if how == "widen":
                    tensors[name] = torch.cat([tensor, tensor[..., :1]], -1)
                elif how == "flatten":
                    tensors[name] = tensor[None]

            edit_weights(spoiled, spoil)
            if change == "drop" and _has_twin(name, folder, manifest):
                _validated(base, spoiled)
                continue
            with pytest.raises(AdapterRejected):
                _validated(base, spoiled)


def _validated(base: Path, folder: Path) -> AdapterManifest:
    return validate(folder, spec_of(base), Limits(), parameters=parameters_of(base))


def _applied(manifest: AdapterManifest) -> set[str]:
    """Every name of a tensor that the manifest has anywhere but in `unused`."""
    parts = (manifest.modules, manifest.vectors, manifest.embeddings, manifest.replaced)
    keys = set()
    for part in (*parts, manifest.parameter_loras, manifest.token_rows):
        for entry in part:
            for name, value in vars(entry).items():
                if name.endswith("key") and value is not None:
                    keys.add(value)
    return keys


def _has_twin(name: str, folder: Path, manifest: AdapterManifest) -> bool:
    """Whether another tensor says the same: PEFT saved it twice, or into a weight that is tied."""
    if any(repr(name) in reason for _, reason in manifest.unused):
        return True
    tensors = load_file(folder / WEIGHTS_FILE)
    twins = {own.key for own in manifest.replaced if own.key != name}
    replaced = name in {own.key for own in manifest.replaced}
    return replaced and any(torch.equal(tensors[name], tensors[twin]) for twin in twins)
