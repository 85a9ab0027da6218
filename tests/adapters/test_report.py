"""The report says of every tensor what became of it, and of an adapter what it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.errors import AdapterRejected, Violation, printable
from adapters.manifest import (
    PAGE_RANK,
    WEIGHTS_FILE,
    AdapterManifest,
    AddedToken,
    BaseSpec,
    EmbeddingLora,
    ModuleLora,
    OutputVectors,
    ParameterLora,
    ReplacedParameter,
    TargetSpec,
    TokenRows,
)
from adapters.pages import page_elements
from adapters.peft_files import TensorEntry, TensorTable, read_header
from adapters.report import (
    FEATURES,
    MAX_LISTED,
    STATUSES,
    Report,
    accepted_report,
    refused_report,
)
from adapters.validation import Limits, validate
from tests.adapters.lora_files import A0, B0, Q0, Q1

NORM = "model.norm.weight"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
EMBEDDING = "model.embed_tokens"
BASE = BaseSpec(
    name="org/small",
    vocab_size=32,
    max_positions=64,
    targets=(
        TargetSpec("self_attn.q_proj", 8, 16, (Q0, Q1)),
        TargetSpec("lm_head", 8, 32, ("lm_head",)),
    ),
    output_module="lm_head",
    embedding=EMBEDDING,
    parameters={
        f"{Q0}.weight": (16, 8),
        f"{EMBEDDING}.weight": (32, 8),
        "lm_head.weight": (32, 8),
        NORM: (8,),
        EXPERTS: (4, 16, 8),
    },
)


def table_of(*shapes: tuple[str, tuple[int, ...]], dtype: str = "F32") -> TensorTable:
    return TensorTable(tuple(TensorEntry(name, dtype, shape, 0, 4) for name, shape in shapes))


def manifest_of(**parts: object) -> AdapterManifest:
    plain = AdapterManifest("d" * 64, (), 0, 0, ("F32",), 0, base_name="org/small")
    return replace(plain, **parts)  # type: ignore[arg-type]


def by_name(report: Report) -> dict[str, Report]:
    return {tensor["name"]: tensor for tensor in report["tensors"]}


def test_a_plain_adapter_is_told_tensor_by_tensor(pristine: Path, spec: BaseSpec) -> None:
    manifest = replace(validate(pristine, spec, Limits()), effect=0.25, tokenizer=("none came",))
    table = read_header(pristine / WEIGHTS_FILE)
    report = accepted_report(manifest, table, spec, element_bytes=2)
    assert report["status"] == "accepted" and report["digest"] == manifest.digest
    assert (report["base"], report["effect"]) == ("org/tiny", 0.25)
    assert report["parameters"] == manifest.parameters and report["bytes"] == table.nbytes
    assert report["dtypes"] == ["F32"] and report["features"] == [] and report["violations"] == []
    assert report["non_finite"] == 0 and report["tokenizer"] == ["none came"]
    summary = {"kind": "linear", "count": 2, "rank": {"min": 4, "max": 4}}
    summary["scale"] = {"min": 2.0, "max": 2.0}
    assert report["modules"] == [{"name": n, **summary} for n in ("q_proj", "v_proj")]
    targets = [t for t in spec.targets if t.name in ("self_attn.q_proj", "self_attn.v_proj")]
    assert report["pages"] == 2
    assert report["device_bytes"] == 2 * sum(page_elements(target) for target in targets)
    assert report["tensor_counts"] == dict.fromkeys(STATUSES, 0) | {"applied": 8}
    assert by_name(report)[A0] == {
        "name": A0,
        "shape": [4, 64],
        "dtype": "F32",
        "status": "applied",
        "as": f"LoRA A of {Q0}",
        "reason": None,
    }
    assert by_name(report)[B0]["as"] == f"LoRA B of {Q0}"
    assert json.loads(json.dumps(report)) == report


def test_ranks_and_scales_are_given_as_spans_and_pages_by_the_largest_rank() -> None:
    loras = (ModuleLora(Q0, 3, 0.5, "a0", "b0"), ModuleLora(Q1, 2 * PAGE_RANK + 1, 2.0, "a1", "b1"))
    table = table_of(("a0", (3, 8)), ("b0", (16, 3)), ("a1", (17, 8)), ("b1", (16, 17)))
    report = accepted_report(manifest_of(modules=loras), table, BASE, 4)
    (summary,) = report["modules"]
    assert summary["rank"] == {"min": 3, "max": 17} and summary["scale"] == {"min": 0.5, "max": 2.0}
    assert report["pages"] == 3
    assert report["device_bytes"] == 3 * 4 * page_elements(BASE.targets[0])


def test_each_rare_part_is_a_feature_and_a_role_in_words() -> None:
    manifest = manifest_of(
        modules=(
            ModuleLora(Q0, 2, 1.0, "a", "b", b_rows=(0, 16)),
            ModuleLora(Q1, 2, 1.0, "a", "b", b_rows=(16, 32)),
            ModuleLora("lm_head", 2, 1.0, "ha", "hb"),
        ),
        vectors=(OutputVectors(Q0, "m", "lb", "bias"),),
        embeddings=(EmbeddingLora(EMBEDDING, 2, 1.0, "ea", "eb", "em"),),
        replaced=(ReplacedParameter(NORM, "norm"),),
        parameter_loras=(ParameterLora(EXPERTS, 2, 4, 0.5, "xa", "xb"),),
        token_rows=(TokenRows("lm_head", (1, 3), "rows"),),
        vocab_size=34,
        invocation=(5,),
        mapped=(("ha", "read as lm_head"), ("ha", "split")),
        unused=(("copy", "equals the base's"),),
        added_tokens=(AddedToken(33, "<x>"),),
        chat_template="{{ x }}",
    )
    names = "a b ha hb m lb bias ea eb em norm xa xb rows copy".split()
    report = accepted_report(manifest, table_of(*((n, (2, 2)) for n in names)), BASE, 4)
    assert report["features"] == list(FEATURES)
    roles = {name: tensor["as"] for name, tensor in by_name(report).items()}
    assert roles == {
        "a": f"LoRA A of {Q0}; LoRA A of {Q1}",
        "b": f"rows 0 to 15 as LoRA B of {Q0}; rows 16 to 31 as LoRA B of {Q1}",
        "ha": "LoRA A of lm_head",
        "hb": "LoRA B of lm_head",
        "m": f"DoRA magnitude of {Q0}",
        "lb": f"bias of LoRA B of {Q0}",
        "bias": f"bias of {Q0}",
        "ea": f"LoRA A of the embedding {EMBEDDING}",
        "eb": f"LoRA B of the embedding {EMBEDDING}",
        "em": f"DoRA magnitude of the embedding {EMBEDDING}",
        "norm": f"in place of {NORM}",
        "xa": f"LoRA A of the parameter {EXPERTS} for each of 4 experts",
        "xb": f"LoRA B of the parameter {EXPERTS} for each of 4 experts",
        "rows": "in place of 2 rows of lm_head",
        "copy": None,
    }
    assert [t["status"] for t in report["tensors"]] == ["mapped", "unused"] + 13 * ["applied"]
    assert [t["reason"] for t in report["tensors"][:3]] == [
        "read as lm_head; split",
        "equals the base's",
        None,
    ]
    kinds = {module["name"]: module["kind"] for module in report["modules"]}
    assert kinds == {
        "q_proj": "linear",
        "lm_head": "linear",
        "embed_tokens": "embedding",
        "experts.gate_up_proj": "parameter",
    }


@pytest.mark.parametrize("feature", FEATURES)
def test_a_plain_manifest_has_no_feature(feature: str) -> None:
    plain = manifest_of(modules=(ModuleLora(Q0, 2, 1.0, "a", "b"),))
    assert not FEATURES[feature](plain, BASE)


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_no_report_is_made_of_a_manifest_that_does_not_fit_the_file(names: tuple[str, ...]) -> None:
    manifest = manifest_of(modules=(ModuleLora(Q0, 2, 1.0, "a", "b"),))
    with pytest.raises(AdapterRejected) as error:
        accepted_report(manifest, table_of(*((name, (2, 2)) for name in names)), BASE, 4)
    assert error.value.violations[0].subject == ("b" if len(names) == 1 else "c")


def test_a_refused_file_names_the_tensors_at_fault_first() -> None:
    other = f"base_model.model.{Q1}.lora_A.weight"
    table = table_of((other, (2, 8)), (A0, (2, 8)), (B0, (16, 2)))
    violations = [
        Violation("non_finite_weights", B0, "holds 3 values that are NaN"),
        Violation("rank_mismatch", Q0, "has rank 2 in the file, but 4 in the config"),
        Violation("unsupported_feature", "bias", "is odd"),
    ]
    report = refused_report(violations, table, warnings=["w"], tokenizer=["t"])
    assert report["status"] == "refused" and report["non_finite"] == 1
    assert (report["warnings"], report["tokenizer"]) == (["w"], ["t"])
    assert report["violations"][2] == {
        "code": "unsupported_feature",
        "subject": "bias",
        "message": "is odd",
    }
    assert [(t["name"], t["status"]) for t in report["tensors"]] == [
        (A0, "refused"),
        (B0, "refused"),
        (other, "not applied"),
    ]
    assert report["tensors"][0]["reason"] == f"{Q0} has rank 2 in the file, but 4 in the config"
    assert "holds 3 values" in report["tensors"][1]["reason"]
    assert report["tensor_counts"]["refused"] == 2
    assert report["parameters"] == 64 and report["device_bytes"] is None


def test_a_module_is_not_taken_for_one_that_begins_alike() -> None:
    table = table_of(("base_model.model.model.layers.1.q.lora_A.weight", (1, 1)))
    report = refused_report([Violation("x", "model.layers.1.q.lora", "odd")], table)
    assert report["tensor_counts"]["refused"] == 0
    report = refused_report([Violation("x", "model.layers.1.q", "odd")], table)
    assert report["tensor_counts"]["refused"] == 1


def test_a_file_that_cannot_be_read_still_has_a_report_of_the_same_fields(
    pristine: Path, spec: BaseSpec
) -> None:
    refused = refused_report([Violation("corrupt_adapter", WEIGHTS_FILE, "is cut")], None)
    assert refused["tensors"] == [] and refused["parameters"] is None and refused["dtypes"] is None
    table = read_header(pristine / WEIGHTS_FILE)
    accepted = accepted_report(validate(pristine, spec, Limits()), table, spec, 4)
    assert list(refused) == list(accepted)


def test_a_large_file_is_listed_in_part_the_refused_tensors_first() -> None:
    names = [f"t{i}" for i in range(MAX_LISTED + 50)]
    table = table_of(*((name, (1,)) for name in names))
    report = refused_report([Violation("unexpected_key", names[-1], "is odd")], table)
    assert len(report["tensors"]) == MAX_LISTED and report["tensors_left_out"] == 50
    assert report["tensors"][0]["name"] == names[-1]
    assert sum(report["tensor_counts"].values()) == MAX_LISTED + 50


def test_names_cannot_disguise_themselves() -> None:
    name = "a\u202eb\x1b[31m\n"
    report = refused_report(
        [Violation("unexpected_key", name, f"is {name}")], table_of((name, (1,)))
    )
    shown = "a\\u202eb\\x1b[31m\\n"
    assert report["tensors"][0]["name"] == report["violations"][0]["subject"] == shown
    assert report["tensors"][0]["status"] == "refused"
    assert printable("größe … äöü") == "größe … äöü"
