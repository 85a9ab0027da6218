"""Archives that are nearly right, as a strategy of hypothesis."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import warnings
import zipfile
import zlib

from hypothesis import strategies as st

from tests.fuzz.mutations import EDGES, TEXTS, drawn, rarely, spoilt_bytes

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
            if rarely(draw, 6) and archive.filelist:
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


@drawn
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


@drawn
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
        flags = bytes([draw(st.integers(0, 255))])
        return packed[:3] + flags + packed[4:10] + b"n" * draw(st.sampled_from([0, 70_000]))
    if kind == "twice":
        return gzip.compress(packed)
    if kind == "raw":
        return zlib.compress(tar)
    if kind == "empty":
        return gzip.compress(b"") * draw(st.sampled_from([1, 20_000]))
    return draw(spoilt_bytes(packed))
