"""The whole way of a user, on a real server process: adapters in, mixed answers out, restarts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import torch
from openai import AsyncOpenAI

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.archive_files import tar_of, zip_of
from tests.process import ServerProcess, server_process, token_ids
from tests.tiny import BYTE0, make_adapter, oracle_logprobs, signature_adapter

#: Adapters of every shape: ranks, targets, scales and types differ.
SHAPES: list[dict[str, Any]] = [
    {},
    {"r": 1, "lora_alpha": 1},
    {"r": 16, "lora_alpha": 8},
    {"r": 9, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "rank_pattern": {"down_proj": 20}, "target_modules": "all-linear"},
    {"target_modules": r".*layers\.1\..*_proj"},
    {"target_modules": ["o_proj", "lm_head"], "alpha_pattern": {"o_proj": 3}},
    {"dtype": torch.bfloat16},
]
NAMES = [f"shape-{i}" for i in range(len(SHAPES))]
TOKENS = 96


def upload_packed(server: ServerProcess, name: str, folder: Path, kind: str) -> httpx.Response:
    """The adapter in `folder` as plain files or as an archive of `kind`."""
    if kind == "files":
        return server.upload(name, folder)
    members = {f"{name}/{f}": (folder / f).read_bytes() for f in (CONFIG_FILE, WEIGHTS_FILE)}
    packed = zip_of(members) if kind == "zip" else tar_of(members)
    file = ("file", (f"{name}.{kind}", packed))
    return server.client.post("/v1/adapters", data={"name": name}, files=[file])


def ask_all(server: ServerProcess, models: list[str]) -> list[Any]:
    """A chat with each of `models`, all at once, by the openai package; greedy with logprobs."""

    async def run() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
            chats = [
                client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": f"question {i} to {model}"}],
                    max_tokens=TOKENS,
                    temperature=0,
                    logprobs=True,
                    extra_body={"ignore_eos": True},
                    extra_headers={"x-lorikeet-trace": "1"},
                )
                for i, model in enumerate(models)
            ]
            return [answer.model_dump() for answer in await asyncio.gather(*chats)]

    return asyncio.run(run())


def assert_exact(base: Path, adapter: Path | None, answer: Any) -> None:
    """`answer` is what PEFT chooses greedily, with its log-probabilities at every position."""
    (trace,) = answer["lorikeet"]["choices"]
    prompt, tokens = trace["prompt_token_ids"], trace["token_ids"]
    assert len(tokens) == TOKENS
    want = oracle_logprobs(base, adapter, prompt + tokens)[len(prompt) - 1 : -1]
    chosen = want.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    entries = answer["choices"][0]["logprobs"]["content"]
    got = torch.tensor([entry["logprob"] for entry in entries])
    torch.testing.assert_close(got, chosen, atol=1e-4, rtol=0)
    # A tie within the tolerance may go either way; anything else must be the most likely token.
    assert (want.max(-1).values - chosen).max() < 2e-4


def test_eight_adapters_and_the_base_share_steps_and_each_is_exact(
    llama_base: Path, tmp_path: Path
) -> None:
    folders: dict[str, Path | None] = {"tiny": None}
    for i, (name, shape) in enumerate(zip(NAMES, SHAPES, strict=True)):
        folders[name] = make_adapter(llama_base, tmp_path / name, seed=i, **shape)
    data = tmp_path / "data"
    # Sixteen requests over nine models: each adapter once or twice, the base once.
    models = [*NAMES, "tiny", *NAMES[:7]]
    with server_process(llama_base, data) as server:
        for i, name in enumerate(NAMES):
            folder = folders[name]
            assert folder is not None
            response = upload_packed(server, name, folder, ("files", "zip", "tar.gz")[i % 3])
            assert response.status_code == 201, response.text
        listed = [model["id"] for model in server.client.get("/v1/models").json()["data"]]
        assert sorted(listed) == sorted(folders)
        answers = ask_all(server, models)
        steps = server.client.get("/v1/engine/steps?limit=1000").json()["data"]
        records = server.adapters()
    together = {f"{name}@1" for name in NAMES} | {"base"}
    assert any(set(step["tokens"]) == together for step in steps)
    for model, answer in zip(models, answers, strict=True):
        assert answer["model"] == model
        (trace,) = answer["lorikeet"]["choices"]
        assert trace["max_adapters"] == 9 and 0 < trace["mixed_steps"] <= trace["steps"]
        assert_exact(llama_base, folders[model], answer)

    with server_process(llama_base, data) as server:
        assert server.adapters() == records
        for model, before, after in zip(models, answers, ask_all(server, models), strict=True):
            assert token_ids(after) == token_ids(before), model
            assert_exact(llama_base, folders[model], after)


def test_a_name_moves_on_while_its_old_version_answers(scripted: Path, tmp_path: Path) -> None:
    """Each version says its own letter, over and over."""
    first, second = (
        signature_adapter(scripted, tmp_path / letter, BYTE0 + ord(letter)) for letter in "AB"
    )

    def text(server: ServerProcess, model: str) -> str:
        answer = server.complete(model, max_tokens=4)
        said: str = answer["choices"][0]["text"]
        return said

    with server_process(scripted, tmp_path / "data") as server:
        assert server.upload("letter", first).json()["version"] == 1
        body = {"model": "letter", "prompt": "!", "max_tokens": 400, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            parts = [next(lines)]
            assert server.upload("letter", second).json()["version"] == 2
            generated = server.gauges()["generated_tokens_total"]
            assert text(server, "letter") == "BBBB"
            assert generated < 400, "the stream had ended before the upload"
            parts += lines
        streamed = "".join(json.loads(part[6:])["choices"][0]["text"] for part in parts)
        assert streamed == "A" * 400
        assert text(server, "letter@1") == "AAAA"
        assert text(server, "letter@latest") == text(server, "letter@2") == "BBBB"

    with server_process(scripted, tmp_path / "data") as server:
        assert [version["version"] for version in server.adapters()["letter"]] == [1, 2]
        assert text(server, "letter") == "BBBB" and text(server, "letter@1") == "AAAA"
        assert server.client.delete("/v1/adapters/letter").status_code == 200
        for model in ("letter", "letter@1", "letter@2"):
            missing = {"model": model, "prompt": "!"}
            assert server.client.post("/v1/completions", json=missing).status_code == 404
        assert "letter" not in server.adapters()

    with server_process(scripted, tmp_path / "data") as server:
        assert server.adapters() == {}
        assert server.upload("letter", first).json()["version"] == 3
        assert text(server, "letter") == "AAAA"
