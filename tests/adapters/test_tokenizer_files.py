from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken as Token
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from adapters.manifest import AddedToken
from adapters.tokenizer_files import (
    MAX_OBJECTS,
    MAX_TEMPLATE_LENGTH,
    BaseTokenizer,
    TokenizerFiles,
    read_tokenizer_files,
)
from base_engine.tokenizer import ChatTokenizer
from tests.tiny import CHAT_TEMPLATE, IM_END, save_tokenizer

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def base(base_folder: Path) -> BaseTokenizer:
    return ChatTokenizer.load(base_folder).identity


@pytest.fixture
def upload(tmp_path: Path) -> Path:
    """The base's own tokenizer files."""
    save_tokenizer(tmp_path)
    return tmp_path


def change(file: Path, edit: Change) -> None:
    data = json.loads(file.read_text()) if file.exists() else {}
    edit(data)
    file.write_text(json.dumps(data, ensure_ascii=False))


def token(id_: int, content: str, **flags: bool) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": id_, "content": content, **dict.fromkeys(names, False), **flags}


def add(folder: Path, *tokens: dict[str, Any]) -> None:
    change(folder / "tokenizer.json", lambda data: data["added_tokens"].extend(tokens))


def refusal(folder: Path, base: BaseTokenizer) -> str:
    files = read_tokenizer_files(folder, base)
    assert not files.usable
    assert files == TokenizerFiles(findings=files.findings)
    (finding,) = files.findings
    assert finding.startswith("not used: ")
    return finding


def test_no_files_say_nothing(tmp_path: Path, base: BaseTokenizer) -> None:
    assert read_tokenizer_files(tmp_path, base) == TokenizerFiles()


def test_the_bases_own_files_change_nothing(upload: Path, base: BaseTokenizer) -> None:
    files = read_tokenizer_files(upload, base)
    assert files.usable
    assert files.findings == (
        "tokenizer.json equals the base's",
        "its chat template equals the base's",
    )
    assert files == TokenizerFiles(files.findings, usable=True)


def test_what_transformers_saved_with_more_tokens(
    base_folder: Path, base: BaseTokenizer, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    tokenizer.add_tokens([Token("<word>", single_word=True), Token(" x", lstrip=True)])
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.chat_template = "{{ messages[0].content }}{{ eos_token }}"
    tokenizer.save_pretrained(tmp_path)
    files = read_tokenizer_files(tmp_path, base)
    assert files.usable
    assert files.added_tokens == (
        AddedToken(IM_END + 1, "<word>", single_word=True, normalized=True),
        AddedToken(IM_END + 2, " x", lstrip=True, normalized=True),
        AddedToken(IM_END + 3, "<|end|>", special=True),
    )
    assert files.special_tokens == (("eos_token", "<|end|>"),)
    assert files.eos_token == "<|end|>"
    assert files.eos_ids == (IM_END + 3,)
    assert files.chat_template == tokenizer.chat_template
    assert files.findings == (
        "tokenizer.json is the base's with more tokens",
        "adds 3 tokens: '<word>', ' x', '<|end|>'",
        "its eos_token is '<|end|>'",
        "its chat template differs from the base's",
    )


def test_a_template_alone_is_taken(tmp_path: Path, base: BaseTokenizer) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ bos_token }}\r\nhi")
    files = read_tokenizer_files(tmp_path, base)
    assert files.usable
    assert files.chat_template == "{{ bos_token }}\nhi"


