"""The files of uploads that are nearly right, as a strategy of hypothesis."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.mutations import EDGES, VALUES, drawn, rarely, spoilt_bytes, spoilt_json

#: The files of one upload, by name.
Folder = dict[str, bytes]


@drawn
def uploads(draw: st.DrawFn, good: list[Folder]) -> Folder:
    """The files of one of `good`, one or two of them spoilt."""
    files = dict(good[draw(st.integers(0, len(good) - 1))])
    names = st.sampled_from(sorted(files))
    for name in draw(st.lists(names, min_size=1, max_size=2, unique=True)):
        if name.endswith(".safetensors"):
            files[name] = draw(_safetensors(files[name]))
        elif name.endswith(".json"):
            files[name] = draw(spoilt_json(json.loads(files[name])))
        else:
            files[name] = draw(spoilt_bytes(files[name]))
    if rarely(draw, 30):
        del files[draw(names)]
    return files


@drawn
def _safetensors(draw: st.DrawFn, good: bytes) -> bytes:
    """The file with another header over the same data, another length, or other bytes."""
    kind = draw(st.sampled_from(_SPOILT))
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
        count = draw(st.sampled_from([1000, 9_900, 10_001, 60_000]))
        name = draw(st.sampled_from(_MANY_NAMES))
        size = draw(st.sampled_from([0, 1, 1]))
        infos = [
            {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [len(data) + i, len(data) + i + size],
            }
            for i in range(count)
        ]
        more = {name.format(i): info for i, info in enumerate(infos)}
        return _framed(json.dumps(header | more).encode(), data + bytes(count * size))
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


#: What a weights file is spoilt in, as often as it stands here.
_SPOILT = ("header",) * 8 + ("info",) * 8 + ("bytes", "length", "swap") * 3 + ("many",)


_MANY_NAMES = (
    "t{}",
    "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.{}.weight",
    f"base_model.model.model.layers.0.self_attn.q_proj{20 * '.base_layer'}.lora_A.{{}}.weight",
    "a." * 38 + "{}.lora_A.weight",
)


def _framed(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data
