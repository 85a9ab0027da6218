"""What each tensor of a file is, by its name: a role at a module or parameter of the base.

Names are read as PEFT 0.21 writes them, `base_model.model.<path>.lora_A.weight` and the like; what
others write is turned into those first (`adapters.key_names`). A name that is neither is reported,
never guessed at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from adapters.errors import Violation
from adapters.key_names import PREFIX, canonical
from adapters.manifest import WEIGHTS_FILE, BaseSpec
from adapters.peft_files import TensorEntry, TensorTable

#: The dtypes served, as safetensors spells them.
SERVED_DTYPES = ("F32", "F16", "BF16")

Kind = Literal[
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "trainable_tokens_delta",
    "parameter",
    "base",
    "token base",
    "original",
    "spare",
]


@dataclass(frozen=True)
class Role:
    """One tensor's part in an adapter.

    `path` is that of a module for LoRA, magnitudes and token rows, else that of a parameter: a
    "parameter" stands under its own name, a "base" one under `levels` wrappers (`.base_layer`), a
    "token base" one within the wrapper of token rows; an "original" and a "spare" one are copies
    that PEFT may keep beside a saved module. A LoRA's `levels` are the wrappers within its own,
    which tell the parameters of one module apart.
    """

    kind: Kind
    path: str
    levels: int = 0


@dataclass
class Roles:
    """All roles of a file; `mapped` are tensors not taken literally, and how they were read;
    `twins` are tensors whose role another one has already, and that other."""

    tensors: dict[Role, TensorEntry] = field(default_factory=dict)
    twins: list[tuple[TensorEntry, TensorEntry]] = field(default_factory=list)
    mapped: list[tuple[str, str]] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    def of(self, *kinds: Kind) -> Iterator[tuple[Role, TensorEntry]]:
        return ((role, tensor) for role, tensor in self.tensors.items() if role.kind in kinds)

    def get(self, kind: Kind, path: str, levels: int = 0) -> TensorEntry | None:
        return self.tensors.get(Role(kind, path, levels))


def find_roles(table: TensorTable, base: BaseSpec) -> Roles:
    """The role of each tensor; a violation for each that has none or is of no served dtype."""
    roles = Roles()
    known = known_modules(base)
    for tensor in table.tensors:
        _report_dtype(tensor, roles.violations)
        note = None
        role = _role(tensor.name, base)
        if role is None or not _is_known(role, known):
            name, note = canonical(tensor.name, base)
            role = _role(name, base)
        if role is None:
            roles.violations.append(_unusable(tensor.name, base))
        elif not _is_known(role, known):
            roles.violations.append(_unknown(tensor.name, role.path, base))
        elif (twin := roles.tensors.setdefault(role, tensor)) is not tensor:
            roles.twins.append((tensor, twin))
        elif note is not None:
            roles.mapped.append((tensor.name, note))
    if not table.tensors:
        roles.violations.append(Violation("empty_adapter", WEIGHTS_FILE, "holds no tensors"))
    return roles


def linear_sizes(base: BaseSpec) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) of each linear a file may name: the base's own, and those that it
    holds in another cut (see `BaseSpec.fused`)."""
    sizes = {
        path: (target.in_features, target.out_features)
        for target in base.targets
        for path in target.modules
    }
    for whole, parts in base.fused.items():
        if whole in sizes:
            sizes |= {path: (sizes[whole][0], out) for path, out in parts if path not in sizes}
        elif all(path in sizes for path, _ in parts):
            sizes[whole] = (sizes[parts[0][0]][0], sum(out for _, out in parts))
    return sizes


def known_modules(base: BaseSpec) -> frozenset[str]:
    """Every module path that an adapter may name."""
    return frozenset({*linear_sizes(base), *_owners(base.parameters), base.embedding}) - {""}


def owner(parameter: str) -> str:
    """The module that holds a parameter."""
    return parameter.rpartition(".")[0]