@pytest.mark.parametrize(
    ("config", "template"),
    [
        ({"chat_template": "one"}, "one"),
        ({"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use"}]}, "d"),
        ({"chat_template": {"default": "d", "rag": "r"}}, "d"),
        ({"chat_template": {"rag": "r"}}, None),
        ({"chat_template": CHAT_TEMPLATE}, None),
        ({"chat_template": None}, None),
        ({}, None),
    ],
)
def test_templates_in_the_config(
    tmp_path: Path, base: BaseTokenizer, config: dict[str, Any], template: str | None
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = read_tokenizer_files(tmp_path, base)
    assert files.usable
    assert files.chat_template == template


def test_the_template_file_wins_over_the_config(upload: Path, base: BaseTokenizer) -> None:
    (upload / "chat_template.jinja").write_text("from the file")
    change(upload / "tokenizer_config.json", lambda data: data.update(chat_template="config"))
    (upload / "chat_template.json").write_text('{"chat_template": "json"}')
    assert read_tokenizer_files(upload, base).chat_template == "from the file"


def test_flags_in_the_config_win_as_in_transformers(upload: Path, base: BaseTokenizer) -> None:
    add(upload, token(IM_END + 1, "<new>"))
    flags = {"content": "<new>", "special": True, "normalized": False}
    change(
        upload / "tokenizer_config.json",
        lambda data: data.update(added_tokens_decoder={str(IM_END + 1): flags}),
    )
    files = read_tokenizer_files(upload, base)
    assert files.added_tokens == (AddedToken(IM_END + 1, "<new>", special=True),)
    loaded = AutoTokenizer.from_pretrained(upload).added_tokens_decoder[IM_END + 1]
    assert loaded.special


@pytest.mark.parametrize(
    ("part", "edit"),
    [
        ("model", lambda d: d["model"]["vocab"].update(extra=261)),
        ("model", lambda d: d["model"].update(byte_fallback=False)),
        ("normalizer", lambda d: d.update(normalizer={"type": "Lowercase"})),
        (
            "pre_tokenizer",
            lambda d: d.update(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            ),
        ),
        ("post_processor", lambda d: d.update(post_processor=None)),
        ("decoder", lambda d: d.pop("decoder")),
    ],
)
def test_what_differs_beyond_added_tokens_is_not_used(
    upload: Path, base: BaseTokenizer, part: str, edit: Change
) -> None:
    change(upload / "tokenizer.json", edit)
    finding = refusal(upload, base)
    assert f"differs from the base's beyond added tokens (in: {part})" in finding


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([token(IM_END + 2, "<a>")], "must go on from 261 without a gap"),
        ([token(IM_END + 1, "<a>"), token(IM_END + 3, "<b>")], "must go on from 261"),
        ([token(10, "<a>")], "gives '<a>' the id 10, which is the base's token '<0x07>'"),
        ([token(IM_END, "<a>")], "gives the id 260 to two tokens"),
        ([token(IM_END + 1, "<0x07>")], "the token '<0x07>' twice"),
        ([token(IM_END + 1, "<a>"), token(IM_END + 2, "<a>")], "the token '<a>' twice"),
        ([token(IM_END + 1, "x" * 257)], "cannot be read"),
        ([token(IM_END + 1, "")], "cannot be read"),
        ([token(-1, "<a>")], "cannot be read"),
        ([token(IM_END + 1 + i, f"<{i}>") for i in range(4097)], "adds 4097 tokens; at most 4096"),
        ([{**token(IM_END + 1, "<a>"), "odd": 1}], "cannot be read"),
    ],
)
def test_added_tokens_that_cannot_be_are_not_used(
    upload: Path, base: BaseTokenizer, tokens: list[dict[str, Any]], message: str
) -> None:
    add(upload, *tokens)
    assert message in refusal(upload, base)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["added_tokens"].pop(), "lacks the base's added token '<|im_end|>'"),
        (lambda d: d["added_tokens"][3].update(lstrip=True), "changes the base's added token"),
        (lambda d: d["added_tokens"][3].update(content="<x>"), "changes the base's added token"),
        (lambda d: d.pop("model"), "cannot be read"),
    ],
)
def test_the_bases_own_tokens_must_stay(
    upload: Path, base: BaseTokenizer, edit: Change, message: str
) -> None:
    change(upload / "tokenizer.json", edit)
    assert message in refusal(upload, base)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "<nowhere>"}, "special token '<nowhere>' is not among its added tokens"),
        ({"extra_special_tokens": ["<nowhere>"]}, "not among its added tokens"),
        ({"extra_special_tokens": {"image_token": "<nowhere>"}}, "not among its added tokens"),
        ({"image_token": "<nowhere>"}, "not among its added tokens"),
        ({"additional_special_tokens": 5}, "is no list"),
        ({"bos_token": None}, "it has no bos_token; the base's is '<bos>'"),
        ({"bos_token": 7}, "is no text"),
        ({"auto_map": {"AutoTokenizer": ["evil.Tok", None]}}, "code of its own"),
        ({"split_special_tokens": True}, "split_special_tokens"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "bad added_tokens_decoder"),
        ({"added_tokens_decoder": {"261": {"content": "<a>"}}}, "no tokenizer.json to compare"),
        ({"added_tokens_decoder": {"0": {"content": "<a>"}}}, "changes the base's added token"),
        ({"chat_template": 5}, "no text"),
        ({"chat_template": "x" * (MAX_TEMPLATE_LENGTH + 1)}, "at most 65536"),
    ],
)
def test_a_config_that_cannot_be_followed(
    tmp_path: Path, base: BaseTokenizer, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert message in refusal(tmp_path, base)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b"[" * 100_000, b'{"a": NaN}', b"\xff\xfe", b'{"model": {}} x']
)
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.json"]
)
def test_broken_json_is_a_finding(
    tmp_path: Path, base: BaseTokenizer, name: str, raw: bytes
) -> None:
    (tmp_path / name).write_bytes(raw)
    assert f"{name} cannot be read" in refusal(tmp_path, base)


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path, base: BaseTokenizer) -> None:
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(65 << 20)
    assert "at most 67108864 are taken" in refusal(tmp_path, base)


