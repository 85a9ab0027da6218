"""A multipart form read as a stream of events: no part is ever held in memory or in a temp file."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from api.errors import BadRequest, WrongMediaType

#: Parts one form may have.
MAX_PARTS = 1100


@dataclass(frozen=True)
class PartBegin:
    """A part starts. `filename` None means a text field."""

    name: str
    filename: str | None


@dataclass(frozen=True)
class PartData:
    """More bytes of the current part."""

    data: bytes


@dataclass(frozen=True)
class PartEnd:
    """The current part is complete."""


PartEvent = PartBegin | PartData | PartEnd


async def read_parts(
    content_type: str, body: AsyncIterator[bytes]
) -> AsyncGenerator[PartEvent, None]:
    """The parts of `body` as they arrive.

    Raises WrongMediaType if the content type is no multipart form, BadRequest for a malformed or
    unfinished body.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        shown = kind.decode("latin-1")[:100] or "none"
        raise WrongMediaType(f"Content type {shown}: multipart/form-data is taken.")
    if not options.get(b"boundary"):
        raise BadRequest("The multipart content type has no boundary.", code="invalid_multipart")
    try:
        parser = _Parser(options[b"boundary"])
        async for chunk in body:
            for event in parser.feed(chunk):
                yield event
    except FormParserError:
        raise BadRequest("The multipart body is malformed.", code="invalid_multipart") from None
    if not parser.complete:
        raise BadRequest("The multipart body ends too early.", code="invalid_multipart")


class _Parser:
    """python-multipart's push parser with its callbacks turned into a list of events."""

    def __init__(self, boundary: bytes) -> None:
        self.complete = False
        self._events: list[PartEvent] = []
        self._field = b""
        self._value = b""
        self._disposition = b""
        self._parts = 0
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_end": self._on_end,
            },
        )

    def feed(self, chunk: bytes) -> list[PartEvent]:
        """The events that `chunk` completes. Raises FormParserError, BadRequest."""
        if chunk:
            self._parser.write(chunk)
        events, self._events = self._events, []
        return events

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            message = f"The form has more than {MAX_PARTS} parts."
            raise BadRequest(message, code="invalid_multipart")
        self._disposition = b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        field = self._field.lower()
        if field == b"content-disposition":
            self._disposition = self._value
        if field == b"content-transfer-encoding" and self._value.lower() not in _PLAIN_ENCODINGS:
            message = "Content-Transfer-Encoding is not supported; send the parts as they are."
            raise BadRequest(message, code="invalid_multipart")
        self._field = self._value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise BadRequest("A part of the form has no name.", code="invalid_multipart")
        filename = options.get(b"filename")
        shown = None if filename is None else filename.decode("utf-8", "replace")
        self._events.append(PartBegin(options[b"name"].decode("utf-8", "replace"), shown))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._events.append(PartData(data[start:end]))

    def _on_part_end(self) -> None:
        self._events.append(PartEnd())

    def _on_end(self) -> None:
        self.complete = True


_PLAIN_ENCODINGS = (b"binary", b"7bit", b"8bit")
