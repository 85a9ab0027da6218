from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters.errors import AdapterUnavailable
from adapters.layout import layout
from adapters.manifest import (
    AdapterManifest,
    BaseSpec,
    EmbeddingLora,
    ModuleLora,
    OutputVectors,
    ParameterLora,
    ReplacedParameter,
    TokenRows,
)
from tests.adapters.stored import BASE, EVERY_TERM, page_size


def manifest(modules: tuple[ModuleLora, ...] = (), **fields: Any) -> AdapterManifest:
    return AdapterManifest("0" * 64, modules, 0, 0, ("F32",), 0, **fields)


def lora(module: str, rank: int, scale: float = 1.0) -> ModuleLora:
    return ModuleLora(module, rank, scale, "a", "b")


def test_loras_of_one_module_add_their_ranks_and_keep_the_larger_scale() -> None:
    plan = layout(
        manifest(
            (
                lora("layers.0.k_proj", 5),
                lora("layers.1.q_proj", 3, 0.5),
                lora("layers.1.q_proj", 7, -2.0),
                lora("layers.2.q_proj", 1, 0.25),
            )
        ),
        BASE,
    )
    assert list(plan.targets) == [0, 1]
    assert plan.targets[0].ranks == (0, 10, 1)
    assert plan.targets[0].scales == (0.0, -2.0, 0.25)
    assert plan.page_sizes == plan.allocations == (page_size(0), page_size(0), page_size(1))
    assert not plan.terms and plan.elements == 2 * page_size(0) + page_size(1)


def test_terms_take_aligned_room_behind_the_pages() -> None:
    plan = layout(manifest((lora("layers.0.k_proj", 1),), **EVERY_TERM), BASE)
    assert plan.terms == {
        "norm": ((16,),),
        "embed": ((35, 16), (35, 5), (5, 16), (16,)),
        "experts": ((3, 2, 10), (3, 16, 2), (3, 1, 16), (3, 10, 1)),
        "head": ((3, 16),),
        "layers.0.q_proj": ((16,), (16,)),
        "layers.0.k_proj": ((8,),),
    }
    sizes = (64, 576, 192, 128, 64, 64, 128, 64, 64, 64, 64, 64, 64)
    assert plan.allocations == (page_size(1), *sizes)


@pytest.mark.parametrize(
    ("vectors", "shapes"),
    [
        (OutputVectors("layers.0.q_proj", "m"), 2),  # the base's bias must not be scaled
        (OutputVectors("layers.0.k_proj", "m"), 1),
        (OutputVectors("layers.0.k_proj", "m", "b"), 2),
        (OutputVectors("layers.0.q_proj", None, None, "b"), 1),
        (OutputVectors("layers.0.q_proj"), 0),
    ],
)
def test_a_shift_is_there_only_where_something_is_added(
    vectors: OutputVectors, shapes: int
) -> None:
    terms = layout(manifest(vectors=(vectors,)), BASE).terms
    assert sum(map(len, terms.values())) == shapes


def test_a_larger_vocabulary_widens_embedding_and_head_alone() -> None:
    replaced = tuple(
        ReplacedParameter(path, path) for path in ("embed.weight", "head.weight", "experts.up")
    )
    plan = layout(manifest(replaced=replaced, vocab_size=40), BASE)
    assert plan.terms == {
        "embed": ((40, 16),),
        "head": ((40, 16),),
        "experts": (BASE.parameters["experts.up"],),
    }


def test_a_tied_head_has_the_embeddings_shape() -> None:
    untied = {path: shape for path, shape in BASE.parameters.items() if "head" not in path}
    base = replace(BASE, parameters=untied)
    own = manifest(replaced=(ReplacedParameter("head.weight", "w"),))
    with pytest.raises(AdapterUnavailable, match="no parameter 'head.weight'"):
        layout(own, base)
    assert layout(own, replace(base, tied_head=True)).terms == {"head": ((32, 16),)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modules": (lora("layers.3.q_proj", 1),)}, "no module 'layers.3.q_proj'"),
        ({"vectors": (OutputVectors("norm", "m"),)}, "no module 'norm'"),
        ({"vectors": (OutputVectors("layers.0.q_proj", "m"),) * 2}, "'layers.0.q_proj' .*twice"),
        ({"replaced": (ReplacedParameter("norm.bias", "b"),)}, "no parameter 'norm.bias'"),
        (
            {"parameter_loras": (ParameterLora("gate.weight", 1, 1, 1.0, "a", "b"),)},
            "no parameter 'gate.weight'",
        ),
        ({"embeddings": (EmbeddingLora("wpe", 1, 1.0, "a", "b"),)}, "no parameter 'wpe.weight'"),
        ({"token_rows": (TokenRows("wte", (0,), "r"),)}, "no parameter 'wte.weight'"),
    ],
)
def test_names_that_the_base_lacks_are_told(fields: dict[str, Any], message: str) -> None:
    base: BaseSpec = BASE
    with pytest.raises(AdapterUnavailable, match=message):
        layout(manifest(**fields), base)
