"""POST /v1/chat/completions and /v1/completions: from body to engine and back."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api.answers import Answer, ChatAnswer, CompletionAnswer
from api.body import read_body
from api.choices import Choice, Delta, merge
from api.disconnect import while_connected
from api.errors import BadRequest
from api.schemas import MAX_SEQUENCES, ChatRequest, CompletionRequest, Sampling, decode
from api.services import Services, services_of, tenant_of
from api.sse import EventStream
from api.targets import Target, find_target
from base_engine.request import GenerateRequest

#: Longer texts are tokenized in a thread, so that the streams of others keep flowing.
_LONG_TEXT = 8192


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions"""
    services = services_of(request)
    body = decode(await read_body(request, services.settings.max_body), ChatRequest)
    request.scope["model"] = body.model  # for the access log
    target = await find_target(services, tenant_of(request), body)
    messages = body.template_messages()
    _check_text(services, target, "messages", sum(len(m["content"]) for m in messages))
    length = sum(len(text) for message in messages for text in message.values())
    encode = target.tokenizer.encode_chat
    at_once = length <= _LONG_TEXT and not target.own_template
    ids = encode(messages) if at_once else await asyncio.to_thread(encode, messages)
    return await _answer(request, services, body, target, [ids], ChatAnswer)


async def completions(request: Request) -> Response:
    """POST /v1/completions"""
    services = services_of(request)
    body = decode(await read_body(request, services.settings.max_body), CompletionRequest)
    request.scope["model"] = body.model  # for the access log
    target = await find_target(services, tenant_of(request), body)
    prompts = body.prompts()
    length = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    ids = [await _prompt_ids(services, target, prompt, length > _LONG_TEXT) for prompt in prompts]
    return await _answer(request, services, body, target, ids, CompletionAnswer)


async def _prompt_ids(
    services: Services, target: Target, prompt: str | list[int], in_thread: bool
) -> list[int]:
    if isinstance(prompt, str):
        _check_text(services, target, "prompt", len(prompt))
        encode = target.tokenizer.encode
        return await asyncio.to_thread(encode, prompt) if in_thread else encode(prompt)
    vocab = target.vocab_size
    # What is longer than the context is refused for its length.
    for token_id in prompt[: services.engine.max_length]:
        if not 0 <= token_id < vocab:
            message = f"prompt: token id {token_id} is outside the vocabulary, 0 to {vocab - 1}."
            raise BadRequest(message, "prompt", "invalid_token_id")
    return prompt


async def _answer(
    request: Request,
    services: Services,
    body: ChatRequest | CompletionRequest,
    target: Target,
    prompts: list[list[int]],
    kind: type[Answer],
) -> Response:
    started = time.monotonic()
    _check(services, target, body, prompts)
    answer_id = ("chatcmpl-" if kind is ChatAnswer else "cmpl-") + uuid.uuid4().hex
    choices = _submit(services, body, target, prompts, answer_id)
    answer = kind(
        id=answer_id,
        created=int(time.time()),
        model=body.model,
        fingerprint=target.fingerprint,
        answered_by=target.answered_by,
        prompts=prompts,
        choices=choices,
        tokenizer=target.tokenizer,
        include_usage=body.include_usage,
        with_trace=request.headers.get("x-lorikeet-trace") in ("1", "true"),
    )
    deltas = _observed(services, merge(choices), started)
    try:
        if not body.stream:
            whole = await while_connected(request.receive, _collect(deltas))
            content = msgspec.json.encode(answer.body(whole))
            return Response(content, 200, target.headers, "application/json")
        first = await while_connected(request.receive, _first(deltas))
    except BaseException:
        _abort(choices)
        raise
    return EventStream(
        _events(answer, first, deltas),
        target.headers,
        services.settings.write_timeout,
        lambda: _abort(choices),
    )


