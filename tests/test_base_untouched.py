"""After every hostile upload the base and all other adapters are, bit by bit, what they were."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.asking import post, staged, violations
from tests.api.server import Running, serving
from tests.hostile import HOSTILE, Hostile
from tests.tiny import make_adapter, tiny_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base") / "tiny", "llama-bias")


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serves two adapters. Without prefix reuse equal requests have equal shapes, so equal bits."""
    folder = tmp_path_factory.mktemp("served")
    rare: dict[str, Any] = {"use_dora": True, "bias": "all", "modules_to_save": ["lm_head"]}
    with serving(base, folder / "data", prefix_cache=False) as running:
        for name, options in (("plain", {}), ("rare", rare)):
            adapter = make_adapter(base, folder / name, seed=1, **options)
            assert running.upload(name, adapter).status_code == 201
        yield running


@pytest.fixture(scope="module")
def before(server: Running) -> dict[str, Any]:
    return state(server)


def state(server: Running) -> dict[str, Any]:
    """The digest of all the base's parameters and buffers, and what everybody answers."""
    digest = hashlib.sha256()
    model = server.engine.decoder.model
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    answers = {
        name: server.complete(name, prompt="Polly wants", max_tokens=4, logprobs=5)["choices"]
        for name in ("tiny", "plain", "rare")
    }
    return {"sha256": digest.hexdigest(), **answers}


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_it_is_refused_and_nothing_has_changed(
    server: Running, before: dict[str, Any], hostile: Hostile, tmp_path: Path, base: Path
) -> None:
    good = make_adapter(base, tmp_path / "good", seed=7, target_modules=["q_proj"])
    config, weights = ((good / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE))
    response = post(server, "evil", hostile.make(config, weights))
    assert hostile.codes <= violations(response), response.text
    assert response.json()["report"]["status"] == "refused"
    assert not staged(server)
    assert state(server) == before
    assert server.client.get("/v1/adapters/evil").status_code == 404


def test_the_name_is_free_afterwards(server: Running, base: Path, tmp_path: Path) -> None:
    good = make_adapter(base, tmp_path / "good", seed=7, target_modules=["q_proj"])
    assert server.upload("evil", good).json()["version"] == 1
    server.client.delete("/v1/adapters/evil").raise_for_status()
