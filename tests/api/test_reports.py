"""What a tenant is told about an upload, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.asking import models, staged, violations
from tests.api.server import Running, serving
from tests.tiny import make_adapter, signature_adapter

pytestmark = pytest.mark.usefixtures("clean")


def send(server: Running, folder: Path, query: str = "", **data: str) -> httpx.Response:
    names = (CONFIG_FILE, WEIGHTS_FILE)
    files = [("files", (name, (folder / name).read_bytes())) for name in names]
    form = {"name": "x"} | data
    return server.client.post(f"/v1/adapters{query}", data=form, files=files)


def altered(folder: Path, source: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of the adapter in `source` with the tensors whose names end so exchanged."""
    folder.mkdir()
    found = load_file(source / WEIGHTS_FILE)
    for end, tensor in tensors.items():
        (name,) = (name for name in found if name.endswith(f"{end}.weight"))
        if tensor is None:
            del found[name]
        else:
            found[name] = tensor
    save_file(found, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_bytes((source / CONFIG_FILE).read_bytes())
    return folder


def test_a_dry_run_tells_all_and_keeps_nothing(server: Running, adapter: Path) -> None:
    response = send(server, adapter, "?validate_only=true")
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "adapter.report" and body["report"]["status"] == "accepted"
    assert models(server) == ["tiny"] and not staged(server)
    assert server.client.get("/v1/adapters/x").status_code == 404
    assert send(server, adapter).json()["report"] == body["report"]
    assert server.client.get("/v1/adapters/x").json()["versions"][0]["version"] == 1


def test_a_dry_run_of_a_bad_adapter_is_refused(
    server: Running, adapter: Path, tmp_path: Path
) -> None:
    half = altered(tmp_path / "half", adapter, lora_B=None)
    response = send(server, half, "?validate_only=true")
    assert violations(response) == {"incomplete_adapter"}


@pytest.mark.parametrize("query", ["?validate_only=yes", "?validate_only=", "?dry_run=true"])
def test_query_parameters_are_read_strictly(server: Running, adapter: Path, query: str) -> None:
    assert send(server, adapter, query).status_code == 400


def test_a_refusal_has_a_report_too(server: Running, adapter: Path, tmp_path: Path) -> None:
    wrong = altered(tmp_path / "wrong", adapter, lora_A=torch.ones(1, 63))
    response = send(server, wrong)
    assert violations(response) == {"shape_mismatch"}
    report = response.json()["report"]
    assert report["status"] == "refused" and report["violations"]
    by_status = {tensor["status"] for tensor in report["tensors"]}
    assert "refused" in by_status and "applied" not in by_status


def test_an_adapter_without_effect_is_refused_unless_meant(
    server: Running, adapter: Path, tmp_path: Path
) -> None:
    zero = altered(tmp_path / "zero", adapter, lora_B=torch.zeros(320, 1))
    response = send(server, zero)
    assert violations(response) == {"no_effect"}
    assert "allow_noop=true" in response.json()["error"]["message"]
    response = send(server, zero, allow_noop="true")
    assert response.status_code == 201 and response.json()["effect"] == 0.0
    assert send(server, zero, allow_noop="maybe").status_code == 400


def test_an_adapter_that_makes_the_output_infinite_is_refused(
    server: Running, adapter: Path, tmp_path: Path
) -> None:
    huge = altered(tmp_path / "huge", adapter, lora_B=torch.full((320, 1), 3e38))
    assert violations(send(server, huge)) == {"output_not_finite"}
    assert server.complete(max_tokens=1)["choices"]


def test_a_content_digest_that_differs_is_refused(server: Running, adapter: Path) -> None:
    digest = send(server, adapter).json()["digest"]
    assert send(server, adapter, digest=f"sha256:{digest}").status_code == 200
    assert violations(send(server, adapter, digest=64 * "0")) == {"digest_mismatch"}
    assert send(server, adapter, digest="0").status_code == 400


def test_reports_of_what_is_not_there(server: Running, adapter: Path) -> None:
    send(server, adapter)
    for path in ("nobody/versions/1", "x/versions/2", "x/versions/01", "x/versions/2/report"):
        response = server.client.get(f"/v1/adapters/{path}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "adapter_not_found"


def test_an_activated_lora_needs_its_invocation(llama_base: Path, tmp_path: Path) -> None:
    folder = make_adapter(llama_base, tmp_path / "a", seed=1, alora_invocation_tokens=[60, 61])
    with serving(llama_base, tmp_path / "data") as server:
        response = server.upload("active", folder)
        assert response.status_code == 201, response.text
        assert "activated" in response.json()["report"]["features"]
        body: dict[str, Any] = {"model": "active", "max_tokens": 1, "prompt": [60, 62, 61]}
        refused = server.client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            400,
            "adapter_not_invoked",
        )
        assert server.client.post("/v1/completions", json=body | {"prompt": [5, 60, 61]}).is_success


def test_a_config_is_never_followed(server: Running, adapter: Path, tmp_path: Path) -> None:
    """A path or an address as the base's name is only told, never opened."""
    for where in ("../../etc/passwd", "file:///etc/passwd", "http://169.254.169.254/latest"):
        folder = signature_adapter(
            Path(server.settings.model), tmp_path / where.replace("/", "_").replace(":", ""), 61
        )
        config = json.loads((folder / CONFIG_FILE).read_text())
        config["base_model_name_or_path"] = where
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        response = send(server, folder, "?validate_only=true")
        assert response.status_code == 200, response.text
        assert any(where in warning for warning in response.json()["report"]["warnings"])
