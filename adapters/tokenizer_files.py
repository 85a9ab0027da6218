"""The tokenizer files that come with an adapter, compared with the base's tokenizer.

They are untrusted: sizes are checked first, and nothing in them is run. An upload's tokenizer is
usable only if it is the base's plus added tokens, so no foreign vocabulary, regular expression or
code is ever needed to serve it exactly.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec

from adapters.manifest import AddedToken

#: File -> the most bytes that are read of it.
TOKENIZER_FILES: Mapping[str, int] = {
    "tokenizer.json": 64 << 20,
    "tokenizer_config.json": 1 << 20,
    "special_tokens_map.json": 1 << 20,
    "added_tokens.json": 1 << 20,
    "chat_template.jinja": 64 << 10,
    "chat_template.json": 1 << 20,
}
MAX_ADDED_TOKENS = 4096
#: Objects in one file: each added token is one, and more of them would take seconds to build.
MAX_OBJECTS = 1 << 16
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKEN_LENGTH = 256
MAX_TEMPLATE_LENGTH = 64 << 10

#: What a tokenizer.json does, part by part; all else in it but the added tokens changes no ids.
_PARTS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
#: The special tokens that chat templates see by these names.
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class BaseTokenizer:
    """The base's tokenizer, as far as an upload's is compared with it.

    `next_id` is the id that the first added token gets. `id_of` and `token_of` look up its tokens.
    `special_tokens` are those with a name, such as eos_token. `texts` gives its tokenizer.json in
    every spelling that counts as the same, the likeliest first; none where it has no such file.
    """

    added_tokens: tuple[AddedToken, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None
    next_id: int
    id_of: Callable[[str], int | None]
    token_of: Callable[[int], str | None]
    texts: Callable[[], Iterable[bytes]]

    @cached_property
    def known(self) -> KnownParts:
        return KnownParts(self.texts())


class KnownParts:
    """The digests that each part of the base's tokenizer.json may have, worked out as needed:
    the rarer spellings take seconds. Thread-safe."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._texts = iter(texts)
        self._digests: dict[str, set[str]] = {name: set() for name in _PARTS}
        self._lock = threading.Lock()

    def differing(self, digests: Mapping[str, str]) -> list[str]:
        """The names of the parts whose digest is not the base's."""
        with self._lock:
            while found := [n for n in _PARTS if digests[n] not in self._digests[n]]:
                text = next(self._texts, None)
                if text is None:
                    break
                for name, digest in _digests(_decode_tokenizer(text)).items():
                    self._digests[name].add(digest)
            return found


@dataclass(frozen=True)
class TokenizerFiles:
    """What an upload's tokenizer has that the base's has not.

    `special_tokens` pairs the names whose token differs from the base's with it, `eos_ids` is the
    id of its own end token. `findings` tell it all in words; where it is not `usable`, they say
    why, and all else is empty.
    """

    findings: tuple[str, ...] = ()
    usable: bool = False
    added_tokens: tuple[AddedToken, ...] = ()
    special_tokens: tuple[tuple[str, str], ...] = ()
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    @property
    def eos_token(self) -> str | None:
        """Its end token, if that is not the base's."""
        return dict(self.special_tokens).get("eos_token")


def read_tokenizer_files(folder: Path, base: BaseTokenizer) -> TokenizerFiles:
    """What the tokenizer files in `folder` hold beyond `base`; files that are missing say nothing.

    Never raises for what the files hold: that is among the findings.
    """
    try:
        files = {name: _read(folder / name, limit) for name, limit in TOKENIZER_FILES.items()}
        found = {name: raw for name, raw in files.items() if raw is not None}
        return _compared(found, base) if found else TokenizerFiles()
    except _NotUsable as error:
        return TokenizerFiles((f"not used: {error}",))


class _NotUsable(Exception):
    """The upload's tokenizer cannot be served; the text says why."""


class _Token(msgspec.Struct, forbid_unknown_fields=True):
    content: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOKEN_LENGTH)]
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class _NumberedToken(_Token, kw_only=True):
    id: _TokenId


