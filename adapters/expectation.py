"""What a PEFT config asks for on a base: which modules and parameters must have which tensors.

As `LoraModel.inject_adapter` and `set_additional_trainable_modules` of PEFT 0.21 decide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from peft.utils import transformers_weight_conversion as conversion

from adapters.errors import Violation
from adapters.manifest import BaseSpec
from adapters.peft_config import PeftConfig
from adapters.tensor_roles import Roles, owner, parameter_shape


@dataclass
class Expectation:
    """What a file must hold, all by full path.

    `linears` maps each linear with LoRA, by the name that the file has for it, to the name that the
    config's patterns are matched against. `parameters` maps (module, wrappers within) to the
    parameter whose LoRA stands there. `saved_modules` are exchanged whole, `saved` are their
    parameters. `tokens` maps embedding and head to the ids whose rows are replaced;
    `shared_tokens`: a tied head gets the embedding's rows.
    """

    linears: dict[str, str] = field(default_factory=dict)
    embedding: bool = False
    parameters: dict[tuple[str, int], str] = field(default_factory=dict)
    saved_modules: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shared_tokens: bool = False
    violations: list[Violation] = field(default_factory=list)

    def wrappers(self, module: str, base: BaseSpec) -> int:
        """How many `.base_layer` stand between a module's path and its own parameters."""
        if module in self.linears or (self.embedding and module == base.embedding):
            return 1
        return sum(path == module for path, _ in self.parameters)


def expectation(config: PeftConfig, base: BaseSpec, roles: Roles) -> Expectation | None:
    """None where the config does not say what it targets. `roles` tell which of the names that a
    fused projection has the file uses."""
    if config.targets is None:
        return None
    expected = Expectation()
    report = expected.violations.append
    linears = _names_used(base, roles)
    others = {owner(path) for path in base.parameters} | {base.embedding}
    others -= {*linears, *base.module_index, ""}
    targeted = config.targets.select(linears, base.output_module, others)
    expected.linears = {path: path for path in linears if path in targeted}
    expected.embedding = base.embedding in targeted
    for path in sorted(targeted & others - {base.embedding}):
        message = "is targeted by the config, but is neither a linear layer nor the input embedding"
        report(Violation("unsupported_target", path, message))
    _add_parameters(expected, config, base)
    expected.violations += _converted_targets(config, base)
    _add_saved(expected, config, base)
    _add_tokens(expected, config, base)
    if not (expected.linears or expected.embedding or expected.parameters or expected.violations):
        message = "match nothing that the base has; PEFT refuses such an adapter"
        report(Violation("no_target", "target_modules", message))
    return expected


def _names_used(base: BaseSpec, roles: Roles) -> list[str]:
    """The base's linears under the names of the model that the adapter was trained on.

    That held a projection of the base in another cut if the file names it so, in all layers.
    """
    adapted = {role.path for role, _ in roles.of("lora_A.weight", "lora_B.weight")}
    names = dict.fromkeys(base.module_index)
    for whole, parts in base.fused.items():
        kind = whole.rpartition(".")[2]
        cuts = {w: p for w, p in base.fused.items() if w.rpartition(".")[2] == kind}
        paths = [path for path, _ in parts]
        held, other = ([whole], paths) if whole in names else (paths, [whole])
        if whole in base.module_index:
            foreign = any(path in adapted for p in cuts.values() for path, _ in p)
        else:
            foreign = any(path in adapted for path in cuts)
        if foreign:
            names |= dict.fromkeys(other)
            for path in held:
                if path not in adapted:
                    names.pop(path, None)
    return list(names)


def _add_parameters(expected: Expectation, config: PeftConfig, base: BaseSpec) -> None:
    """`target_parameters`: of several in one module, each wraps the one before it."""
    for module, paths in groupby(base.parameters, owner):
        chosen = [path for path in paths if _ends(path, config.target_parameters, dotted=True)]
        for index, path in enumerate(chosen):
            if (message := _no_target(path, expected, base)) is not None:
                expected.violations.append(Violation("unsupported_target", path, message))
            elif module in base.module_index:
                expected.linears[module] = path
            else:
                expected.parameters[module, len(chosen) - 1 - index] = path


def _no_target(path: str, expected: Expectation, base: BaseSpec) -> str | None:
    shape, module = base.parameters[path], owner(path)
    if module in expected.linears or (expected.embedding and module == base.embedding):
        return "is in target_parameters, but its module is targeted too, which PEFT refuses"
    if len(shape) not in (2, 3):
        return f"is in target_parameters, but has {len(shape)} dimensions; PEFT adapts 2 or 3"
    if module in base.module_index and path in base.transposed:
        return "is in target_parameters, but is stored transposed; target its module instead"
    if shape[0] == 1 and len(shape) == 3 and path in base.transposed:
        return "is in target_parameters, but a single transposed expert cannot be adapted"
    return None