_FULL = ("parameter", "base", "token base", "original", "spare")
_ADDED: dict[str, Kind] = {
    ".lora_A.weight": "lora_A.weight",
    ".lora_B.weight": "lora_B.weight",
    ".lora_B.bias": "lora_B.bias",
    ".lora_embedding_A": "lora_embedding_A",
    ".lora_embedding_B": "lora_embedding_B",
    ".lora_magnitude_vector": "lora_magnitude_vector",
    ".lora_magnitude_vector.weight": "lora_magnitude_vector",
}
_TOKENS = ".token_adapter"
_BESIDE: dict[str, Kind] = {".original_module.": "original", ".modules_to_save.": "spare"}

#: What tensors of other methods are, by a part of their name.
_FEATURES = {
    "lora_E": "an AdaLoRA tensor",
    "lora_diag": "a KaSA tensor",
    ".experts.": "of single experts, which this base holds in one parameter; load the adapter with "
    "PEFT and save it again, which turns it into LoRA of the parameter (target_parameters)",
}


def _is_known(role: Role, modules: frozenset[str]) -> bool:
    return role.kind in _FULL or role.path in modules


def _owners(parameters: Iterable[str]) -> Iterator[str]:
    return (owner(path) for path in parameters)


def _role(name: str, base: BaseSpec) -> Role | None:
    if not name.startswith(PREFIX):
        return None
    rest = name.removeprefix(PREFIX)
    if _is_parameter(rest, base):
        return Role("parameter", rest)
    for end, kind in _ADDED.items():
        if rest.endswith(end):
            module, levels = _unwrapped(rest.removesuffix(end))
            return Role(kind, module, levels)
    if rest.endswith(f"{_TOKENS}.trainable_tokens_delta"):
        path = rest.removesuffix(f"{_TOKENS}.trainable_tokens_delta")
        return Role("trainable_tokens_delta", path)
    for infix, kind in _BESIDE.items():
        if infix in rest and _is_parameter(path := rest.replace(infix, ".", 1), base):
            return Role(kind, path)
    return _base_role(rest, base)


def _base_role(rest: str, base: BaseSpec) -> Role | None:
    """The role of a parameter that stands under wrappers."""
    module, _, leaf = rest.rpartition(".")
    module, levels = _unwrapped(module)
    kind: Kind = "token base" if module.endswith(_TOKENS) else "base"
    path = f"{module.removesuffix(_TOKENS)}.{leaf}"
    return Role(kind, path, levels) if levels and _is_parameter(path, base) else None


def _unwrapped(module: str) -> tuple[str, int]:
    """A path without the wrappers at its end, and how many there were."""
    levels = 0
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
        levels += 1
    return module, levels


def _is_parameter(path: str, base: BaseSpec) -> bool:
    return parameter_shape(path, base) is not None


def parameter_shape(path: str, base: BaseSpec) -> tuple[int, ...] | None:
    """A parameter's shape, also under the second name of a tied head; None for none."""
    if base.tied_head and path == f"{base.output_module}.weight":
        path = f"{base.embedding}.weight" if path not in base.parameters else path
    return base.parameters.get(path)


def _report_dtype(tensor: TensorEntry, violations: list[Violation]) -> None:
    if tensor.dtype not in SERVED_DTYPES:
        message = f"has dtype {tensor.dtype}; {', '.join(SERVED_DTYPES)} are served"
        violations.append(Violation("unsupported_dtype", tensor.name, message))


def _unknown(name: str, module: str, base: BaseSpec) -> Violation:
    for part, what in _FEATURES.items():
        if part in f".{module}.":
            return Violation("unsupported_tensor", name, f"is {what}")
    message = (
        f"belongs to {module!r}, which is no module of {base.name!r} that can be adapted; "
        f"a known name is {_example(base)!r}"
    )
    return Violation("unknown_module", name, message)


def _unusable(name: str, base: BaseSpec) -> Violation:
    """For a tensor whose name says nothing."""
    for part, what in _FEATURES.items():
        if part in name:
            return Violation("unsupported_tensor", name, f"is {what}")
    if name.startswith(PREFIX) and "lora_" not in name:
        message = f"is a full tensor of something that {base.name!r} cannot exchange for an adapter"
        return Violation("unsupported_tensor", name, message)
    message = f"is not named as PEFT names it, such as {_example(base)!r}"
    return Violation("unexpected_key", name, message)


def _example(base: BaseSpec) -> str:
    module = next((path for target in base.targets for path in target.modules), "<module>")
    return f"{PREFIX}{module}.lora_A.weight"
