"""Tensor names of other writers, read as PEFT would have written them.

PEFT's `save_pretrained` names a tensor `base_model.model.<module path>.lora_A.weight` and the like.
Unsloth, Axolotl, LLaMA-Factory, Ludwig, NeMo AutoModel and torchtune's PEFT export save through it,
but what reaches a file can differ by

- the adapter's name, `lora_A.default.weight`, in a state dict that was saved without PEFT's help;
- segments of wrappers: `module` (DDP), `_orig_mod` (torch.compile), `_fsdp_wrapped_module` and
  `_checkpoint_wrapped_module`;
- the prefix: absent, doubled, or that of a model that nests the same decoder otherwise, such as the
  multimodal sibling that Unsloth trains (`language_model.model.…`), or of a diffusers pipeline's
  component (`transformer.…`, `text_encoder.…`);
- the words of diffusers and kohya for A and B: `lora_down` and `lora_up`, `lora.down` and
  `lora.up`, `lora_linear_layer.down` and `.up`.

A name is read so only if exactly one reading meets a module of the base. Not read, and so refused:
`.alpha` tensors of kohya, whose scale would contradict the config's; torchtune's own names
(`attn.output_proj.lora_a.weight`), whose rows of q and k are ordered for another rotary embedding;
NeMo's Megatron names (`linear_qkv.adapter.linear_in`), whose rows of q, k and v are interleaved.
MLX-LM has a layout of its own: see `adapters.foreign`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adapters.manifest import BaseSpec

PREFIX = "base_model.model."
#: Segments a name may have beyond those of the base's longest path.
MORE_SEGMENTS = 40


def canonical(name: str, base: BaseSpec) -> tuple[str, str | None]:
    """The name PEFT itself gives to the tensor called `name`, and how `name` was read.

    The second is None where `name` is returned as it is: because PEFT writes it so, or because it
    has no reading, or several, that meet a module of `base`.
    """
    paths = _paths_of(base)
    segments = name.split(".")
    if len(segments) > paths.most_segments:
        return name, None
    readings = _readings(segments, paths)
    if name in readings:
        return name, None
    plain = [segment for segment in segments if segment not in _WRAPPERS]
    if len(plain) < len(segments):
        readings = _readings(plain, paths)
    if len(readings) != 1:
        return name, None
    (reading,) = readings.values()
    wrappers = dict.fromkeys(segment for segment in segments if segment in _WRAPPERS)
    how = [f"without the wrapper {wrapper!r}" for wrapper in wrappers]
    return reading.name, "; ".join([*how, *reading.how])


def module_path(path: str, base: BaseSpec) -> str | None:
    """The one module of `base` that `path` means, as it is or but for its prefix; else None.

    Modules are the base's linears, its embedding, all that hold an exchangeable parameter, and the
    fused projections and parts of them that the base's own linears stand in for.
    """
    return _paths_of(base).resolve(path)


# What training wraps modules in, anywhere in a path.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# What stands in front of a decoder's own layers, depending on what holds it.
_OUTER = frozenset(
    "base_model model module transformer language_model text_model text_encoder".split()
)

# How names end, by segments: as written, and as PEFT writes it; _ADAPTER is any adapter's name.
_ADAPTER = ""
_ENDS: dict[tuple[str, ...], str] = {
    ("weight",): "weight",
    ("bias",): "bias",
    ("lora_A", "weight"): "lora_A.weight",
    ("lora_B", "weight"): "lora_B.weight",
    ("lora_B", "bias"): "lora_B.bias",
    ("lora_embedding_A",): "lora_embedding_A",
    ("lora_embedding_B",): "lora_embedding_B",
    ("lora_magnitude_vector",): "lora_magnitude_vector",
    ("lora_magnitude_vector", "weight"): "lora_magnitude_vector",
    ("token_adapter", "trainable_tokens_delta"): "token_adapter.trainable_tokens_delta",
    ("lora_A", _ADAPTER, "weight"): "lora_A.weight",
    ("lora_B", _ADAPTER, "weight"): "lora_B.weight",
    ("lora_B", _ADAPTER, "bias"): "lora_B.bias",
    ("lora_embedding_A", _ADAPTER): "lora_embedding_A",
    ("lora_embedding_B", _ADAPTER): "lora_embedding_B",
    ("lora_magnitude_vector", _ADAPTER): "lora_magnitude_vector",
    ("lora_magnitude_vector", _ADAPTER, "weight"): "lora_magnitude_vector",
    ("token_adapter", "trainable_tokens_delta", _ADAPTER): "token_adapter.trainable_tokens_delta",
    ("lora_down", "weight"): "lora_A.weight",
    ("lora_up", "weight"): "lora_B.weight",
    ("lora", "down", "weight"): "lora_A.weight",
    ("lora", "up", "weight"): "lora_B.weight",
    ("lora_linear_layer", "down", "weight"): "lora_A.weight",
    ("lora_linear_layer", "up", "weight"): "lora_B.weight",
}


class _Paths:
    """The paths of a base that a tensor's name may hold, found also without what is around them."""

    def __init__(self, base: BaseSpec) -> None:
        self.base = base
        parts = (path for held in base.fused.values() for path, _ in held)
        owners = (path.rpartition(".")[0] for path in base.parameters)
        modules = {*base.module_index, *base.fused, *parts, *owners, base.embedding} - {""}
        self._modules = frozenset(modules)
        self.most_segments = MORE_SEGMENTS + max((p.count(".") for p in modules), default=0)
        self._parameters = frozenset(base.parameters)
        self._by_core = _by_core(self._modules)
        self._parameters_by_core = _by_core(self._parameters)

    def resolve(self, path: str) -> str | None:
        return _resolved(path, self._modules, self._by_core)

    def resolve_parameter(self, path: str) -> str | None:
        return _resolved(path, self._parameters, self._parameters_by_core)


