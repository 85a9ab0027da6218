"""What the fuzzer feeds: uploads that are nearly right, as strategies of hypothesis."""

from __future__ import annotations

import gzip
import io
import json
import stat
import struct
import tarfile
import warnings
import zipfile
import zlib
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.mutations import EDGES, TEXTS, VALUES, spoilt_bytes, spoilt_json

Folder = dict[str, bytes]

_NAMES = st.one_of(
    st.sampled_from(
        [
            "adapter_config.json",
            "adapter_model.safetensors",
            "adapters.safetensors",
            "x/adapter_config.json",
            "x/adapter_model.safetensors",
            "x/y/adapter_model.safetensors",
            "tokenizer.json",
            "x/tokenizer_config.json",
            "adapter_model.bin",
            "README.md",
            "inner.zip",
            "inner.tar.gz",
            "__MACOSX/._x",
            "folder/",
            "a/../../adapter_config.json",
            "./adapter_config.json",
            "././adapter_config.json",
            "adapter_config.json\0.txt",
            "\u202ejson.gifnoc_retpada",
            "adapter_config.json\u200b",
            "ADAPTER_CONFIG.JSON",
            "n" * 2000,
        ]
    ),
    st.sampled_from(TEXTS),
    st.text(min_size=1, max_size=12),
)
_CONTENTS = st.one_of(
    st.just(b"{}"),
    st.binary(max_size=200),
    st.sampled_from([b"x" * 3000] * 14 + [bytes(1 << 20), bytes(40 << 20)]),
)


def _rarely(draw: st.DrawFn, one_in: int) -> bool:
    return draw(st.integers(1, one_in)) == one_in // 2


@st.composite
def archives(draw: st.DrawFn) -> tuple[str, bytes]:
    """(name, bytes) of an archive, good or hostile."""
    kind = draw(st.sampled_from(["zip", "zip", "tar", "tar", "gzip", "bytes"]))
    if kind == "bytes":
        start = draw(st.sampled_from([b"", b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b\x08\0"]))
        return draw(st.sampled_from(["a.zip", "a.tgz", "a.tar.gz"])), start + draw(
            st.binary(max_size=300)
        )
    if kind == "zip":
        return "a.zip", draw(_zips())
    tar = draw(_tars())
    if kind == "tar":
        return "a.tar.gz", gzip.compress(tar, 1)
    return "a.tgz", draw(_gzips(tar))


@st.composite
def _zips(draw: st.DrawFn) -> bytes:
    """A zip; then sizes that lie, members that overlap, zip64 fields, and any change of bytes."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # of names that come twice
        for name in draw(st.lists(_NAMES, max_size=4)):
            info = zipfile.ZipInfo(name.replace("\0", "_") or "_")
            kind = draw(st.sampled_from([0, 0, 0, stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO]))
            info.external_attr = kind << 16
            extra = draw(
                st.sampled_from([b"", b"", b"", _zip64(draw), b"\1\0\xff\xff", b"up\5\0\1"])
            )
            info.extra = extra
            method = draw(st.sampled_from([0, 8, 8, 12, 14]))
            content = draw(_CONTENTS)
            archive.writestr(info, content, method, 1)
            if _rarely(draw, 6) and archive.filelist:
                twin = archive.filelist[-1]
                archive.filelist.extend([twin] * draw(st.sampled_from([1, 20, 2000])))
        archive.comment = draw(st.sampled_from([b"", b"", b"PK\5\6" + bytes(18), b"x" * 60_000]))
    data = buffer.getvalue()
    if len(data) > 200_000 or draw(st.integers(0, 2)) == 0:
        return data
    return draw(spoilt_bytes(data))


def _zip64(draw: st.DrawFn) -> bytes:
    numbers = [draw(st.sampled_from(EDGES)) for _ in range(draw(st.integers(0, 3)))]
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


_TYPES = (
    *[b"0"] * 8,
    b"\0",
    b"1",
    b"2",
    b"3",
    b"4",
    b"5",
    b"6",
    b"7",
    b"S",
    b"x",
    b"g",
    b"L",
    b"K",
    b"V",
    b"A",
)
_PAX_KEYS = (
    "size",
    "path",
    "linkpath",
    "mtime",
    "uid",
    "comment",
    "GNU.sparse.map",
    "GNU.sparse.major",
    "GNU.sparse.minor",
    "GNU.sparse.realsize",
    "GNU.sparse.size",
    "GNU.sparse.name",
    "GNU.sparse.numblocks",
    "hdrcharset",
    "SCHILY.xattr.x",
)
_PAX_VALUES = (
    "0",
    "1",
    "-1",
    "9" * 30,
    "1,2,3",
    "0,4294967296",
    "x",
    "",
    "1.5",
    "nan",
    "inf",
    "9" * 5000,
    "BINARY",
    "\u202e",
)


@st.composite
def _tars(draw: st.DrawFn) -> bytes:
    """A tar of any dialect and kinds of members, then any change of its bytes."""
    buffer = io.BytesIO()
    form = draw(st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
    with tarfile.open(
        fileobj=buffer, mode="w", format=form, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for name in draw(st.lists(_NAMES, max_size=4)):
            info = tarfile.TarInfo(_storable(name))
            info.type = draw(st.sampled_from(_TYPES))
            info.linkname = draw(st.sampled_from(["", "", "/etc/passwd", "../../x"]))
            content = draw(_CONTENTS)
            info.size = len(content)
            if form == tarfile.PAX_FORMAT:
                keys = draw(st.lists(st.sampled_from(_PAX_KEYS), max_size=3))
                info.pax_headers = {key: draw(st.sampled_from(_PAX_VALUES)) for key in keys}
            archive.addfile(info, io.BytesIO(content))
    data = buffer.getvalue()
    if len(data) > 200_000 or draw(st.integers(0, 2)) == 0:
        return data
    return draw(_checked(draw(spoilt_bytes(data.rstrip(b"\0") + bytes(1024)))))


def _storable(name: str) -> str:
    return name.encode("utf-8", "replace").decode()


@st.composite
def _checked(draw: st.DrawFn, tar: bytes) -> bytes:
    """The tar with the checksums of its headers set right, so that the rest of them is read."""
    if draw(st.booleans()):
        return tar
    data = bytearray(tar)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 155] = b"%06o\0" % sum(data[at : at + 512])
    return bytes(data)


@st.composite
def _gzips(draw: st.DrawFn, tar: bytes) -> bytes:
    """Odd gzip: many members, garbage behind, headers that do not end, packed twice, cut."""
    if len(tar) > 200_000:
        return gzip.compress(tar, 1)
    packed = gzip.compress(tar, 1)
    kind = draw(st.sampled_from(["many", "garbage", "header", "twice", "bytes", "raw", "empty"]))
    if kind == "many":
        return b"".join(gzip.compress(tar[i : i + 700], 1) for i in range(0, len(tar), 700))
    if kind == "garbage":
        return packed + draw(st.binary(min_size=1, max_size=64))
    if kind == "header":
        flags = draw(st.integers(0, 255))
        return (
            packed[:3] + bytes([flags]) + packed[4:10] + b"n" * draw(st.sampled_from([0, 70_000]))
        )
    if kind == "twice":
        return gzip.compress(packed)
    if kind == "raw":
        return zlib.compress(tar)
    if kind == "empty":
        return gzip.compress(b"") * draw(st.sampled_from([1, 20_000]))
    return draw(spoilt_bytes(packed))


@st.composite
def uploads(draw: st.DrawFn, good: list[Folder]) -> Folder:
    """The files of one of `good`, one or two of them spoilt."""
    files = dict(draw(st.sampled_from(good)))
    for name in draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=2, unique=True)):
        if name.endswith(".safetensors"):
            files[name] = draw(_safetensors(files[name]))
        elif name.endswith(".json"):
            files[name] = draw(spoilt_json(json.loads(files[name])))
        else:
            files[name] = draw(spoilt_bytes(files[name]))
    if _rarely(draw, 30):
        del files[draw(st.sampled_from(sorted(files)))]
    return files


@st.composite
def _safetensors(draw: st.DrawFn, good: bytes) -> bytes:
    """The file with another header over the same data, another length, or other bytes."""
    kind = draw(st.sampled_from(["header"] * 4 + ["tensors", "many", "bytes", "length", "swap"]))
    size = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + size]), good[8 + size :]
    if kind == "bytes":
        return draw(spoilt_bytes(good))
    if kind == "length":
        length = draw(st.sampled_from([*EDGES, size - 1, size + 1, len(good), len(good) - 8]))
        return length.to_bytes(8, "little") + good[8:]
    if kind == "header":
        return _framed(draw(spoilt_json(header)), data)
    if kind == "many":
        count = draw(st.sampled_from([1000, 20_001, 60_000]))
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        more = {f"t{i}": empty for i in range(count)}
        return _framed(json.dumps(header | more).encode(), data)
    names = sorted(name for name in header if name != "__metadata__")
    one, two = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    if kind == "swap":
        header[one], header[two] = header[two], header[one]
        return _framed(json.dumps(header).encode(), data)
    info: dict[str, Any] = header[one]
    changes: dict[str, Any] = {
        "dtype": st.sampled_from(["F32", "F64", "BOOL", "F4", "F8_E4M3", "C64", "I8", "x"]),
        "shape": st.sampled_from(
            [[], [0], [1], [2**31, 2**31], info["shape"][::-1], info["shape"] + [1], [1] * 9]
        ),
        "data_offsets": st.sampled_from(
            [[0, 0], [0, 4], [4, 0], header[two]["data_offsets"], [0, 2**63], [2**64, 2**65]]
        ),
    }
    field = draw(st.sampled_from(sorted(changes)))
    header[one] = info | {field: draw(changes[field] | VALUES)}
    return _framed(json.dumps(header).encode(), data)


def _framed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


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
    if _rarely(draw, 20):
        body = (b"--xyz\r\nContent-Disposition: " + _DISPOSITIONS[0] + b"\r\n\r\n\r\n") * 2000
    elif draw(st.booleans()):
        body = draw(spoilt_bytes(body))
    sizes = draw(st.sampled_from([1, 2, 7, 64, 1 << 16]))
    chunks = [body[i : i + sizes] for i in range(0, len(body), sizes)] or [b""]
    if not _rarely(draw, 6):
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
