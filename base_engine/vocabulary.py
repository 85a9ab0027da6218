"""What a transformers tokenizer is beneath: described for comparison, copied with tokens added."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from huggingface_hub import try_to_load_from_cache

from adapters.manifest import AddedToken
from adapters.tokenizer_files import BaseTokenizer

_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


def described(tokenizer: Any) -> BaseTokenizer:
    """What the tokenizer files that come with an adapter are compared with."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = tuple(
        _added_token(i, token) for i, token in sorted(tokenizer.added_tokens_decoder.items())
    )
    words = len(tokenizer.get_vocab()) if backend is None else backend.get_vocab_size(False)

    def id_of(content: str) -> int | None:
        return None if backend is None else backend.token_to_id(content)

    def token_of(token_id: int) -> str | None:
        return None if backend is None else backend.id_to_token(token_id)

    def texts() -> Iterator[bytes]:
        if backend is not None:
            yield from _spellings(backend, _tokenizer_file(str(tokenizer.name_or_path)))

    return BaseTokenizer(
        added_tokens=added,
        special_tokens=dict(tokenizer.special_tokens_map),
        chat_template=default_template(tokenizer),
        next_id=max([words, *(token.id + 1 for token in added)]),
        id_of=id_of,
        token_of=token_of,
        texts=texts,
    )


def extended(tokenizer: Any, added: tuple[AddedToken, ...]) -> Any:
    """A copy of a transformers tokenizer that has the tokens `added`. Raises ValueError."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError("this kind of tokenizer takes no added tokens")
    extended = copy.deepcopy(tokenizer)
    backend = extended.backend_tokenizer
    flags = [{flag: getattr(token, flag) for flag in _FLAGS} for token in added]
    backend.add_tokens(
        [tokenizers.AddedToken(t.content, **f) for t, f in zip(added, flags, strict=True)]
    )
    known = backend.get_added_tokens_decoder()
    for token in added:
        got = known.get(token.id)
        if got is None or _added_token(token.id, got) != token:
            raise ValueError(f"the added token {token.content!r} cannot have the id {token.id}")
    return extended


def default_template(tokenizer: Any) -> str | None:
    """The chat template, of several the one called default."""
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _added_token(token_id: int, token: Any) -> AddedToken:
    return AddedToken(token_id, token.content, **{flag: getattr(token, flag) for flag in _FLAGS})


def _tokenizer_file(folder_or_id: str) -> Path | None:
    if not folder_or_id:
        return None
    if Path(folder_or_id).is_dir():
        file = Path(folder_or_id) / "tokenizer.json"
        return file if file.is_file() else None
    cached = try_to_load_from_cache(folder_or_id, "tokenizer.json")
    return Path(cached) if isinstance(cached, str) else None


def _spellings(backend: Any, file: Path | None) -> Iterator[bytes]:
    """The tokenizer.json texts that stand for `backend`: as in its file, as loaded, and as older
    versions of tokenizers write them."""
    if file is not None:
        yield file.read_bytes()
    yield backend.to_str().encode()
    if file is not None:
        yield tokenizers.Tokenizer.from_file(str(file)).to_str().encode()
        yield from _older(file.read_bytes())
    yield from _older(backend.to_str())


def _older(text: str | bytes) -> Iterator[bytes]:
    """Merges as texts and as pairs, with and without a newer field where it changes nothing."""
    read = json.loads(text)
    model = read.pop("model")
    pairs = model.pop("merges", None)
    for joined, short in itertools.product((False, True), (False, True)):
        changed = dict(model)
        if short and not model.get("ignore_merges"):
            changed.pop("ignore_merges", None)
        if pairs is not None:
            changed["merges"] = [_merge(pair, joined) for pair in pairs]
        whole = read | {"model": changed}
        yield json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()


def _merge(pair: str | list[str], joined: bool) -> str | list[str]:
    parts = pair.split(" ") if isinstance(pair, str) else pair
    return " ".join(parts) if joined else parts