class _Tokenizer(msgspec.Struct):
    model: msgspec.Raw
    added_tokens: list[_NumberedToken] = []
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def _compared(files: Mapping[str, bytes], base: BaseTokenizer) -> TokenizerFiles:
    config = _object(files, "tokenizer_config.json")
    if config.get("auto_map"):
        raise _NotUsable("tokenizer_config.json names code of its own, which is never run")
    if config.get("split_special_tokens"):
        raise _NotUsable("tokenizer_config.json sets split_special_tokens, which is not served")
    # Code that trains names special tokens in one file or the other, as does transformers.
    named = config
    if "added_tokens_decoder" not in config:
        named = config | _object(files, "special_tokens_map.json")
    template = _template(files, config)
    special = _special_tokens(named, base)
    added = _added_tokens(files, config, {*base.special_tokens.values(), *special.values()}, base)
    ids = {token.content: token.id for token in (*base.added_tokens, *added)}
    unknown = sorted({*special.values(), *_more_special(named)} - ids.keys())
    if unknown:
        raise _NotUsable(f"its special token {unknown[0][:100]!r} is not among its added tokens")
    findings = []
    if "tokenizer.json" in files:
        findings.append(
            "tokenizer.json is the base's with more tokens"
            if added
            else "tokenizer.json equals the base's"
        )
    if added:
        findings.append(f"adds {_listed([repr(token.content) for token in added], 'token')}")
    findings += [f"its {name} is {token!r}" for name, token in special.items()]
    if template is not None:
        differs = template != base.chat_template
        relation = "differs from" if differs else "equals"
        findings.append(f"its chat template {relation} the base's")
    return TokenizerFiles(
        findings=tuple(findings),
        usable=True,
        added_tokens=added,
        special_tokens=tuple(special.items()),
        eos_ids=(ids[special["eos_token"]],) if "eos_token" in special else (),
        chat_template=template if template != base.chat_template else None,
    )


def _special_tokens(named: Mapping[str, Any], base: BaseTokenizer) -> dict[str, str]:
    """The named special tokens that differ from the base's."""
    special = {}
    own = named.get("extra_special_tokens")
    named = {**named, **own} if isinstance(own, dict) else named
    for name, value in named.items():
        standard = name in _NAMES or name in base.special_tokens
        # Others are tokens of this kind of model if they are texts, else settings.
        if not (standard or (name.endswith("_token") and isinstance(value, str | dict))):
            continue
        token = _content(value, name)
        known = base.special_tokens.get(name)
        if token is None and known is not None:
            raise _NotUsable(f"it has no {name}; the base's is {known!r}")
        if token is not None and token != known:
            special[name] = token
    return special


def _more_special(named: Mapping[str, Any]) -> set[str]:
    """Tokens that are special without a name of their own."""
    found: set[str] = set()
    for field in ("extra_special_tokens", "additional_special_tokens"):
        values = named.get(field) or []
        if isinstance(values, dict):
            values = list(values.values())
        if not isinstance(values, list):
            raise _NotUsable(f"{field} is no list")
        found.update(token for value in values if (token := _content(value, field)) is not None)
    return found


def _content(value: Any, field: str) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and (not isinstance(value, str) or len(value) > MAX_TOKEN_LENGTH):
        raise _NotUsable(f"{field} is no text of at most {MAX_TOKEN_LENGTH} characters")
    return value


def _added_tokens(
    files: Mapping[str, bytes], config: Mapping[str, Any], named: set[str], base: BaseTokenizer
) -> tuple[AddedToken, ...]:
    """The tokens beyond the base's, by ascending id."""
    tokens = {token.id: token for token in base.added_tokens}
    if (raw := files.get("tokenizer.json")) is not None:
        tokenizer = _converted(raw)
        _check_parts(_digests(tokenizer), base)
        tokens = {}
        for read in tokenizer.added_tokens:
            if read.id in tokens:
                raise _NotUsable(f"tokenizer.json gives the id {read.id} to two tokens")
            tokens[read.id] = _added(read.id, read, named)
    for id_, token in _declared(config).items():
        # transformers lets these flags win over those of tokenizer.json.
        tokens[id_] = _added(id_, token, named)
    _check_legacy(_object(files, "added_tokens.json"), tokens)
    for known in base.added_tokens:
        if (token_ := tokens.pop(known.id, None)) != known:
            change = "lacks" if token_ is None else "changes"
            raise _NotUsable(f"it {change} the base's added token {known.content!r}")
    added = tuple(tokens[id_] for id_ in sorted(tokens))
    if added and "tokenizer.json" not in files:
        raise _NotUsable("it adds tokens but has no tokenizer.json to compare with the base's")
    _check_added(added, base)
    return added


def _check_parts(digests: Mapping[str, str], base: BaseTokenizer) -> None:
    differing = base.known.differing(digests)
    if len(differing) == len(_PARTS):
        raise _NotUsable("tokenizer.json is not the base's in any part")
    if differing:
        raise _NotUsable(
            f"tokenizer.json differs from the base's beyond added tokens (in: "
            f"{', '.join(differing)}); only the base's tokenizer with tokens added is served"
        )


