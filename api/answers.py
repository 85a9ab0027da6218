"""OpenAI's response objects: whole bodies and stream chunks, built from deltas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from api.choices import Choice, Delta, TokenPiece
from base_engine.tokenizer import ChatTokenizer

#: Stands for a log-probability that is not finite: JSON has no infinity.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Answer:
    """What all parts of one response have in common. `prompts` are token ids, one per prompt.

    `model` is what the client asked for; `answered_by` names the adapter version (or the base).
    """

    id: str
    created: int
    model: str
    fingerprint: str
    answered_by: str
    prompts: Sequence[Sequence[int]]
    choices: Sequence[Choice]
    tokenizer: ChatTokenizer
    include_usage: bool
    with_trace: bool

    object = ""
    chunk_object = ""

    def body(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The whole response, of all deltas of all choices."""
        texts = [_Whole() for _ in self.choices]
        for delta in deltas:
            texts[delta.index].add(delta)
        choices = [self.choice(i, whole) for i, whole in enumerate(texts)]
        return self._envelope(self.object, choices) | {"usage": self.usage()} | self._trace()

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One stream chunk; the one that ends a choice carries its trace."""
        chunk = self._chunk([self.delta(delta)])
        if delta.finish_reason is not None:
            chunk |= self._trace(delta.index)
        return chunk

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose client asked for usage."""
        return self._envelope(self.chunk_object, []) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens read and generated; a prompt counts once however many choices it has."""
        prompt = sum(len(ids) for ids in self.prompts)
        completion = sum(len(choice.token_ids) for choice in self.choices)
        # Further choices of a prompt reuse what the first has computed: not the client's saving.
        first = {choice.prompt: choice for choice in reversed(self.choices)}.values()
        cached = sum(choice.trace.cached_tokens for choice in first if choice.trace is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_object, choices)
        return chunk | {"usage": None} if self.include_usage else chunk

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def _trace(self, index: int | None = None) -> dict[str, Any]:
        if not self.with_trace:
            return {}
        choices = self.choices if index is None else [self.choices[index]]
        return {
            "lorikeet": {
                "adapter": self.answered_by,
                "choices": [
                    {
                        "index": choice.index,
                        "prompt_token_ids": list(self.prompts[choice.prompt]),
                        "token_ids": choice.token_ids,
                        **(asdict(choice.trace) if choice.trace is not None else {}),
                    }
                    for choice in choices
                ],
            }
        }


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk(
                [{"index": c.index, "delta": delta, "logprobs": None, "finish_reason": None}]
            )
            for c in self.choices
        ]

    def choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": self._logprobs(whole.tokens),
            "finish_reason": whole.finish_reason,
        }

    def delta(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[TokenPiece]) -> dict[str, Any] | None:
        if not tokens:
            return None
        content = [
            self._token(piece.token_id, piece.logprobs.chosen)
            | {"top_logprobs": [self._token(t, value) for t, value in piece.logprobs.top]}
            for piece in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }


class CompletionAnswer(Answer):
    """Answers of /v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, whole: _Whole) -> dict[str, Any]:
        return {
            "index": index,
            "text": whole.text,
            "logprobs": self._logprobs(whole.tokens),
            "finish_reason": whole.finish_reason,
        }

    def delta(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[TokenPiece]) -> dict[str, Any] | None:
        if not tokens:
            return None
        text = self.tokenizer.token_text
        return {
            "tokens": [text(piece.token_id) for piece in tokens],
            "token_logprobs": [finite(piece.logprobs.chosen) for piece in tokens],
            "top_logprobs": [self._top(piece) for piece in tokens],
            "text_offset": [piece.offset for piece in tokens],
        }

    def _top(self, piece: TokenPiece) -> dict[str, float]:
        """Alternatives by their text, the chosen one among them. Of equal texts the likelier."""
        pairs = [*piece.logprobs.top, (piece.token_id, piece.logprobs.chosen)]
        found: dict[str, float] = {}
        for token_id, logprob in pairs:
            text = self.tokenizer.token_text(token_id)
            found[text] = max(finite(logprob), found.get(text, -math.inf))
        return found


def finite(logprob: float) -> float:
    """`logprob`, or LOWEST_LOGPROB if it is not finite."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


@dataclass
class _Whole:
    """All deltas of one choice put together."""

    text: str = ""
    tokens: list[TokenPiece] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason
