"""Text to token ids and back: chat templates, incremental text, stop strings."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from adapters.manifest import AdapterManifest, AddedToken
from adapters.tokenizer_files import BaseTokenizer
from base_engine.detokenizer import ByteDecoder, TextDecoder, WindowDecoder, byte_scheme
from base_engine.template_process import ChatTemplateError, TemplateRenderer
from base_engine.vocabulary import default_template, described, extended

__all__ = ["ChatTemplateError", "ChatTemplateMissing", "ChatTokenizer", "TextStream"]

#: What a template can raise on messages it was not written for.
_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)


class ChatTemplateMissing(Exception):
    """The tokenizer has no chat template, so messages cannot become a prompt."""


class ChatTokenizer:
    """A transformers tokenizer, seen as bytes per token.

    `eos_ids` holds the tokenizer's own end token, if it has one; the model's configuration may
    name more. Ids with a token lie below `vocab_size`: the model's head may be wider. No token
    stands for more than `longest_token` characters, white space that an added token may take in
    aside; None where one may stand for any number.

    Thread-safe. `close` ends the processes in which adapters' chat templates are rendered.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special: dict[str, str] = {}
        self._template: str | None = None
        self._renderer = TemplateRenderer()
        self._derived = lru_cache(maxsize=_DERIVED)(self._derive)
        self._deriving = threading.Lock()
        vocab = tokenizer.get_vocab()
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        eos = tokenizer.eos_token_id
        self.eos_ids: frozenset[int] = frozenset(() if eos is None else (eos,))
        added = tokenizer.added_tokens_decoder
        self._literal = {i: str(token) for i, token in added.items() if token.special}
        self._scheme = byte_scheme(tokenizer)
        # Where bytes have tokens of their own, no unknown word becomes one token.
        self.longest_token = max(map(len, vocab)) if vocab and self._scheme is not None else None
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder_or_id: str | Path) -> ChatTokenizer:
        """Load through transformers' AutoTokenizer; code that comes with a model never runs."""
        return cls(AutoTokenizer.from_pretrained(folder_or_id, trust_remote_code=False))

    def close(self) -> None:
        """No adapter's chat template is rendered after this."""
        self._renderer.close()

    def for_adapter(self, manifest: AdapterManifest) -> ChatTokenizer:
        """This tokenizer with what the adapter's own has beyond it; itself if that is nothing.

        A few are kept. The first use of an adapter with added tokens copies the vocabulary, which
        may take a second. Raises ValueError where the added tokens do not fit this tokenizer.
        """
        own = (manifest.added_tokens, manifest.special_tokens, manifest.chat_template)
        if not any(own):
            return self
        with self._deriving:  # a crowd's first requests make one copy
            return self._derived(*own)

    @cached_property
    def identity(self) -> BaseTokenizer:
        """What the tokenizer files that come with an adapter are compared with."""
        return described(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer itself adds."""
        ids: list[int] = self._tokenizer.encode(text, verbose=False)
        return ids

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant begins to speak.

        The template alone writes special tokens: none is added in front. A content of None or
        none at all counts as "". Raises ChatTemplateMissing or ChatTemplateError.
        """
        filled = [m if m.get("content") is not None else {**m, "content": ""} for m in messages]
        # Rendered apart, so that a failure to tokenize is not taken for the template's.
        if self._template is not None:
            special = {**self._tokenizer.special_tokens_map, **self._special}
            prompt = self._renderer.render(self._template, filled, special)
        else:
            prompt = self._base_prompt(filled)
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text that a `TextStream` gives for `ids`; special tokens on request."""
        stream = self.text_decoder(skip_special=skip_special)
        return "".join([stream.push(i) for i in ids]) + stream.finish()

    def token_text(self, token_id: int) -> str:
        """One token by itself, special or not; U+FFFD where it is part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes one token stands for; b"" for an id that has no token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id)
        return known

    def text_decoder(self, *, continues: bool = False, skip_special: bool = True) -> TextDecoder:
        """An incremental decoder; `continues` keeps a leading space, as text follows a prompt."""
        hidden = self._literal if skip_special else ()
        if self._scheme is None:
            return WindowDecoder(self._decode, hidden)
        return ByteDecoder(self.token_bytes, hidden, 0 if continues else self._scheme.strip)

    def _base_prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """By the base's template, which the operator trusts: in this process."""
        if not default_template(self._tokenizer):
            raise ChatTemplateMissing(
                "the base model's tokenizer has no chat template; use text completions instead"
            )
        try:
            prompt: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._special
            )
        except _TEMPLATE_FAILURES as error:
            raise ChatTemplateError(str(error)) from error
        return prompt

    def _derive(
        self,
        added: tuple[AddedToken, ...],
        special: tuple[tuple[str, str], ...],
        template: str | None,
    ) -> ChatTokenizer:
        derived = copy.copy(self)
        if added:
            derived._tokenizer = extended(self._tokenizer, added)
            derived._literal = self._literal | {t.id: t.content for t in added if t.special}
            derived.vocab_size = max(self.vocab_size, *(token.id + 1 for token in added))
            if self.longest_token is not None:
                derived.longest_token = max(self.longest_token, *(len(t.content) for t in added))
            derived._bytes = {}
        derived._special = dict(special)
        derived._template = template
        if "eos_token" in derived._special:
            eos = derived._tokenizer.convert_tokens_to_ids(derived._special["eos_token"])
            derived.eos_ids = self.eos_ids | {eos}
        return derived

    def _read_bytes(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id].encode()
        if not 0 <= token_id < self.vocab_size:
            return b""
        if self._scheme is None:
            return self._decode([token_id]).encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return b"" if token is None else self._scheme.read(token)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


class TextStream:
    """Generated text as it becomes safe to send.

    Half characters are held back until they are whole; bytes that can never become one, also at
    the end, come out as U+FFFD. Text that may turn out to begin one of `stop` is held back too.
    The stop string that is complete first ends the text before it, however tokens cut the text.
    The concatenation of all `push` and `finish` results depends on the token ids alone.
    `continues`: the text follows a prompt of plain text, so a leading space is kept.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, stop: tuple[str, ...] = (), *, continues: bool = False
    ) -> None:
        if "" in stop:
            raise ValueError("a stop string is empty")
        self.stopped = False
        self._decoder = tokenizer.text_decoder(continues=continues)
        self._stop = stop
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is now safe to send. Nothing after a stop."""
        return "" if self.stopped else self._release(self._decoder.push(token_id))

    def finish(self) -> str:
        """Return what is still held back, once no more tokens come."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.finish())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if not self._stop or not text:
            return text
        text = self._held + text
        found = [(start + len(s), start) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


#: Tokenizers of adapters that are kept; one with added tokens holds a copy of the vocabulary.
_DERIVED = 8


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop`, not yet whole, could begin."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
