"""Chats for training: what carries loss, and which lines are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scripts.chats import NO_LOSS, Chat, ChatsError, Example, Message, encode, load_examples, render
from tests.tiny import save_tokenizer

GOOD = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


def test_only_the_assistants_words_and_end_of_turn_carry_loss(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    example = encode(_chat("system:Be brief.", "user:Hi", "assistant:Yo"), tokenizer)
    assert _with_loss(example, tokenizer) == "Yo<|im_end|>\n"


def test_every_turn_of_the_assistant_carries_loss(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = _chat("user:one", "assistant:eins", "user:two", "assistant:zwei")
    example = encode(chat, tokenizer)
    assert _with_loss(example, tokenizer) == "eins<|im_end|>\nzwei<|im_end|>\n"


def test_the_ids_are_those_of_the_whole_rendered_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = _chat("system:Be brief.", "user:a", "assistant:b", "user:c", "assistant:d é 🦜")
    messages = [{"role": m.role, "content": m.content} for m in chat.messages]
    whole = render(tokenizer, messages, add_generation_prompt=False)
    assert encode(chat, tokenizer).ids == tokenizer.encode(whole, add_special_tokens=False)


def test_a_template_that_rewrites_earlier_text_is_refused(tmp_path: Path) -> None:
    """Templates that drop an earlier turn's reasoning make the mask impossible to place."""
    save_tokenizer(
        tmp_path,
        chat_template="{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    with pytest.raises(ChatsError, match="changes earlier text when message 1 is added"):
        encode(_chat("user:a", "assistant:b"), AutoTokenizer.from_pretrained(tmp_path))


def test_a_template_that_leaves_out_the_answer_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template="{{ messages[0].content }}")
    with pytest.raises(ChatsError, match="writes nothing for the assistant"):
        encode(_chat("user:a", "assistant:b"), AutoTokenizer.from_pretrained(tmp_path))


def test_a_chat_that_the_template_refuses_is_an_error_of_its_line(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template="{{ raise_exception('no system role') }}")
    data = tmp_path / "chats.jsonl"
    data.write_text(GOOD)
    with pytest.raises(ChatsError, match=r"chats\.jsonl:1: .*no system role"):
        load_examples(data, AutoTokenizer.from_pretrained(tmp_path), 100)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "malformed"),
        ("[]", "Expected `object`"),
        ("{}", "missing required field `messages`"),
        ('{"messages": []}', "last message must be the assistant's"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "last message must be"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "'robot'"),
        ('{"messages": [{"role": "assistant", "content": 5}]}', "got `int`"),
        ('{"messages": [{"role": "assistant", "content": "  "}]}', "message 0 has no content"),
        (GOOD[:-1] + ', "tools": []}', "unknown field `tools`"),
        (GOOD.replace('"Yo"', '"Yo", "name": "x"'), "unknown field `name`"),
        (GOOD.replace("Yo", "Yo" * 100), r"\d+ tokens, more than --max-tokens 100"),
        (GOOD.replace("Yo", "\udcff"), "Invalid UTF-8"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, line: str, reason: str
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(f"{GOOD}\n\n{line}\n", errors="surrogateescape")
    with pytest.raises(ChatsError, match=rf"chats\.jsonl:3: .*{reason}"):
        load_examples(data, tokenizer, 100)


def test_all_bad_lines_are_named_up_to_ten(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join([GOOD, *["{"] * 12]))
    with pytest.raises(ChatsError) as caught:
        load_examples(data, tokenizer, 100)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines[:-1]] == [str(n) for n in range(2, 12)]
    assert lines[-1] == "… and 2 more bad lines"


def test_a_file_without_chats_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("\n\n")
    with pytest.raises(ChatsError, match="no chats in it"):
        load_examples(data, tokenizer, 100)


def test_line_separators_inside_a_message_do_not_split_the_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """U+2028 and form feed count as line breaks for `str.splitlines`, not for JSONL."""
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps(_plain("user:a\u2028b", "assistant:c\x85d"), ensure_ascii=False))
    (example,) = load_examples(data, tokenizer, 100)
    assert _with_loss(example, tokenizer) == "c\x85d<|im_end|>\n"


def _chat(*turns: str) -> Chat:
    return Chat([Message(**m) for m in _plain(*turns)["messages"]])  # type: ignore[arg-type]


def _plain(*turns: str) -> dict[str, list[dict[str, str]]]:
    pairs = (turn.split(":", 1) for turn in turns)
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def _with_loss(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    assert len(example.labels) == len(example.ids)
    kept = [i for i, label in zip(example.ids, example.labels, strict=True) if label != NO_LOSS]
    assert kept == [label for label in example.labels if label != NO_LOSS]
    return str(tokenizer.decode(kept))
