"""Multipart forms that are nearly right, as a strategy of hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.mutations import rarely, spoilt_bytes

_DISPOSITIONS = (
    b'form-data; name="name"',
    b'form-data; name="files"; filename="adapter_config.json"',
    b'form-data; name="files"; filename="../adapter_config.json"',
    b'form-data; name="files"; filename="a\\"b"',
    b"form-data; name=files; filename=",
    b"form-data; name*=utf-8''x; filename*=utf-8''%2e%2e%2fx",
    b"form-data; name*=x''%ff; filename*=nope''%00",
    b'form-data; name*0="a"; name*1="b"',
    b"form-data",
    b"attachment; name=x",
    b'form-data; name="' + "\u202e".encode() + b'"',
    b'form-data; name="\xff"',
    b";" * 500,
    b'form-data; name="' + b"x" * 4000,
    b"form-data; " + b"; ".join(b'n%d="x"' % i for i in range(300)),
)


@st.composite
def forms(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """(content type, chunks) of a multipart form, good or hostile."""
    body = b""
    dispositions = st.sampled_from(_DISPOSITIONS[:4]) | st.sampled_from(_DISPOSITIONS)
    for disposition in draw(st.lists(dispositions, max_size=4)):
        headers = [b"Content-Disposition: " + disposition]
        headers += draw(st.lists(st.sampled_from(_HEADERS), max_size=2))
        content = draw(st.binary(max_size=40) | st.sampled_from([b"\r\n--xyz", b"-" * 3000]))
        body += b"--xyz\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + content + b"\r\n"
    body += b"--xyz--\r\n"
    if rarely(draw, 20):
        body = (b"--xyz\r\nContent-Disposition: " + _DISPOSITIONS[0] + b"\r\n\r\n\r\n") * 2000
    elif draw(st.booleans()):
        body = draw(spoilt_bytes(body))
    sizes = draw(st.sampled_from([1, 2, 7, 64, 1 << 16] if len(body) < 5000 else [64, 1 << 16]))
    chunks = [body[i : i + sizes] for i in range(0, len(body), sizes)] or [b""]
    if not rarely(draw, 6):
        return _CONTENT_TYPES[0], chunks
    return draw(st.sampled_from(_CONTENT_TYPES) | st.text(_LATIN_1, max_size=30)), chunks


_HEADERS = (
    b"Content-Type: application/json",
    b"Content-Transfer-Encoding: base64",
    b"Content-Transfer-Encoding: 8bit",
    b"X: " + b"y" * 3000,
    b"X: " + b"y" * 9000,
    b": x",
    b"X",
    b"X\0: y",
    b" folded",
    b"Content-Disposition: form-data",
)
#: What the characters of a header can be.
_LATIN_1 = st.characters(max_codepoint=255)
_CONTENT_TYPES = (
    "multipart/form-data; boundary=xyz",
    "multipart/form-data",
    "multipart/form-data; boundary=",
    'multipart/form-data; boundary="xyz',
    "multipart/form-data; boundary=" + "b" * 5000,
    "multipart/form-data; boundary*=utf-8''xyz",
    "multipart/form-data; boundary=x\u00ff",
    "MULTIPART/FORM-DATA; BOUNDARY=xyz",
    "text/plain",
    ";" * 3000,
    "",
)
