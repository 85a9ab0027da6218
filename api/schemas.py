"""The bodies of the OpenAI routes: decoded strictly, bounded, and turned into sampling parameters.

A field we know but do not support is taken only at its neutral value (the one that changes
nothing); a field we do not know is refused. Types are exact: `true` is no number, `"5"` no integer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Struct

from api.errors import BadRequest
from api.refusals import refusal
from base_engine.request import SamplingParams

MAX_CHOICES = 16
MAX_ADAPTERS = 8
MAX_WEIGHT = 100.0
MAX_PROMPTS = 64
MAX_SEQUENCES = 128
MAX_MESSAGES = 4096
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
COMPLETION_DEFAULT_TOKENS = 16

#: Arrays and objects of one body, brackets within texts counted too: millions of them take
#: seconds to build, and what they hold is refused anyway.
MAX_BRACKETS = 1 << 16

_INT31 = 2**31 - 1

Tokens = Annotated[int, Meta(ge=1, le=_INT31)]
TokenId = Annotated[int, Meta(ge=0, le=_INT31)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class TextPart(Struct, forbid_unknown_fields=True, frozen=True):
    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, frozen=True):
    """One chat message. `content` may be null for the assistant only and then reads as ""."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    tool_calls: Any = UNSET
    function_call: Any = UNSET
    refusal: Any = UNSET
    audio: Any = UNSET


class AdapterChoice(Struct, forbid_unknown_fields=True, frozen=True):
    """One adapter of a weighted sum; `name` as in `model`."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    weight: Annotated[float, Meta(ge=-MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0


class Sampling(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields that both routes share."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    adapters: Annotated[list[AdapterChoice], Meta(min_length=1, max_length=MAX_ADAPTERS)] | None = (
        None
    )
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Tokens | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    frequency_penalty: Any = UNSET
    presence_penalty: Any = UNSET
    logit_bias: Any = UNSET

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None fills the context."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report per token; None for no log-probabilities at all."""
        raise NotImplementedError

    def sampling(self, room: int, choice: int) -> SamplingParams:
        """Sampling parameters of choice number `choice`, with `room` tokens left in the context.

        More tokens than there is room for are cut down to it, as OpenAI does.
        """
        return SamplingParams(
            max_tokens=min(self.token_limit or room, room),
            temperature=_default(self.temperature, 1.0),
            top_p=_default(self.top_p, 1.0),
            top_k=max(self.top_k or 0, 0),
            min_p=_default(self.min_p, 0.0),
            seed=None if self.seed is None else _int64(self.seed + choice),
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.alternatives,
        )


class ChatRequest(Sampling, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    tools: Any = UNSET
    tool_choice: Any = UNSET
    parallel_tool_calls: Any = UNSET
    functions: Any = UNSET
    function_call: Any = UNSET
    response_format: Any = UNSET
    store: Any = UNSET
    service_tier: Any = UNSET
    reasoning_effort: Any = UNSET
    verbosity: Any = UNSET
    prediction: Any = UNSET
    modalities: Any = UNSET
    audio: Any = UNSET
    web_search_options: Any = UNSET

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_messages(self) -> list[dict[str, str]]:
        """The messages as a chat template reads them: string contents, `developer` as `system`."""
        return [_template_message(message) for message in self.messages]


class CompletionRequest(Sampling, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Body of POST /v1/completions. `prompt` is text or token ids, or a list of either."""

    prompt: str | list[str | int | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Any = UNSET
    echo: Any = UNSET
    suffix: Any = UNSET

    @property
    def token_limit(self) -> int | None:
        return COMPLETION_DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. Raises BadRequest for an empty or a mixed list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) != 1:
            raise BadRequest("prompt: a list must hold only strings or only token ids.", "prompt")
        if kinds == {int}:
            return [cast("list[int]", self.prompt)]
        if len(self.prompt) > MAX_PROMPTS:
            message = f"prompt: {len(self.prompt)} prompts; at most {MAX_PROMPTS} are taken."
            raise BadRequest(message, "prompt")
        return [item for item in self.prompt if not isinstance(item, int)]


#: Fields we know but do not support -> the values that change nothing. null is always one.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "prediction": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "refusal": (),
}

#: Per body, the fields that only the other route takes -> that route.
_ELSEWHERE: dict[type[Sampling], dict[str, str]] = {
    mine: {
        name: route
        for name in other.__struct_fields__
        if name not in mine.__struct_fields__ and name not in NEUTRAL
    }
    for mine, other, route in (
        (ChatRequest, CompletionRequest, "/v1/completions"),
        (CompletionRequest, ChatRequest, "/v1/chat/completions"),
    )
}

_T = TypeVar("_T", ChatRequest, CompletionRequest)


def decode(body: bytes, kind: type[_T]) -> _T:
    """`body` as a request of `kind`. Raises BadRequest that names the field and the limit."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        text = f"The body has more than {MAX_BRACKETS} opening brackets, the most that are taken."
        raise BadRequest(text, code="invalid_json")
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(error, body, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("The JSON is nested too deeply.", code="invalid_json") from None
    _refuse_unsupported(request, "")
    if isinstance(request, ChatRequest):
        _check_chat(request)
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options: only taken with stream true.", "stream_options")
    return request


def _check_chat(request: ChatRequest) -> None:
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        text = "max_tokens and max_completion_tokens differ; give one of them."
        raise BadRequest(text, "max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("top_logprobs: only taken with logprobs true.", "top_logprobs")
    for i, message in enumerate(request.messages):
        _refuse_unsupported(message, f"messages[{i}].")
        if message.content is None and message.role != "assistant":
            where = f"messages[{i}].content"
            raise BadRequest(f"{where}: required for role {message.role}.", where)


def _refuse_unsupported(struct: Struct, where: str) -> None:
    for name in struct.__struct_fields__:
        if name not in NEUTRAL:
            continue
        value = getattr(struct, name)
        if value is UNSET or value is None:
            continue
        if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            allowed = " or ".join(_json(neutral) for neutral in NEUTRAL[name]) or "null"
            message = f"{where}{name} is not supported; only {allowed} is taken."
            raise BadRequest(message, where + name, "unsupported_parameter")


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _explained(error: msgspec.ValidationError, body: bytes, kind: type[Sampling]) -> BadRequest:
    known = [name for name in kind.__struct_fields__ if name not in NEUTRAL]
    return refusal(str(error), body, known, _ELSEWHERE[kind])


def _template_message(message: Message) -> dict[str, str]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def _int64(value: int) -> int:
    """`value` wrapped round into the range of a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63
