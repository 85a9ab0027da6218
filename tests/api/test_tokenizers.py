"""Added tokens and chat templates that come with an adapter, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from adapters.manifest import CONFIG_FILE, WEIGHTS_FILE
from tests.api.asking import violations
from tests.api.server import Running, serving
from tests.tiny import CHAT_TEMPLATE, make_adapter, oracle_logprobs, tiny_base

#: As many ids as the byte tokenizer has tokens: what is added comes beyond the base's vocabulary.
VOCAB = 261
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHAT = [{"role": "user", "content": "say <polly> twice"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base") / "tiny", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def wide(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with two added tokens, and the tokenizer that knows them."""
    folder = make_adapter(base, tmp_path_factory.mktemp("wide") / "adapter", seed=1, added_tokens=2)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<polly>", "<cracker>"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("plain") / "adapter", seed=2)


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    data = tmp_path_factory.mktemp("data")
    with serving(base, data, adapter_tokenizers="other, default") as running:
        yield running


def upload(server: Running, name: str, folder: Path, template: str | None = None) -> httpx.Response:
    """The adapter with its tokenizer files, and with `template` in a file of its own."""
    names = (CONFIG_FILE, WEIGHTS_FILE, *TOKENIZER_FILES)
    sent = {n: (folder / n).read_bytes() for n in names if (folder / n).exists()}
    if template is not None:
        sent["chat_template.jinja"] = template.encode()
    files = [("files", item) for item in sent.items()]
    return server.client.post("/v1/adapters", data={"name": name}, files=files)


def test_added_tokens_are_read_and_written_by_their_adapter_alone(
    server: Running, base: Path, wide: Path
) -> None:
    response = upload(server, "wide", wide)
    assert response.status_code == 201, response.text
    report = response.json()["report"]
    assert {"added_vocabulary", "added_tokens"} <= set(report["features"])
    assert any("adds 2 tokens: '<polly>', '<cracker>'" in line for line in report["tokenizer"])
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 6, "temperature": 0, "logprobs": True}
    headers = {"x-lorikeet-trace": "1"}
    ids: Any
    for model, ids in (("wide", AutoTokenizer.from_pretrained(wide)), ("tiny", None)):
        answer = server.client.post(
            "/v1/chat/completions", json=body | {"model": model}, headers=headers
        ).json()
        choice = answer["lorikeet"]["choices"][0]
        prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
        if ids is None:
            assert max(prompt) < VOCAB and max(tokens) < VOCAB
            continue
        assert prompt == ids.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        assert VOCAB in prompt
        want = oracle_logprobs(base, wide, prompt + tokens)[len(prompt) - 1 : -1]
        got = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
        chosen = want[torch.arange(len(tokens)), torch.tensor(tokens)][: len(got)]
        torch.testing.assert_close(torch.tensor(got), chosen, atol=1e-4, rtol=0)
    last: dict[str, Any] = {"prompt": [5, VOCAB + 1], "max_tokens": 1}
    assert server.complete("wide", **last)["choices"]
    refused = server.client.post("/v1/completions", json=last | {"model": "tiny"})
    assert refused.json()["error"]["code"] == "invalid_token_id"


def test_without_permission_added_vocabulary_is_refused(
    base: Path, wide: Path, tmp_path: Path
) -> None:
    with serving(base, tmp_path / "data", adapter_tokenizers="other") as server:
        response = upload(server, "wide", wide)
        assert violations(response) == {"tokenizer_needed"}
        assert "--adapter-tokenizers" in response.json()["error"]["message"]


def test_without_its_tokenizer_added_vocabulary_is_refused(server: Running, wide: Path) -> None:
    response = server.upload("bare", wide)
    assert violations(response) == {"tokenizer_needed"}
    assert "must be uploaded with it (none came)" in response.json()["error"]["message"]


def test_without_permission_a_template_is_told_and_not_used(
    base: Path, plain: Path, tmp_path: Path
) -> None:
    with serving(base, tmp_path / "data") as server:
        response = upload(server, "told", plain, template="{{ pad_token }}")
        assert response.status_code == 201
        assert response.json()["report"]["tokenizer"] == [
            "its chat template differs from the base's"
        ]
        assert _prompt(server, "told") == _prompt(server, "tiny")


def test_one_content_with_two_templates_is_two_versions(server: Running, plain: Path) -> None:
    loud = "{{ pad_token }}{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    first = upload(server, "speech", plain, template=loud)
    second = upload(server, "speech", plain, template=CHAT_TEMPLATE)
    assert [r.status_code for r in (first, second)] == [201, 201], first.text
    assert first.json()["digest"] == second.json()["digest"]
    assert _prompt(server, "speech@1") == [0, *(3 + b for b in b"SAY <POLLY> TWICE")]
    assert _prompt(server, "speech@2") == _prompt(server, "tiny")
    assert upload(server, "speech", plain, template=CHAT_TEMPLATE).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 500000000 }}",
        "{{ raise_exception('never') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
        "{% if %}",
    ],
)
def test_templates_that_cannot_be_used_are_refused_and_nobody_waits(
    server: Running, plain: Path, template: str
) -> None:
    assert violations(upload(server, "evil", plain, template=template)) == {"invalid_chat_template"}
    assert server.complete(max_tokens=1)["choices"]


def test_a_template_may_refuse_a_conversation(server: Running, plain: Path) -> None:
    picky = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('not you first') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert upload(server, "picky", plain, template=picky).status_code == 201
    body = {"model": "picky", "messages": [{"role": "assistant", "content": "hi"}]}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "chat_template_error" and "not you first" in error["message"]


def _prompt(server: Running, model: str) -> list[int]:
    body = {"model": model, "messages": CHAT, "max_tokens": 1}
    headers = {"x-lorikeet-trace": "1"}
    response = server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    ids: list[int] = json.loads(response.text)["lorikeet"]["choices"][0]["prompt_token_ids"]
    return ids
