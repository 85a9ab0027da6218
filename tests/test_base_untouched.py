"""Whatever is uploaded, the base and the other adapters stay what they are, to the last bit."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE, AdapterRef
from adapters.validation import Limits, validate
from api.settings import ByteSize
from base_engine.engine import Engine
from tests.api.asking import models, staged
from tests.api.server import Running, serving, until
from tests.fuzz.hostile_archives import BOMB_BYTES
from tests.generation import request
from tests.hostile import Hostile, corpus
from tests.tiny import byte_ids, make_adapter

_PROMPT = byte_ids("The base is never touched, whatever comes.")


@pytest.fixture(scope="module")
def server(llama_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limit = ByteSize(BOMB_BYTES // 2)
    with serving(llama_base, tmp_path_factory.mktemp("data"), max_upload=limit) as running:
        yield running


def test_nothing_of_a_refused_upload_is_left(
    server: Running, llama_base: Path, tmp_path: Path
) -> None:
    others = _others(server, llama_base, tmp_path)
    good = _files(make_adapter(llama_base, tmp_path / "good", seed=3, target_modules=["q_proj"]))
    marker = tmp_path / "marker"
    before, logits = _digest(server.engine), _logits(server.engine, others)
    wrong = []
    names = set()
    for upload in corpus(good, llama_base, marker):
        assert upload.name not in names
        names.add(upload.name)
        answer = _answered(server, upload)
        if answer is not None:
            wrong.append(f"{upload.name}: {answer}")
        assert _digest(server.engine) == before, upload.name
        after = _logits(server.engine, others)
        assert all(map(torch.equal, logits, after)), upload.name
    assert not wrong, "\n".join(wrong)
    assert not marker.exists()
    until(lambda: not staged(server), 5)
    assert models(server) == ["tiny", "dora", "plain"]
    assert server.idle()
    # The name was never taken, and takes a good adapter now.
    response = server.client.post("/v1/adapters", data={"name": "x"}, files=_form(good.items()))
    assert response.status_code == 201 and response.json()["version"] == 1


def _answered(server: Running, upload: Hostile) -> str | None:
    """What is wrong with the answer to `upload`."""
    form = {"name": "x", **upload.fields}
    response = server.client.post("/v1/adapters", data=form, files=_form(upload.files))
    error = response.json().get("error", {})
    codes = {violation["code"] for violation in error.get("violations", ())} or {error.get("code")}
    if response.status_code != upload.status or upload.code not in codes:
        return f"{response.status_code} {sorted(map(str, codes))}, not {upload.code}"
    if len(error["message"]) > 1000:
        return f"a message of {len(error['message'])} characters"
    return None


def _form(files: Iterable[tuple[str, bytes]]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", file) for file in files]


def _others(server: Running, base: Path, root: Path) -> list[AdapterRef | None]:
    """The base and two adapters that are there all the time."""
    others: list[AdapterRef | None] = [None]
    rare = {"use_dora": True, "modules_to_save": ["lm_head"], "target_modules": ["v_proj"]}
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "dora": rare}
    for name, options in kinds.items():
        folder = make_adapter(base, root / name, seed=len(name), **options)
        assert server.upload(name, folder).status_code == 201
        parameters = server.engine.decoder.parameter
        manifest = validate(folder, server.engine.base, Limits(), parameters=parameters)
        others.append(AdapterRef(manifest.digest, name, folder, manifest))
    return others


def _digest(engine: Engine) -> str:
    """Of all parameters and buffers of the base."""
    digest = hashlib.sha256()
    model = engine.decoder.model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _logits(engine: Engine, adapters: list[AdapterRef | None]) -> list[Tensor]:
    """Of the prompt under each of `adapters`, one after the other."""

    async def ask(adapter: AdapterRef | None) -> Tensor:
        asked = request(_PROMPT, adapter, 1, logits=True)
        (logits,) = [e.logits async for e in engine.submit(asked) if e.logits is not None]
        return logits

    return [asyncio.run(ask(adapter)) for adapter in adapters]


def _files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