def test_a_crowd_of_tokens_is_not_even_read(upload: Path, base: BaseTokenizer) -> None:
    add(upload, *(token(261 + i, f"<{i}>") for i in range(MAX_OBJECTS)))
    start = time.process_time()
    assert f"more than {MAX_OBJECTS} objects" in refusal(upload, base)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("id_", [2**31, 2**40, 2**62, 2**70, -7])
def test_ids_that_no_tokenizer_has_are_a_finding(
    upload: Path, base: BaseTokenizer, id_: int
) -> None:
    add(upload, token(id_, "<x>"))
    assert refusal(upload, base)
    save_tokenizer(upload)
    change(
        upload / "tokenizer_config.json",
        lambda d: d.update(added_tokens_decoder={str(id_): {"content": "<x>"}}),
    )
    assert refusal(upload, base)


def test_links_are_not_followed(tmp_path: Path, base_folder: Path, base: BaseTokenizer) -> None:
    os.symlink(base_folder / "tokenizer.json", tmp_path / "tokenizer.json")
    assert "not a regular file" in refusal(tmp_path, base)


def test_legacy_added_tokens_must_agree(upload: Path, base: BaseTokenizer) -> None:
    add(upload, token(IM_END + 1, "<a>"))
    (upload / "added_tokens.json").write_text(f'{{"<a>": {IM_END + 1}}}')
    assert read_tokenizer_files(upload, base).usable
    (upload / "added_tokens.json").write_text(f'{{"<a>": {IM_END + 2}}}')
    assert "added_tokens.json gives '<a>' the id 262, the other files 261" in refusal(upload, base)


def test_a_base_without_tokenizer_json_is_not_comparable(upload: Path, base: BaseTokenizer) -> None:
    bare = replace(base, texts=lambda: ())
    assert "not the base's in any part" in refusal(upload, bare)


def merging(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer with merges, a normalizer and a regular expression."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "he", "ll", "hell", "é!"])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    fast.save_pretrained(folder)
    return fast


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("field", [True, False])
def test_older_spellings_of_the_same_file_are_the_same(
    tmp_path: Path, joined: bool, field: bool
) -> None:
    folder, upload = tmp_path / "base", tmp_path / "upload"
    merging(folder)
    merging(upload)
    base = ChatTokenizer.load(folder).identity

    def older(data: dict[str, Any]) -> None:
        model = data["model"]
        if joined:
            model["merges"] = [" ".join(pair) for pair in model["merges"]]
        if not field:
            del model["ignore_merges"]

    change(upload / "tokenizer.json", older)
    assert read_tokenizer_files(upload, base).usable
    change(upload / "tokenizer.json", lambda data: data["model"].update(ignore_merges=True))
    assert "(in: model)" in refusal(upload, base)
