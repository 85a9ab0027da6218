"""What is read of an adapter, computed densely, equals what PEFT's own layers compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from adapters.manifest import (
    PAGE_RANK,
    WEIGHTS_FILE,
    AdapterManifest,
    AdapterRef,
    BaseSpec,
    EmbeddingLora,
    ModuleLora,
    OutputVectors,
    ParameterLora,
    ReplacedParameter,
    TargetSpec,
    TokenRows,
)
from adapters.peft_files import content_digest
from adapters.terms import (
    Affine,
    EmbeddingDelta,
    ParameterDelta,
    ReplacedRows,
    Replacement,
)
from adapters.weights import AdapterWeights, load_weights
from tests.tiny import make_adapter, tiny_base

SCALE = 2.0  # lora_alpha 8, r 4
PREFIX = "base_model.model."
LAYER = "model.layers.1."


class Case:
    """A base of `family`, an adapter that PEFT saved for it, and PEFT's model of both."""

    def __init__(self, folder: Path, family: str, **config: Any) -> None:
        path = tiny_base(folder / "base", family)
        self.base: Any = load(path)
        self.folder = make_adapter(path, folder / "adapter", seed=1, **config)
        self.peft: Any = PeftModel.from_pretrained(load(path), str(self.folder)).eval()
        with safe_open(self.folder / WEIGHTS_FILE, "pt") as file:
            self.keys = set(file.keys())
        self.spec = spec_of(self.base)

    def read(
        self, modules: tuple[ModuleLora, ...] = (), spec: BaseSpec | None = None, **fields: Any
    ) -> AdapterWeights:
        digest = content_digest(self.folder)
        manifest = AdapterManifest(digest, modules, 0, 0, ("F32",), 4, **fields)
        ref = AdapterRef(digest, "a", self.folder, manifest)
        return load_weights(ref, spec or self.spec, torch.float32, self.base.get_parameter)

    def lora(self, module: str) -> ModuleLora:
        key = f"{PREFIX}{module}.lora_"
        return ModuleLora(module, 4, SCALE, f"{key}A.weight", f"{key}B.weight")

    def key(self, *names: str) -> str:
        """The one of these names that the file has."""
        (found,) = {f"{PREFIX}{name}" for name in names} & self.keys
        return found

    def theirs(self, module: str, x: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.peft.get_submodule(f"{PREFIX}{module}")(x)
        return found

    def ours(self, module: str, x: Tensor, weights: AdapterWeights) -> Tensor:
        """A linear's output: base, LoRA from the pages, then what its Affine does."""
        with torch.no_grad():
            y: Tensor = self.base.get_submodule(module)(x)
        t, layer = self.spec.module_index[module]
        if t in weights.targets:
            a, b = factors(weights, self.spec, module)
            y = y + weights.targets[t].scales[layer] * (x @ a.T) @ b
        for term in weights.terms.get(module, ()):
            assert isinstance(term, Affine)
            y = y if term.gain is None else term.gain * y
            y = y if term.shift is None else y + term.shift
        return y


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def spec_of(model: Any) -> BaseSpec:
    targets, transposed = [], set()
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            targets.append(TargetSpec(path, module.in_features, module.out_features, (path,)))
        elif isinstance(module, Conv1D):
            targets.append(TargetSpec(path, module.nx, module.nf, (path,)))
            transposed.add(f"{path}.weight")
    embedding = model.get_input_embeddings()
    return BaseSpec(
        "tiny",
        embedding.weight.shape[0],
        512,
        tuple(targets),
        output_module="lm_head",
        tied_head=model.lm_head.weight is embedding.weight,
        embedding=next(path for path, module in model.named_modules() if module is embedding),
        parameters={path: tuple(p.shape) for path, p in model.named_parameters()},
        transposed=frozenset(transposed),
    )


def factors(weights: AdapterWeights, spec: BaseSpec, module: str) -> tuple[Tensor, Tensor]:
    """A [rank, in] and Bᵀ [rank, out] of a target that has one layer, zero rows and all."""
    t, _ = spec.module_index[module]
    split = PAGE_RANK * spec.targets[t].in_features
    pages = weights.targets[t].pages
    a = pages[:, :split].reshape(-1, spec.targets[t].in_features)
    return a, pages[:, split:].reshape(-1, spec.targets[t].out_features)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


LINEARS = {
    "llama": ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"),
    "llama-bias": ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"),
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc"),
}


@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize(
    ("family", "feature"),
    # PEFT wants a bias in the base for one of B.
    [
        (family, feature)
        for family in LINEARS
        for feature in ("use_dora", "lora_bias", None)
        if (family, feature) != ("llama", "lora_bias")
    ],
)
# PEFT takes a bias of B, a vector, for a part of a sharded matrix.
@pytest.mark.filterwarnings("ignore:Adapter 'default'. .* LoRA tensor.s. have invalid shape")
def test_vectors_of_a_linear(tmp_path: Path, family: str, bias: str, feature: str | None) -> None:
    names = LINEARS[family]
    options: dict[str, Any] = {feature: True} if feature else {}
    case = Case(
        tmp_path,
        family,
        bias=bias,
        fan_in_fan_out=family == "gpt2",
        target_modules=[name.rpartition(".")[2] for name in names],
        **options,
    )
    layer = LAYER if family != "gpt2" else "transformer.h.1."
    has_bias = bias == "all" and family != "llama"
    modules = [layer + name for name in names]
    vectors = tuple(
        OutputVectors(
            module,
            case.key(f"{module}.lora_magnitude_vector") if feature == "use_dora" else None,
            case.key(f"{module}.lora_B.bias") if feature == "lora_bias" else None,
            case.key(f"{module}.base_layer.bias", f"{module}.bias") if has_bias else None,
        )
        for module in modules
    )
    weights = case.read(tuple(map(case.lora, modules)), vectors=vectors)
    for module in modules:
        x = torch.randn(5, case.spec.targets[case.spec.module_index[module][0]].in_features)
        close(case.ours(module, x, weights), case.theirs(module, x))


def test_a_bias_on_a_linear_without_lora(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama-bias", bias="all", target_modules=["q_proj"])
    module = f"{LAYER}mlp.up_proj"
    vectors = (OutputVectors(module, None, None, case.key(f"{module}.bias")),)
    x = torch.randn(5, 64)
    close(case.ours(module, x, case.read(vectors=vectors)), case.theirs(module, x))


@pytest.mark.parametrize("family", ["llama", "gemma"])  # Gemma scales what it embeds
@pytest.mark.parametrize("dora", [False, True])
# True, but of no matter here: Gemma's head stays as it is.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_lora_of_an_embedding(tmp_path: Path, family: str, dora: bool) -> None:
    case = Case(tmp_path, family, target_modules=["embed_tokens"], use_dora=dora)
    path = "model.embed_tokens"
    delta = EmbeddingLora(
        path,
        4,
        SCALE,
        case.key(f"{path}.lora_embedding_A"),
        case.key(f"{path}.lora_embedding_B"),
        case.key(f"{path}.lora_magnitude_vector") if dora else None,
    )
    (term,) = case.read(embeddings=(delta,)).terms[path]
    assert isinstance(term, EmbeddingDelta)
    ids = torch.tensor([0, 5, 319, 5])
    embedding = case.base.get_submodule(path)
    factor = getattr(embedding, "embed_scale", 1.0)
    with torch.no_grad():
        y = embedding(ids) + term.scale * factor * (term.a[ids] @ term.b)
    y = y if term.gain is None else term.gain * y
    assert (term.gain is not None) == dora
    close(y, case.theirs(path, ids))


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "llama"])
def test_lora_of_parameters(tmp_path: Path, family: str) -> None:
    module = f"{LAYER}mlp.experts"
    names: tuple[str, ...] = ("gate_up_proj", "down_proj")
    if family == "llama":
        module, names = f"{LAYER}self_attn.k_proj", ("weight",)
    parent = module.rpartition(".")[2]
    case = Case(
        tmp_path,
        family,
        target_modules=["o_proj"],
        target_parameters=[f"{parent}.{name}" for name in names],
    )
    wrapper = case.peft.get_submodule(f"{PREFIX}{module}")
    loras, deltas = [], {}
    key = f"{PREFIX}{module}."
    while hasattr(wrapper, "parameter_name"):
        deltas[wrapper.parameter_name] = wrapper.get_delta_weight("default")
        path = f"{module}.{wrapper.parameter_name}"
        loras.append(
            ParameterLora(
                path,
                4,
                wrapper.num_experts,
                SCALE,
                f"{key}lora_A.weight",
                f"{key}lora_B.weight",
            )
        )
        wrapper, key = wrapper.base_layer, f"{key}base_layer."
    assert set(deltas) == set(names)
    for term in case.read(parameter_loras=tuple(loras)).terms[module]:
        assert isinstance(term, ParameterDelta)
        delta = term.scale * (term.b @ term.a)
        close(delta if family != "llama" else delta[0], deltas[term.parameter])


