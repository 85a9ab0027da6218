from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from api.errors import BadRequest, WrongMediaType
from api.multipart import MAX_PARTS, PartBegin, PartData, PartEnd, PartEvent, read_parts

TYPE = "multipart/form-data; boundary=xyz"
BODY = (
    b'--xyz\r\nContent-Disposition: form-data; name="name"\r\n\r\npirate\r\n'
    b'--xyz\r\nContent-Disposition: form-data; name="files"; filename="a;b \xc3\xa9.json"\r\n'
    b"Content-Type: application/json\r\n\r\n{\r\n--xy}\r\n--xyz--\r\n"
)


def parts(
    body: bytes, content_type: str = TYPE, step: int | None = None
) -> list[tuple[PartBegin, bytes]]:
    """Parts with their content; the body arrives `step` bytes at a time."""
    size = step or max(len(body), 1)

    async def chunks() -> AsyncIterator[bytes]:
        for i in range(0, len(body), size):
            yield body[i : i + size]

    async def read() -> list[PartEvent]:
        return [event async for event in read_parts(content_type, chunks())]

    found: list[tuple[PartBegin, bytes]] = []
    for event in asyncio.run(read()):
        match event:
            case PartBegin():
                found.append((event, b""))
            case PartData(data):
                found[-1] = (found[-1][0], found[-1][1] + data)
            case PartEnd():
                pass
    return found


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_form_is_read_however_it_is_cut(step: int) -> None:
    assert parts(BODY, step=step) == [
        (PartBegin("name", None), b"pirate"),
        (PartBegin("files", "a;b é.json"), b"{\r\n--xy}"),
    ]


@pytest.mark.parametrize("size", [0, 1, 20, len(BODY) // 2, len(BODY) - 5])
def test_a_form_that_ends_early_is_refused(size: int) -> None:
    with pytest.raises(BadRequest, match="ends too early"):
        parts(BODY[:size])


@pytest.mark.parametrize(
    "body",
    [
        b"--abc\r\n\r\n",
        b'--xyz\r\nContent-Disposition: form-data; filename="x"\r\n\r\n\r\n--xyz--',
        b"--xyz\r\nBad Header: x\r\n\r\n\r\n--xyz--",
        b"--xyz\r\nX: " + b"h" * 10_000 + b"\r\n\r\n\r\n--xyz--",
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n'
        b"Content-Transfer-Encoding: base64\r\n\r\nAA==\r\n--xyz--",
        b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * (MAX_PARTS + 1),
    ],
)
def test_malformed_forms_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        parts(body)
    assert refused.value.code == "invalid_multipart"


@pytest.mark.parametrize("content_type", ["", "application/json", "text/plain; boundary=xyz"])
def test_other_media_types_are_refused(content_type: str) -> None:
    with pytest.raises(WrongMediaType, match="multipart/form-data is taken"):
        parts(BODY, content_type)


@pytest.mark.parametrize("content_type", ["multipart/form-data", TYPE + "b" * 300])
def test_a_boundary_is_needed_and_bounded(content_type: str) -> None:
    with pytest.raises(BadRequest):
        parts(BODY, content_type)
