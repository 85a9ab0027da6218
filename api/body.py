"""Request bodies read within bounds of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.requests import Request

from api.errors import BadRequest, BodyTimeout, BodyTooLarge

#: Seconds that a client may take for the next piece of its body.
READ_TIMEOUT = 60.0


async def body_chunks(
    request: Request, limit: int, setting: str = "--max-body"
) -> AsyncIterator[bytes]:
    """The body piece by piece. Raises BodyTooLarge at once when `limit` bytes are passed.

    `setting` is the flag that sets the limit. Also raises BadRequest for a bad Content-Length,
    BodyTimeout, and ClientDisconnect when the client leaves early.
    """
    declared = request.headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit():
        raise BadRequest("The Content-Length header is not a number.")
    if len(declared) > 18 or int(declared) > limit:
        raise _too_large(limit, setting)
    received = 0
    async with aclosing(request.stream()) as stream:
        while True:
            try:
                async with asyncio.timeout(READ_TIMEOUT):
                    chunk = await anext(stream, None)
            except TimeoutError:
                message = f"No more of the body came for {READ_TIMEOUT:.0f} seconds."
                raise BodyTimeout(message) from None
            if chunk is None:
                return
            received += len(chunk)
            if received > limit:
                raise _too_large(limit, setting)
            yield chunk


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises as `body_chunks` does."""
    return b"".join([chunk async for chunk in body_chunks(request, limit)])


def _too_large(limit: int, setting: str) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body is larger than {limit} bytes, the most that is taken here (set by {setting})."
    )