def _check_text(services: Services, target: Target, param: str, length: int) -> None:
    """Refuse a text that is too long whatever its tokens are, before seconds go into them."""
    longest = target.tokenizer.longest_token
    limit = services.engine.max_length
    if longest is not None and length > longest * limit:
        message = (
            f"{param}: {length} characters, which are more than {limit} tokens, the "
            "room of the context."
        )
        raise BadRequest(message, param, "context_length_exceeded")


def _check(
    services: Services, target: Target, body: Sampling, prompts: Sequence[Sequence[int]]
) -> None:
    """Refuse what can never run. Raises BadRequest."""
    param = "messages" if isinstance(body, ChatRequest) else "prompt"
    limit = services.engine.max_length
    for ids in prompts:
        if not ids:
            raise BadRequest(f"{param}: it has no tokens.", param, "empty_prompt")
        if len(ids) >= limit:
            raise BadRequest(
                f"{param}: {len(ids)} tokens, but the context has room for {limit} in all, the "
                "answer included.",
                param,
                "context_length_exceeded",
            )
    if len(prompts) * body.choices > MAX_SEQUENCES:
        message = (
            f"n: {len(prompts)} prompts times {body.choices} choices; at most {MAX_SEQUENCES} "
            "sequences are taken at once."
        )
        raise BadRequest(message, "n")
    vocab = target.vocab_size
    for token_id in body.stop_token_ids or ():
        if token_id >= vocab:
            message = f"stop_token_ids: {token_id} is outside the vocabulary, 0 to {vocab - 1}."
            raise BadRequest(message, "stop_token_ids", "invalid_token_id")


def _submit(
    services: Services,
    body: Sampling,
    target: Target,
    prompts: Sequence[Sequence[int]],
    answer_id: str,
) -> list[Choice]:
    """All choices or none. Raises QueueFull, EngineStopped."""
    follows_text = isinstance(body, CompletionRequest)
    choices: list[Choice] = []
    try:
        for prompt, ids in enumerate(prompts):
            room = services.engine.max_length - len(ids)
            for number in range(body.choices):
                generate = GenerateRequest(
                    request_id=f"{answer_id}-{len(choices)}",
                    prompt_ids=tuple(ids),
                    sampling=target.sampling(body, room, number),
                    adapters=target.adapters,
                    salt=target.salt,
                )
                generation = services.engine.submit(generate)
                choices.append(
                    Choice(
                        len(choices),
                        prompt,
                        generation,
                        target.tokenizer,
                        body.stops,
                        continues=follows_text,
                    )
                )
    except BaseException:
        _abort(choices)
        raise
    return choices


def _abort(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.abort()


async def _first(deltas: AsyncGenerator[Delta, None]) -> Delta:
    return await anext(deltas)


async def _collect(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    async with aclosing(deltas):
        return [delta async for delta in deltas]


async def _observed(
    services: Services, deltas: AsyncGenerator[Delta, None], started: float
) -> AsyncGenerator[Delta, None]:
    """`deltas`, timed and counted."""
    metrics = services.metrics
    waiting = True
    async with aclosing(deltas):
        async for delta in deltas:
            if waiting:
                waiting = False
                metrics.time_to_first_token.observe(time.monotonic() - started)
            if delta.finish_reason is not None:
                metrics.finished.labels(delta.finish_reason).inc()
            yield delta
    metrics.request_seconds.observe(time.monotonic() - started)


async def _events(
    answer: Answer, first: Delta, deltas: AsyncGenerator[Delta, None]
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream, in order."""
    async with aclosing(deltas):
        for chunk in answer.first_chunks():
            yield chunk
        if _visible(first):
            yield answer.chunk(first)
        async for delta in deltas:
            if _visible(delta):
                yield answer.chunk(delta)
    if answer.include_usage:
        yield answer.usage_chunk()


def _visible(delta: Delta) -> bool:
    return bool(delta.text or delta.tokens or delta.finish_reason)