def _check_legacy(legacy: Mapping[str, Any], tokens: Mapping[int, AddedToken]) -> None:
    """added_tokens.json repeats the ids of tokens that the other files describe."""
    ids = {token.content: token.id for token in tokens.values()}
    for content, id_ in legacy.items():
        if ids.get(content) != id_:
            raise _NotUsable(
                f"added_tokens.json gives {content[:100]!r} the id {str(id_)[:20]}, the other "
                f"files {ids.get(content, 'none')}"
            )


def _check_added(added: tuple[AddedToken, ...], base: BaseTokenizer) -> None:
    if len(added) > MAX_ADDED_TOKENS:
        raise _NotUsable(f"it adds {len(added)} tokens; at most {MAX_ADDED_TOKENS} are taken")
    contents: set[str] = set()
    for number, token in enumerate(added):
        if base.token_of(token.id) is not None:
            raise _NotUsable(
                f"it gives {token.content!r} the id {token.id}, which is the base's token "
                f"{base.token_of(token.id)!r}"
            )
        if token.content in contents or base.id_of(token.content) is not None:
            raise _NotUsable(f"it has the token {token.content!r} twice")
        if token.id != base.next_id + number:
            # With a gap, loading it would give other ids than it says.
            raise _NotUsable(
                f"it gives {token.content!r} the id {token.id}; the ids of added tokens must go "
                f"on from {base.next_id} without a gap"
            )
        contents.add(token.content)


def _declared(config: Mapping[str, Any]) -> dict[int, _Token]:
    try:
        return msgspec.convert(
            config.get("added_tokens_decoder", {}), dict[_TokenId, _Token], strict=False
        )
    except msgspec.ValidationError as error:
        raise _NotUsable(f"tokenizer_config.json has bad added_tokens_decoder: {error}") from None


def _added(id_: int, token: _Token, named: set[str]) -> AddedToken:
    # transformers makes each token that has a name special.
    fields = {field: getattr(token, field) for field in _Token.__struct_fields__}
    return AddedToken(id_, **(fields | {"special": token.special or token.content in named}))


def _template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    """The chat template, from the first place that has one; of several, the default one."""
    template: Any
    if (raw := files.get("chat_template.jinja")) is not None:
        try:
            template = raw.decode()
        except UnicodeDecodeError:
            raise _NotUsable("chat_template.jinja is no UTF-8 text") from None
    else:
        template = config.get("chat_template")
        if template is None:
            template = _object(files, "chat_template.json").get("chat_template")
        if isinstance(template, list):
            named = [item for item in template if isinstance(item, dict)]
            template = {str(item.get("name")): item.get("template") for item in named}
        if isinstance(template, dict):
            template = template.get("default")
    if template is None or template == "":
        return None
    if not isinstance(template, str):
        raise _NotUsable("its chat template is no text")
    if len(template) > MAX_TEMPLATE_LENGTH:
        raise _NotUsable(
            f"its chat template has {len(template)} characters; at most {MAX_TEMPLATE_LENGTH} are "
            "taken"
        )
    # Files are read as text, so every line ends alike.
    return template.replace("\r\n", "\n").replace("\r", "\n")


def _decode_tokenizer(text: bytes) -> _Tokenizer:
    return msgspec.json.decode(text, type=_Tokenizer)


def _converted(raw: bytes) -> _Tokenizer:
    try:
        return _decode_tokenizer(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _NotUsable(f"tokenizer.json cannot be read: {error}") from None


def _digests(tokenizer: _Tokenizer) -> dict[str, str]:
    """Part -> digest of its JSON without white space; vocabularies never become objects."""
    return {
        name: hashlib.sha256(
            msgspec.json.format(bytes(getattr(tokenizer, name)), indent=-1)
        ).hexdigest()
        for name in _PARTS
    }


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        # A key that comes twice counts with its last value, as for those who load these files.
        return msgspec.json.decode(files[name], type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _NotUsable(f"{name} cannot be read: {error}") from None


def _read(path: Path, limit: int) -> bytes | None:
    """The bytes of a regular file, None if there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise _NotUsable(f"{path.name} is not a regular file")
    if status.st_size > limit:
        raise _NotUsable(f"{path.name} has {status.st_size} bytes; at most {limit} are taken")
    with open(path, "rb") as file:
        raw = file.read(limit)
    if raw.count(b"{") > MAX_OBJECTS:
        raise _NotUsable(f"{path.name} holds more than {MAX_OBJECTS} objects")
    return raw


def _listed(items: list[str], noun: str) -> str:
    shown = ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
    return f"{len(items)} {noun}{'s' if len(items) != 1 else ''}: {shown}"