class TransposedExperts(nn.Module):
    """Experts as GPT-OSS holds them: [experts, in, out], which PEFT tells by the flag."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 6, 10))


def test_lora_of_transposed_experts(tmp_path: Path) -> None:
    model = nn.Module()
    model.experts = TransposedExperts()
    model.proj = nn.Linear(2, 2)
    config = LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=["experts.up"])
    peft: Any = get_peft_model(model, config)
    for parameter in peft.parameters():
        parameter.data.normal_()
    peft.save_pretrained(str(tmp_path))
    key = f"{PREFIX}experts.lora_"
    lora = ParameterLora(
        "experts.up", 2, 3, 1.5, f"{key}A.weight", f"{key}B.weight", transposed=True
    )
    spec = BaseSpec("tiny", 1, 1, (), parameters={"experts.up": (3, 6, 10)})
    digest = content_digest(tmp_path)
    manifest = AdapterManifest(digest, (), 0, 0, ("F32",), 2, parameter_loras=(lora,))
    ref = AdapterRef(digest, "a", tmp_path, manifest)
    (term,) = load_weights(ref, spec, torch.float32, model.get_parameter).terms["experts"]
    assert isinstance(term, ParameterDelta) and term.transposed
    expected = peft.get_submodule(f"{PREFIX}experts").get_delta_weight("default")
    close(term.scale * (term.b @ term.a).mT, expected)


def test_replaced_modules_and_rows(tmp_path: Path) -> None:
    case = Case(
        tmp_path,
        "llama",
        target_modules=["q_proj"],
        modules_to_save=["lm_head", "input_layernorm"],
        trainable_token_indices=[7, 2, 300],
    )
    norm, embedding = f"{LAYER}input_layernorm", "model.embed_tokens"
    weights = case.read(
        replaced=tuple(
            ReplacedParameter(f"{path}.weight", case.key(f"{path}.weight"))
            for path in ("lm_head", norm)
        ),
        token_rows=(
            TokenRows(
                embedding,
                tuple(case.peft.peft_config["default"].trainable_token_indices),
                case.key(f"{embedding}.token_adapter.trainable_tokens_delta"),
            ),
        ),
    )
    x = torch.randn(4, 64)
    (head,), (own_norm,) = weights.terms["lm_head"], weights.terms[norm]
    assert isinstance(head, Replacement) and isinstance(own_norm, Replacement)
    close(functional.linear(x, **head.parameters), case.theirs("lm_head", x))
    replaced = torch.func.functional_call(
        case.base.get_submodule(norm), dict(own_norm.parameters), x
    )
    close(replaced, case.theirs(norm, x))
    (rows,) = weights.terms[embedding]
    assert isinstance(rows, ReplacedRows)
    with torch.no_grad():
        y = case.base.get_submodule(embedding)(torch.arange(320))
    y[list(rows.indices)] = rows.rows
    close(y, case.theirs(embedding, torch.arange(320)))


def test_a_dora_beside_a_replaced_weight_and_bias_is_relative_to_those(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama-bias", target_modules=["q_proj"], use_dora=True, bias="all")
    module = f"{LAYER}self_attn.q_proj"
    with safe_open(case.folder / WEIGHTS_FILE, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in case.keys}
    own = {"weight": torch.randn(64, 64), "bias": torch.randn(64)}
    save_file(tensors | own, case.folder / WEIGHTS_FILE)
    weights = case.read(
        (case.lora(module),),
        replaced=tuple(ReplacedParameter(f"{module}.{name}", name) for name in own),
        vectors=(OutputVectors(module, case.key(f"{module}.lora_magnitude_vector")),),
    )
    replacement, affine = weights.terms[module]
    assert isinstance(replacement, Replacement) and isinstance(affine, Affine)
    peft_layer = case.peft.get_submodule(f"{PREFIX}{module}")
    peft_layer.base_layer.load_state_dict(own)
    x = torch.randn(5, 64)
    case.base.get_submodule(module).load_state_dict(own)
    alone = replace(weights, terms={module: (affine,)})
    close(case.ours(module, x, alone), case.theirs(module, x))


def test_parts_of_a_fused_linear_stack_on_the_whole(tmp_path: Path) -> None:
    case = Case(
        tmp_path,
        "llama",
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"v_proj": 7},
        alpha_pattern={"v_proj": 3},
    )
    parts = {
        f"{LAYER}self_attn.{n}": size
        for n, size in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))
    }
    whole, q, v = f"{LAYER}self_attn.qkv_proj", *(p for p in parts if "k_proj" not in p)
    spec = BaseSpec(
        "tiny",
        1,
        1,
        (TargetSpec("qkv_proj", 64, 128, (whole,)),),
        fused={whole: tuple(parts.items())},
    )
    loras = (
        ModuleLora(whole, 4, SCALE, case.lora(q).a_key, case.lora(q).b_key, None, 0),
        ModuleLora(whole, 7, 3 / 7, case.lora(v).a_key, case.lora(v).b_key, None, 96),
    )
    weights = case.read(loras, spec)
    assert weights.targets[0].ranks == (11,) and weights.targets[0].scales == (SCALE,)
    a, b = factors(weights, spec, whole)
    delta = SCALE * b.T @ a
    theirs = {
        p: case.peft.get_submodule(f"{PREFIX}{p}").get_delta_weight("default") for p in (q, v)
    }
    close(delta, torch.cat([theirs[q], torch.zeros(32, 64), theirs[v]]).detach())


def test_a_fused_linear_is_served_on_its_parts(tmp_path: Path) -> None:
    case = Case(tmp_path, "phi3", target_modules=["qkv_proj"])
    whole = f"{LAYER}self_attn.qkv_proj"
    parts = {"q_proj": (0, 64), "k_proj": (64, 96), "v_proj": (96, 128)}
    spec = BaseSpec(
        "tiny",
        1,
        1,
        tuple(TargetSpec(name, 64, end - start, (name,)) for name, (start, end) in parts.items()),
    )
    lora = case.lora(whole)
    loras = tuple(
        ModuleLora(n, 4, SCALE, lora.a_key, lora.b_key, rows) for n, rows in parts.items()
    )
    weights = case.read(loras, spec)
    theirs = case.peft.get_submodule(f"{PREFIX}{whole}").get_delta_weight("default").detach()
    for name, (start, end) in parts.items():
        a, b = factors(weights, spec, name)
        close(SCALE * b.T @ a, theirs[start:end])
