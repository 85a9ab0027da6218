"""Incremental decoding: token ids in, whole characters out."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol


class TextDecoder(Protocol):
    """Takes tokens one by one; the results join up to the text."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        ...

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that was cut off."""
        ...


class ByteDecoder:
    """Exact for every tokenizer whose tokens are byte strings; the work is the token's length.

    Bytes that are no UTF-8 become U+FFFD and never hold back what follows (tokenizers' own
    DecodeStream waits for ever after one). `hidden` ids give nothing; `strip` leading spaces of
    the whole text are dropped.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], hidden: Collection[int], strip: int
    ) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        return self._stripped(self._utf8.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowDecoder:
    """For tokenizers whose decoding looks at neighbours: decodes the last few tokens together.

    Pending tokens are decoded behind those that last brought text; the difference is new.
    `decode` turns a list of ids into text.
    """

    #: No character has more pieces than this; a longer wait means bytes that are none.
    MAX_PENDING = 8

    def __init__(self, decode: Callable[[list[int]], str], hidden: Collection[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._pending) < self.MAX_PENDING:
            return ""
        if text or len(self._pending) == self.MAX_PENDING:
            self._context, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._pending = []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]


@dataclass(frozen=True)
class ByteScheme:
    """How a token's name spells its bytes, and how many leading spaces a whole text loses."""

    read: Callable[[str], bytes]
    strip: int = 0


def byte_scheme(tokenizer: Any) -> ByteScheme | None:
    """The scheme of a byte-level (GPT-2) or byte-fallback (SentencePiece) tokenizer, else None.

    It is read from the decoder of the tokenizers backend of a transformers tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    spec = json.loads(backend.decoder.__getstate__()) if backend and backend.decoder else {}
    steps = spec.get("decoders", [spec])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteScheme(_read_byte_level)
    if "ByteFallback" not in kinds:
        return None
    replaced: list[tuple[str, str]] = []
    strip = 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": new} if (
                len(old) == 1
            ):
                replaced.append((old, new))
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if "Fuse" in kinds:
                strip = start
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                return None

    def read(token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return ByteScheme(read, strip)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[c] for c in token])
    except KeyError:  # an added token, spelled as it is
        return token.encode()