def _converted_targets(config: PeftConfig, base: BaseSpec) -> Iterator[Violation]:
    """Targets that PEFT rewrites on models whose experts transformers 5 holds in one parameter."""
    tables: Any = conversion
    kind = tables._MODEL_TO_CONVERSION_PATTERN.get(base.model_type)
    renamed: Mapping[str, str] = tables._MOE_TARGET_MODULE_MAPPING.get(kind, {})
    if not renamed or config.targets is None or config.targets.include is None:
        named = ["all-linear"] if renamed and config.targets else []
    elif config.targets.include.pattern is not None:
        named = ["a pattern"]
    else:
        named = [n for n in config.targets.include.names if n.rpartition(".")[2] in renamed]
    if named:
        message = (
            f"holds {', '.join(sorted(named)[:8])}, which PEFT rewrites for {base.model_type!r}, "
            "whose experts are one parameter; load the adapter with PEFT and save it again, which "
            "gives a config that names them in target_parameters"
        )
        yield Violation("unsupported_target", "target_modules", message)


def _add_saved(expected: Expectation, config: PeftConfig, base: BaseSpec) -> None:
    """`modules_to_save`, which PEFT matches by the end of a path, whatever stands before it."""
    found = {path for path in _modules(base) if _ends(path, config.saved)}
    expected.saved_modules = frozenset(found)
    expected.saved = frozenset(path for path in _all_parameters(base) if _within(path, found))
    adapted = [*expected.linears, *expected.parameters.values()]
    adapted += [base.embedding] if expected.embedding else []
    around_adapted = set(_with_owners(adapted))
    for path in sorted(found):
        if _within(owner(path), found):
            message = "is saved by modules_to_save, and so is a module around it, as PEFT refuses"
            expected.violations.append(Violation("unsupported_target", path, message))
        elif path in around_adapted:
            message = "is saved by modules_to_save, but it, or something in it, has LoRA too"
            expected.violations.append(Violation("unsupported_target", path, message))


def _add_tokens(expected: Expectation, config: PeftConfig, base: BaseSpec) -> None:
    """`trainable_token_indices`: rows of the embedding, of the head, or of both where tied."""
    for name, indices in config.token_rows.items():
        ending = base.embedding if name is None else name
        found = {path for path in _modules(base) if path.endswith(ending)}
        if not found or found - {base.embedding, base.output_module}:
            message = f"{ending!r} must name the input embedding or the head, nothing else"
            report = Violation("unsupported_target", "trainable_token_indices", message)
            expected.violations.append(report)
            continue
        for path in found:
            if path in expected.tokens:
                message = f"names {path!r} twice"
                report = Violation("unsupported_target", "trainable_token_indices", message)
                expected.violations.append(report)
            expected.tokens[path] = indices
    head = base.output_module
    if base.tied_head and head is not None and base.embedding in expected.tokens:
        rows = expected.tokens[base.embedding]
        expected.shared_tokens = expected.tokens.get(head, rows) == rows
        expected.tokens[head] = expected.tokens.get(head, rows)
    wrapped = {path for path, _ in expected.parameters}
    for path in expected.tokens:
        if (
            expected.wrappers(path, base)
            or path in wrapped
            or _within(path, expected.saved_modules)
        ):
            message = f"{path!r} has LoRA or is saved whole too, which cannot be combined"
            report = Violation("unsupported_target", "trainable_token_indices", message)
            expected.violations.append(report)


def _modules(base: BaseSpec) -> set[str]:
    """Every module that holds an exchangeable parameter, itself or further in."""
    return set(_with_owners(owner(path) for path in _all_parameters(base)))


def _with_owners(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        while path:
            yield path
            path = owner(path)


def _all_parameters(base: BaseSpec) -> Iterator[str]:
    yield from base.parameters
    head = f"{base.output_module}.weight"
    if head not in base.parameters and parameter_shape(head, base) is not None:
        yield head


def _ends(path: str, names: tuple[str, ...], *, dotted: bool = False) -> bool:
    if dotted:
        return path in names or path.endswith(tuple(f".{name}" for name in names))
    return path.endswith(names)


def _within(path: str, modules: set[str] | frozenset[str]) -> bool:
    """Whether a path is one of `modules` or inside one."""
    while path:
        if path in modules:
            return True
        path = owner(path)
    return False