_last: _Paths | None = None


def _paths_of(base: BaseSpec) -> _Paths:
    """Those of `base`, kept until another base is asked for: all tensors of a file have one."""
    global _last
    paths = _last
    if paths is None or paths.base is not base:
        _last = paths = _Paths(base)
    return paths


def _by_core(paths: frozenset[str]) -> dict[str, str | None]:
    """Path without its outer segments -> path; None where several have the same core."""
    cores: dict[str, str | None] = {}
    for path in paths:
        core = _core(path)
        cores[core] = None if core in cores else path
    return cores


def _core(path: str) -> str:
    segments = path.split(".")
    while segments and segments[0] in _OUTER:
        del segments[0]
    return ".".join(segments)


def _resolved(path: str, known: frozenset[str], by_core: dict[str, str | None]) -> str | None:
    for literal in (path.removeprefix(PREFIX), path):
        if literal in known:
            return literal
    core = _core(path)
    return by_core.get(core) if core else None


@dataclass(frozen=True)
class _Reading:
    name: str
    how: tuple[str, ...]


def _readings(segments: list[str], paths: _Paths) -> dict[str, _Reading]:
    """Every way to read a name that meets a module or a parameter of the base, by PEFT's name."""
    found: dict[str, _Reading] = {}
    for reading in (*_parameters(segments, paths), *_parts_of_modules(segments, paths)):
        found.setdefault(reading.name, reading)
    return found


def _parameters(segments: list[str], paths: _Paths) -> Iterator[_Reading]:
    """As a parameter that the adapter has a tensor of its own for."""
    path = ".".join(segments)
    if (parameter := paths.resolve_parameter(path)) is not None:
        yield _Reading(PREFIX + parameter, _moved(path, parameter))
    if "modules_to_save" in segments[1:-2]:
        at = len(segments) - 1 - segments[::-1].index("modules_to_save")
        how = f"modules_to_save of the adapter {segments[at + 1]!r}"
        path = ".".join(segments[:at] + segments[at + 2 :])
        if (parameter := paths.resolve_parameter(path)) is not None:
            yield _Reading(PREFIX + parameter, (how, *_moved(path, parameter)))


def _parts_of_modules(segments: list[str], paths: _Paths) -> Iterator[_Reading]:
    """As something that PEFT keeps at a module."""
    for end, written in _ENDS.items():
        size = len(end)
        if len(segments) <= size or segments[-size] != end[0]:
            continue
        tail = segments[-size:]
        if not all(map(_fits, tail, end)):
            continue
        head = segments[:-size]
        nested = 0
        while head and head[-1] == "base_layer":
            head.pop()
            nested += 1
        path = ".".join(head)
        if (module := paths.resolve(path)) is None:
            continue
        adapters = [word for word, wanted in zip(tail, end, strict=True) if wanted == _ADAPTER]
        how = tuple(f"without the adapter name {word!r}" for word in adapters)
        if not adapters and ".".join(tail) != written:
            how += (f"{'.'.join(tail)} read as {written}",)
        whole = ".".join([module, *["base_layer"] * nested, written])
        yield _Reading(PREFIX + whole, how + _moved(path, module))


def _fits(segment: str, wanted: str) -> bool:
    return bool(segment) if wanted == _ADAPTER else segment == wanted


def _moved(path: str, found: str) -> tuple[str, ...]:
    if path == PREFIX + found:
        return ()
    if path == found:
        return (f"with PEFT's prefix {PREFIX!r}",)
    return (f"path read as {found!r}",)
