from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from adapters.manifest import WEIGHTS_FILE
from api.steps import DEFAULT_LIMIT
from base_engine.smoke import smoke_prompts
from tests.api.server import Running, serving, until
from tests.generation import adapter_ref
from tests.tiny import BYTE0, VOCAB, make_adapter, signature_adapter

PROBES = ("/live", "/ready", "/health")


@pytest.mark.parametrize("path", [*PROBES, "/metrics", "/v1/models"])
def test_probes_answer_get_and_head(server: Running, path: str) -> None:
    assert server.client.get(path).status_code == 200
    head = server.client.head(path)
    assert head.status_code == 200 and head.content == b""


def test_a_dead_engine_fails_probes_and_requests(scripted: Path, tmp_path: Path) -> None:
    with serving(scripted, tmp_path) as server:
        server.engine.stop()
        for path in PROBES:
            response = server.client.get(path)
            assert response.status_code == 503
            assert response.json()["problem"] == "the engine has stopped"
        body = {"model": "tiny", "prompt": "x"}
        response = server.client.post("/v1/completions", json=body)
        assert response.status_code == 503 and "retry-after" in response.headers
        assert response.json()["error"]["code"] == "engine_stopped"


def test_a_hanging_step_fails_the_probes(
    scripted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(scripted, tmp_path, stall_seconds=1) as server:
        run, hang = server.engine.runner.run, threading.Event()

        def hanging(chunks: Any) -> Any:
            hang.wait(30)
            return run(chunks)

        monkeypatch.setattr(server.engine.runner, "run", hanging)
        asking = threading.Thread(target=server.complete, kwargs={"max_tokens": 1})
        asking.start()
        try:
            assert server.client.get("/live").status_code == 200
            until(lambda: server.client.get("/live").status_code == 503, 10)
            problem = server.client.get("/live").json()["problem"]
            assert problem.startswith("a step has been running for")
        finally:
            hang.set()
            asking.join()
        until(lambda: server.client.get("/live").status_code == 200, 5)


def test_metrics_are_well_formed_and_count(server: Running) -> None:
    def values() -> dict[str, float]:
        text = server.client.get("/metrics").text
        return {
            sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    before = values()
    server.complete(prompt="!", max_tokens=4)
    server.client.get("/no/such/route")
    server.client.post("/v1/completions", json={"model": 'a"\n{b}', "prompt": "x"})
    until(server.idle, 1)
    after = values()

    def grown(name: str, **labels: str) -> float:
        key = name + json.dumps(labels, sort_keys=True)
        return after[key] - before.get(key, 0)

    assert grown("lorikeet_generated_tokens_total") == 4
    assert grown("lorikeet_choices_finished_total", reason="length") == 1
    assert grown("lorikeet_time_to_first_token_seconds_count") == 1
    assert grown("lorikeet_request_seconds_count") == 1
    assert grown("lorikeet_step_seconds_count") >= 4
    assert grown("lorikeet_http_requests_total", route="completions", status="200") == 1
    assert grown("lorikeet_http_requests_total", route="completions", status="404") == 1
    assert grown("lorikeet_http_requests_total", route="unmatched", status="404") == 1
    assert after["lorikeet_kv_blocks_total{}"] > 0
    assert not any('a\\"' in key for key in after)


def test_steps_name_the_adapters_that_shared_them(llama_base: Path, tmp_path: Path) -> None:
    names = [f"a{i}" for i in range(3)]
    with serving(llama_base, tmp_path / "data") as server:
        for i, name in enumerate(names):
            folder = make_adapter(llama_base, tmp_path / name, seed=i, r=2 + i)
            assert server.upload(name, folder).status_code == 201

        def ask(model: str) -> None:
            server.complete(model, prompt="mix", max_tokens=40, ignore_eos=True)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(ask, ["tiny", *names] * 2))
        steps = server.client.get("/v1/engine/steps?limit=1000").json()["data"]
        expected = {"base", *(f"{name}@1" for name in names)}
        assert any(set(step["tokens"]) == expected for step in steps)
        for step in steps:
            assert sum(step["tokens"].values()) == step["prefill_tokens"] + step["decode_tokens"]
        assert len(server.client.get("/v1/engine/steps").json()["data"]) <= DEFAULT_LIMIT
        last = server.client.get("/v1/engine/steps?limit=1").json()["data"]
        assert last == steps[-1:]


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1001", "9" * 5000, "1.0", "²"])
def test_a_bad_limit_of_steps_is_refused(server: Running, limit: str) -> None:
    response = server.client.get("/v1/engine/steps", params={"limit": limit})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "limit"


def test_an_adapter_whose_files_are_gone_is_refused_and_never_served_by_the_base(
    scripted: Path, tmp_path: Path
) -> None:
    with serving(scripted, tmp_path / "data") as server:
        record = server.upload("lost", signature_adapter(scripted, tmp_path / "a", 60)).json()
        blobs = tmp_path / "data" / "adapters" / "blobs"
        (blob,) = blobs.glob(f"*/{record['digest']}")
        blob.rename(tmp_path / "elsewhere")
        body = {"model": "lost", "prompt": "x"}
        for change in ({}, {"stream": True}):
            response = server.client.post("/v1/completions", json=body | change)
            assert response.status_code == 503
            assert response.headers["x-should-retry"] == "false"
            assert "retry-after" not in response.headers
            assert response.json()["error"]["code"] == "adapter_unavailable"
            assert str(tmp_path) not in response.text


def test_a_damaged_adapter_is_mended_by_uploading_it_again(scripted: Path, tmp_path: Path) -> None:
    folder = signature_adapter(scripted, tmp_path / "a", 60)
    with serving(scripted, tmp_path / "data") as server:
        digest = server.upload("broken", folder).json()["digest"]
        (stored,) = (tmp_path / "data").glob(f"adapters/blobs/*/{digest}/{WEIGHTS_FILE}")
        stored.write_bytes(stored.read_bytes()[:-4] + b"ruin")
        body = {"model": "broken", "prompt": "x", "temperature": 0, "max_tokens": 1}
        response = server.client.post("/v1/completions", json=body)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "adapter_unavailable"
        assert str(tmp_path) not in response.text
        assert server.upload("broken", folder).status_code == 200
        assert server.complete("broken", max_tokens=1)["choices"][0]["text"] == "9"


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_an_unreadable_adapter_is_mended_by_uploading_it_again(
    scripted: Path, tmp_path: Path
) -> None:
    folder = signature_adapter(scripted, tmp_path / "a", 60)
    with serving(scripted, tmp_path / "data") as server:
        digest = server.upload("broken", folder).json()["digest"]
        (stored,) = (tmp_path / "data").glob(f"adapters/blobs/*/{digest}/{WEIGHTS_FILE}")
        stored.unlink()
        stored.symlink_to("/proc/self/mem")  # reading it fails, as it does on a bad sector
        body = {"model": "broken", "prompt": "x", "temperature": 0, "max_tokens": 1}
        assert server.client.post("/v1/completions", json=body).status_code == 503
        assert server.upload("broken", folder).status_code == 200
        assert not stored.is_symlink()
        assert server.complete("broken", max_tokens=1)["choices"][0]["text"] == "9"


def test_an_adapter_whose_output_overflows_is_said_so_and_nobody_else_notices(
    llama_base: Path, tmp_path: Path
) -> None:
    """It overflows on one token alone, which no adapter is tried out on before it is accepted."""
    options: dict[str, Any] = {"target_modules": ["embed_tokens"], "lora_alpha": 64}
    folder = make_adapter(llama_base, tmp_path / "a", seed=1, **options)
    tensors = load_file(folder / WEIGHTS_FILE)
    with serving(llama_base, tmp_path / "data") as server:
        ref = adapter_ref(server.engine, folder)
        prompts = smoke_prompts(server.engine.base, ref.manifest, 512).shared
        tried = {token for prompt in prompts for token in prompt}
        wild = next(token for token in range(BYTE0, VOCAB) if token not in tried)
        (a,) = (name for name in tensors if name.endswith("lora_embedding_A"))
        tensors[a][:, wild] = 3e38
        save_file(tensors, folder / WEIGHTS_FILE)
        assert server.upload("wild", folder).status_code == 201
        quiet = server.complete(max_tokens=8)["choices"]
        for change in ({}, {"stream": True}, {"n": 3}, {"logprobs": 5}):
            body = {"model": "wild", "prompt": [wild], "max_tokens": 4} | change
            response = server.client.post("/v1/completions", json=body)
            assert response.status_code == 500
            assert response.headers["x-should-retry"] == "false"
            assert response.json()["error"]["code"] == "output_not_finite"
        assert server.complete(max_tokens=8)["choices"] == quiet
        until(server.idle, 1)


def test_adapters_and_seeds_outlive_a_restart(scripted: Path, tmp_path: Path) -> None:
    seeds, data = tmp_path / "seeds", tmp_path / "data"
    seeds.mkdir()
    for i, name in enumerate(("pirate", "poet")):
        signature_adapter(scripted, seeds / name, 60 + i)
    with serving(scripted, data, seed_adapters=seeds) as server:
        assert server.complete("pirate", max_tokens=1)["choices"][0]["text"] == "9"
        server.upload("mine", seeds / "poet").raise_for_status()
        server.client.delete("/v1/adapters/pirate").raise_for_status()
        before = server.client.get("/v1/adapters").json()
    with serving(scripted, data, seed_adapters=seeds) as server:
        assert server.client.get("/v1/adapters").json() == before
        assert [record["name"] for record in before["data"]] == ["mine", "poet"]
        assert server.complete("mine", max_tokens=1)["choices"][0]["text"] == ":"
