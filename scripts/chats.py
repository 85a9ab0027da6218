"""Chats to train on: JSONL in, token ids with a loss mask out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2
import msgspec
from transformers import PreTrainedTokenizerBase

#: Label of a position without loss, as transformers' loss functions have it.
NO_LOSS = -100

_ERRORS_SHOWN = 10


class ChatsError(Exception):
    """The data cannot be trained on; the message names file, line and reason."""


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class Chat(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    messages: list[Message]


@dataclass(frozen=True)
class Example:
    """A chat as token ids; `labels[i]` is `ids[i]` where it carries loss, else NO_LOSS."""

    ids: list[int]
    labels: list[int]


def load_examples(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[Example]:
    """Every chat of a JSONL file as an example. Raises ChatsError naming all bad lines."""
    examples, errors = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            chat = msgspec.json.decode(line, type=Chat)
            example = encode(chat, tokenizer)
            if len(example.ids) > max_tokens:
                raise ChatsError(f"{len(example.ids)} tokens, more than --max-tokens {max_tokens}")
            examples.append(example)
        except (msgspec.DecodeError, UnicodeDecodeError, ChatsError) as e:
            errors.append(f"{path}:{number}: {e}")
    if errors:
        more = len(errors) - _ERRORS_SHOWN
        tail = [f"… and {more} more bad lines"] if more > 0 else []
        raise ChatsError("\n".join(errors[:_ERRORS_SHOWN] + tail))
    if not examples:
        raise ChatsError(f"{path}: no chats in it")
    return examples


def encode(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Token ids of a chat, with loss on what the template writes for the assistant's messages.

    That is the difference between the text up to the generation prompt and the text that includes
    the message, so it holds the end-of-turn token too. The pieces are tokenized apart, just as a
    server tokenizes a prompt that ends with the generation prompt.
    """
    if not chat.messages or chat.messages[-1].role != "assistant":
        raise ChatsError("the last message must be the assistant's")
    if empty := [i for i, m in enumerate(chat.messages) if not m.content.strip()]:
        raise ChatsError(f"message {empty[0]} has no content")
    messages = [{"role": m.role, "content": m.content} for m in chat.messages]
    ids: list[int] = []
    labels: list[int] = []
    text = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:i], add_generation_prompt=True)
        answered = render(tokenizer, messages[: i + 1], add_generation_prompt=False)
        if not (prompt.startswith(text) and answered.startswith(prompt)):
            raise ChatsError(
                f"the chat template changes earlier text when message {i} is added, "
                "so its tokens cannot be told from the prompt's"
            )
        for piece, has_loss in ((prompt[len(text) :], False), (answered[len(prompt) :], True)):
            piece_ids = tokenizer.encode(piece, add_special_tokens=False)
            ids += piece_ids
            labels += piece_ids if has_loss else [NO_LOSS] * len(piece_ids)
        text = answered
    if all(label == NO_LOSS for label in labels):
        raise ChatsError("the chat template writes nothing for the assistant's messages")
    return Example(ids, labels)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    *,
    add_generation_prompt: bool,
) -> str:
    """The text the base's template makes of `messages`. Raises ChatsError where it refuses."""
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (jinja2.TemplateError, ValueError) as e:
        raise ChatsError(f"the base's chat template refuses this chat: {e}") from e
    return str(text)
