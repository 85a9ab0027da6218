"""One sequence's token events turned into text, piece by piece, and several of them merged."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from base_engine.engine import Generation
from base_engine.errors import EngineStopped
from base_engine.request import TokenEvent, TokenLogprobs, Trace
from base_engine.tokenizer import ChatTokenizer, TextStream


@dataclass(frozen=True)
class TokenPiece:
    """A token with its log-probabilities.

    `offset` is where its text starts in the answer, in characters; tokens that make up one
    character together share it.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class Delta:
    """What came of one choice since its last delta. The last one has `finish_reason`.

    `tokens` is filled only if log-probabilities were asked for; a token comes with the text that
    it completes, so none that belongs to a stop string ever comes.
    """

    index: int
    text: str
    tokens: tuple[TokenPiece, ...] = ()
    finish_reason: str | None = None


class Choice:
    """One answer being generated: `index` within its response, of prompt number `prompt`."""

    def __init__(
        self,
        index: int,
        prompt: int,
        generation: Generation,
        tokenizer: ChatTokenizer,
        stops: tuple[str, ...],
        *,
        continues: bool,
    ) -> None:
        """`continues`: the answer follows a prompt of plain text, see `TextStream`."""
        self.index = index
        self.prompt = prompt
        #: All tokens generated, also those whose text is not shown.
        self.token_ids: list[int] = []
        self.trace: Trace | None = None
        self._generation = generation
        self._stream = TextStream(tokenizer, stops, continues=continues)
        # Tells where tokens start, also those whose text the stream holds back.
        self._positions = tokenizer.text_decoder(continues=continues)
        self._pending: deque[TokenPiece] = deque()
        self._offset = 0
        self._shown = 0

    def abort(self) -> None:
        """Stop generating; harmless after the end."""
        self._generation.abort()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """At least one delta, the last with a finish reason. Raises what the engine reports."""
        stopped = False
        try:
            async for event in self._generation:
                if stopped:
                    self.trace = event.trace
                    continue
                if event.error is not None:
                    raise event.error
                if event.finish_reason == "abort":
                    raise EngineStopped("The request was aborted by the server.")
                text = self._take(event)
                self.trace = event.trace
                stopped = self._stream.stopped
                if not stopped:
                    yield self._delta(text, event.finish_reason)
                    continue
                # Text is out before the engine has confirmed the abort, which takes a step.
                self._generation.abort()
                yield self._delta(text, None)
            if stopped:
                self._pending.clear()
                yield Delta(self.index, "", (), "stop")
        finally:
            self._generation.abort()

    def _take(self, event: TokenEvent) -> str:
        """The text that `event` makes visible."""
        text = ""
        if event.token_id is not None:
            self.token_ids.append(event.token_id)
            # A token that ends the answer (end of sequence, stop token) is counted, not shown.
            hidden = event.finish_reason == "stop"
            if not hidden:
                text = self._stream.push(event.token_id)
            if event.logprobs is not None:
                self._pending.append(TokenPiece(event.token_id, self._offset, event.logprobs))
                if not hidden:
                    self._offset += len(self._positions.push(event.token_id))
        if event.finish_reason is not None and not self._stream.stopped:
            text += self._stream.finish()
        return text

    def _delta(self, text: str, finish_reason: str | None) -> Delta:
        self._shown += len(text)
        tokens = []
        while self._pending and (finish_reason or self._pending[0].offset < self._shown):
            tokens.append(self._pending.popleft())
        return Delta(self.index, text, tuple(tokens), finish_reason)


async def merge(choices: Sequence[Choice]) -> AsyncGenerator[Delta, None]:
    """The deltas of all choices as they come. Ends all of them when one fails or it is closed."""
    if len(choices) == 1:
        async with aclosing(choices[0].deltas()) as deltas:
            async for delta in deltas:
                yield delta
        return
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=len(choices))
    pumps = [asyncio.create_task(_pump(choice, queue)) for choice in choices]
    try:
        running = len(choices)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(choice: Choice, queue: asyncio.Queue[Delta | Exception | None]) -> None:
    try:
        async with aclosing(choice.deltas()) as deltas:
            async for delta in deltas:
                await queue.put(delta)
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
