"""Weighted adapters over HTTP: summed per request, and composed once under a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.server import Running, serving
from tests.features import weighted
from tests.tiny import byte_ids, make_adapter, oracle_logprobs, tiny_base

PROMPT = byte_ids("one two three")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def sources(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    options: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 12},
        {"use_dora": True},
    ]
    return [make_adapter(base, folder / f"a{i}", seed=i, **o) for i, o in enumerate(options)]


@pytest.fixture(scope="module")
def server(base: Path, sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(base, tmp_path_factory.mktemp("data")) as running:
        for folder in sources:
            assert running.upload(folder.name, folder).status_code == 201
        yield running


def logprobs(server: Running, **body: Any) -> tuple[list[int], torch.Tensor]:
    """Four greedy tokens and their log-probabilities."""
    answer = server.complete(
        prompt=PROMPT, max_tokens=4, logprobs=0, headers={"x-lorikeet-trace": "1"}, **body
    )
    tokens = answer["lorikeet"]["choices"][0]["token_ids"]
    return tokens, torch.tensor(answer["choices"][0]["logprobs"]["token_logprobs"])


def assert_equals(base: Path, oracle: Path, tokens: list[int], got: torch.Tensor) -> None:
    want = oracle_logprobs(base, oracle, PROMPT + tokens)[len(PROMPT) - 1 : -1]
    chosen = want[torch.arange(len(tokens)), torch.tensor(tokens)]
    torch.testing.assert_close(got, chosen, atol=1e-4, rtol=0)
    assert (want.max(-1).values - chosen).max() < 2e-4


def test_a_request_with_weights_equals_pefts_concatenation(
    server: Running, base: Path, tmp_path: Path
) -> None:
    served = weighted(base, tmp_path)
    for folder, _ in served.parts:
        assert server.upload(folder.name, folder).status_code == 201
    parts = [{"name": folder.name, "weight": weight} for folder, weight in served.parts]
    assert_equals(base, served.oracle, *logprobs(server, adapters=parts))


def test_the_answer_says_who_gave_it(server: Running) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    parts = [{"name": "a0", "weight": 0.5}, {"name": "a1@1"}]
    response = server.client.post("/v1/completions", json=body | {"adapters": parts})
    assert response.headers["x-lorikeet-adapters"] == "a0@1*0.5, a1@1"
    fingerprint = response.json()["system_fingerprint"]
    turned = server.client.post("/v1/completions", json=body | {"adapters": parts[::-1]})
    assert turned.json()["system_fingerprint"] == fingerprint
    other = [{"name": "a0", "weight": 0.6}, {"name": "a1"}]
    changed = server.client.post("/v1/completions", json=body | {"adapters": other})
    assert changed.json()["system_fingerprint"] != fingerprint
    step = server.client.get("/v1/engine/steps?limit=1").json()["data"][0]
    assert list(step["tokens"]) == ["a0@1+a1@1"]


def test_one_adapter_of_weight_one_is_that_adapter(server: Running) -> None:
    alone = logprobs(server, model="a0")
    listed = logprobs(server, adapters=[{"name": "a0"}])
    assert alone[0] == listed[0] and torch.equal(alone[1], listed[1])
    dora = logprobs(server, model="a2")
    assert dora[0] == logprobs(server, adapters=[{"name": "a2", "weight": 1}])[0]


def test_chats_take_weights_too(server: Running) -> None:
    answer = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        extra_body={"adapters": [{"name": "a0", "weight": 2}]},
    )
    assert answer.usage is not None and answer.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"model": "a0"}, "model", "must be the base"),
        ({"adapters": []}, "adapters", "1"),
        ({"adapters": [{"name": "a0"}] * 9}, "adapters", "8"),
        ({"adapters": [{"name": "a0", "weight": 1e9}]}, "adapters[0].weight", "100"),
        ({"adapters": [{"name": "a0", "weight": "1"}]}, "adapters[0].weight", "number"),
        ({"adapters": [{"name": "a0", "scale": 1}]}, "adapters[0]", "scale"),
        ({"adapters": [{"name": "tiny"}]}, "adapters[0].name", "is the base"),
        ({"adapters": [{"name": "a0"}, {"name": "a0@1"}]}, "adapters[1].name", "same weights"),
        ({"adapters": [{"name": "a2", "weight": 0.5}]}, "adapters[0]", "more than LoRA"),
        ({"adapters": [{"name": "a0"}, {"name": "a2"}]}, "adapters[1]", "more than LoRA"),
    ],
)
def test_what_cannot_be_summed_is_refused(
    server: Running, change: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": "tiny", "prompt": "x", "adapters": [{"name": "a0"}]} | change
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param) and message in error["message"], error


def test_an_unknown_adapter_in_a_sum_is_not_found(server: Running) -> None:
    body = {"model": "tiny", "prompt": "x", "adapters": [{"name": "a0"}, {"name": "nobody"}]}
    assert server.client.post("/v1/completions", json=body).status_code == 404


def compose(server: Running, **body: Any) -> Any:
    return server.client.post("/v1/compositions", json=body)


def test_a_composition_is_served_under_its_name(
    server: Running, base: Path, tmp_path: Path
) -> None:
    parts = [{"name": "a0", "weight": 0.5}, {"name": "a1", "weight": -1.25}]
    response = compose(server, name="both", adapters=parts, combination_type="cat")
    assert response.status_code == 201, response.text
    record = response.json()
    assert "composed by cat: 0.5 * a0@1 + -1.25 * a1@1" in record["warnings"]
    stored = logprobs(server, model="both")
    summed = logprobs(server, adapters=parts)
    assert stored[0] == summed[0]
    torch.testing.assert_close(stored[1], summed[1], atol=1e-4, rtol=0)
    again = compose(server, name="both", adapters=parts, combination_type="cat")
    assert again.status_code == 200 and again.json()["version"] == record["version"]


@pytest.mark.parametrize("kind", ["linear", "dare_ties"])  # the others: test_merging
def test_merged_compositions_are_served_as_peft_would(
    server: Running, base: Path, kind: str
) -> None:
    body: dict[str, Any] = {"adapters": [{"name": "a0"}, {"name": "a1", "weight": 0.7}]}
    if kind != "linear":
        body["density"] = 0.6
    name = kind.replace("_", "-")
    response = compose(server, name=name, combination_type=kind, seed=7, **body)
    assert response.status_code == 201, response.text
    digest = response.json()["digest"]
    blob = server.settings.data / "adapters" / "blobs" / digest[:2] / digest
    assert {CONFIG_FILE, WEIGHTS_FILE} <= {path.name for path in blob.iterdir()}
    assert_equals(base, blob, *logprobs(server, model=name))


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"combination_type": "svd"}, "invalid_value", "combination_type"),
        ({"combination_type": "ties"}, "invalid_value", "density: is required for ties"),
        ({"density": 0.5}, "invalid_value", "density: is not taken with linear"),
        ({"density": 0}, "invalid_value", "density"),
        ({"adapters": [{"name": "tiny"}]}, "invalid_value", "is the base"),
        ({"adapters": [{"name": "a2"}]}, "unsupported_parameter", "more than LoRA"),
        ({"surprise": 1}, "unknown_parameter", "surprise"),
    ],
)
def test_what_cannot_be_composed_is_refused(
    server: Running, change: dict[str, Any], code: str, message: str
) -> None:
    body = {"name": "c", "adapters": [{"name": "a0"}], "combination_type": "linear"} | change
    response = compose(server, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == code and message in error["message"], error


def test_ranks_that_differ_are_named(server: Running, base: Path, tmp_path: Path) -> None:
    other = make_adapter(base, tmp_path / "r2", seed=9, r=2, target_modules=["q_proj"])
    assert server.upload("r2", other).status_code == 201
    parts = [{"name": "a0"}, {"name": "r2"}]
    response = compose(server, name="c", adapters=parts, combination_type="linear")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "cannot_compose")
    assert "q_proj has the ranks [2, 4]" in error["message"]


def test_a_sum_of_nothing_is_refused_as_no_effect(server: Running) -> None:
    parts = [{"name": "a0", "weight": 0}]
    body: dict[str, Any] = {"name": "none", "adapters": parts, "combination_type": "linear"}
    response = compose(server, **body)
    assert response.status_code == 422
    assert response.json()["error"]["violations"][0]["code"] == "no_effect"
    assert compose(server, **body, allow_noop=True).status_code == 201
