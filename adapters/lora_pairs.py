"""The LoRA of a file: each A and B, with magnitude and bias, assigned to what it adapts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from adapters.errors import Violation
from adapters.expectation import Expectation
from adapters.fused import placed
from adapters.manifest import BaseSpec, EmbeddingLora, ModuleLora, ParameterLora
from adapters.peft_config import PeftConfig
from adapters.peft_files import TensorEntry
from adapters.tensor_roles import Kind, Roles, linear_sizes, parameter_shape


@dataclass
class Loras:
    """`scales` and `ranks` are by module or parameter; `magnitudes` and `biases` map linears to
    keys of vectors [out_features]; `mapped` are as in AdapterManifest."""

    modules: list[ModuleLora] = field(default_factory=list)
    embeddings: list[EmbeddingLora] = field(default_factory=list)
    parameters: list[ParameterLora] = field(default_factory=list)
    magnitudes: dict[str, str] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    mapped: list[tuple[str, str]] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)


def find_loras(
    roles: Roles, base: BaseSpec, config: PeftConfig | None, expected: Expectation | None
) -> Loras:
    """The LoRA in the base's order, and a violation for all that is not whole, not of the right
    shape or rank, not asked for by the config, or missing. Where the config could not be read, only
    the file's own faults are reported, and all scales are 0."""
    finder = _Finder(roles, base, config, expected)
    finder.find_pairs()
    finder.find_embedding()
    if config is not None and expected is not None:
        finder.report_missing(expected)
        finder.found.magnitudes = finder.vectors(expected, "lora_magnitude_vector", config.use_dora)
        finder.found.biases = finder.vectors(expected, "lora_B.bias", config.lora_bias)
        finder.move_magnitude()
    found = finder.found
    shapes = {tensor.name: tensor.shape for tensor in roles.tensors.values()}
    found.modules, violations, notes = placed(found.modules, shapes, base)
    found.violations += violations
    found.mapped += notes
    return found


class _Finder:
    def __init__(
        self,
        roles: Roles,
        base: BaseSpec,
        config: PeftConfig | None,
        expected: Expectation | None,
    ) -> None:
        self._roles = roles
        self._base = base
        self._config = config
        self._expected = expected
        self._sizes = linear_sizes(base)
        self._present: set[tuple[str, int]] = set()
        self.found = Loras()

    def find_pairs(self) -> None:
        """LoRA of linears and parameters."""
        pairs: dict[tuple[str, int], dict[str, TensorEntry]] = {}
        for role, tensor in self._roles.of("lora_A.weight", "lora_B.weight"):
            pairs.setdefault((role.path, role.levels), {})[role.kind[5]] = tensor
        expected = self._expected
        for (path, levels), tensors in pairs.items():
            self._present.add((path, levels))
            if expected is not None and (path, levels) in expected.parameters:
                self._add_parameter(expected.parameters[path, levels], tensors)
            elif path in self._sizes and not levels:
                self._add_linear(path, tensors)
            elif expected is not None:
                message = (
                    "has LoRA in the file, but is no linear layer that can be adapted, nor does "
                    "the config's target_parameters name a parameter of it here"
                )
                self._report("module_not_targeted", path + levels * ".base_layer", message)

    def find_embedding(self) -> None:
        path = self._base.embedding
        kinds: tuple[Kind, Kind] = ("lora_embedding_A", "lora_embedding_B")
        tensors = {role.kind[-1]: tensor for role, tensor in self._roles.of(*kinds)}
        strays = [
            role.path + role.levels * ".base_layer"
            for role, _ in self._roles.of(*kinds)
            if role.path != path or role.levels
        ]
        for stray in dict.fromkeys(strays):
            self._report("unknown_module", stray, "is not the base's input embedding")
        if strays or not tensors:
            return
        self._present.add((path, 0))
        if self._expected is not None and not self._expected.embedding:
            message = "is in the file, but the config's targets do not cover it"
            self._report("module_not_targeted", path, message)
        shape = parameter_shape(f"{path}.weight", self._base)
        hidden = shape[1] if shape else 0
        columns = self._base.vocab_size
        if (a := tensors.get("A")) and len(a.shape) == 2:
            columns = max(columns, a.shape[1])  # rows beyond the base's are checked with the others
        rank = self._rank(path, tensors, columns, hidden)
        if rank is not None:
            self._check_rank(path, path, rank)
            scale, (a_key, b_key) = self._scale(path, path, rank), _keys(tensors)
            self.found.embeddings.append(EmbeddingLora(path, rank, scale, a_key, b_key))

    def report_missing(self, expected: Expectation) -> None:
        wanted = dict.fromkeys((path, 0) for path in expected.linears)
        wanted |= dict.fromkeys([(self._base.embedding, 0)] if expected.embedding else [])
        names = expected.parameters
        for path, levels in [*wanted, *names]:
            if (path, levels) not in self._present:
                subject = names.get((path, levels), path)
                message = "is targeted by the config, but has no tensors in the file"
                self._report("incomplete_adapter", subject, message)

    def vectors(self, expected: Expectation, kind: Kind, wanted: bool) -> dict[str, str]:
        """Keys of DoRA's magnitudes or of the biases of B by module; all that has LoRA must have
        one, or nothing."""
        option = "use_dora" if kind == "lora_magnitude_vector" else "lora_bias"
        if wanted and expected.embedding and option == "lora_bias":
            message = "is true, but LoRA of an embedding has no bias; PEFT refuses both together"
            self._report("invalid_combination", option, message)
        keys: dict[str, str] = {}
        adapted = {path for path in expected.linears if (path, 0) in self._present}
        if expected.embedding and option == "use_dora":
            adapted.add(self._base.embedding)
        for role, tensor in self._roles.of(kind):
            reason = self._no_vector(role.path, role.levels, tensor, adapted)
            if not wanted:
                message = f"is not meant by the config, whose {option} is false"
                self._report("config_mismatch", tensor.name, message)
            elif reason is not None:
                self._report(*reason)
            else:
                keys[role.path] = tensor.name
        found = {role.path for role, _ in self._roles.of(kind)}
        for path in sorted(adapted - found if wanted else ()):
            self._report("incomplete_adapter", path, f"has no {kind}, though {option} is true")
        return keys

    def move_magnitude(self) -> None:
        """That of the embedding belongs to its LoRA."""
        if key := self.found.magnitudes.pop(self._base.embedding, None):
            embeddings = self.found.embeddings
            self.found.embeddings = [replace(delta, magnitude_key=key) for delta in embeddings]

    def _no_vector(
        self, path: str, levels: int, tensor: TensorEntry, adapted: set[str]
    ) -> tuple[str, str, str] | None:
        """Why a vector cannot be applied."""
        if levels or path not in adapted:
            message = "is in the file, but its module has no LoRA that it could belong to"
            return "module_not_targeted", tensor.name, message
        if path == self._base.embedding:
            shape = parameter_shape(f"{path}.weight", self._base)
            size = shape[1] if shape else 0
        elif path not in self._base.module_index:
            message = f"is a vector of {path!r}, which this base holds in another cut; not served"
            return "unsupported_tensor", tensor.name, message
        else:
            size = self._sizes[path][1]
        if tensor.shape != (size,):
            return "shape_mismatch", tensor.name, f"has shape {list(tensor.shape)}, not [{size}]"
        return None

    def _add_linear(self, path: str, tensors: dict[str, TensorEntry]) -> None:
        pattern_name = path
        if self._expected is not None:
            if path not in self._expected.linears:
                message = "is in the file, but the config's targets do not cover it"
                self._report("module_not_targeted", path, message)
            pattern_name = self._expected.linears.get(path, path)
        rank = self._rank(path, tensors, *self._sizes[path])
        if rank is not None:
            self._check_rank(path, pattern_name, rank)
            scale, (a_key, b_key) = self._scale(path, pattern_name, rank), _keys(tensors)
            self.found.modules.append(ModuleLora(path, rank, scale, a_key, b_key))

    def _add_parameter(self, path: str, tensors: dict[str, TensorEntry]) -> None:
        shape, transposed = self._base.parameters[path], path in self._base.transposed
        experts = shape[0] if len(shape) == 3 else 1
        columns, rows = shape[-2:] if transposed else shape[:-3:-1]
        rank = self._rank(path, tensors, columns, rows, experts)
        if rank is not None:
            self._check_rank(path, path, rank)
            scale, (a_key, b_key) = self._scale(path, path, rank), _keys(tensors)
            lora = ParameterLora(path, rank, experts, scale, a_key, b_key, transposed)
            self.found.parameters.append(lora)

    def _rank(
        self,
        subject: str,
        tensors: dict[str, TensorEntry],
        columns: int,
        rows: int,
        experts: int = 1,
    ) -> int | None:
        """The rank where A is [experts * rank, columns] and B [rows, rank * experts]."""
        for side, other in (("A", "B"), ("B", "A")):
            if side not in tensors:
                message = f"has lora_{other} but no lora_{side} in the file"
                self._report("incomplete_adapter", subject, message)
        ranks = f"{experts} * rank" if experts > 1 else "rank"
        widths = {"A": (1, columns), "B": (0, rows)}
        found = set()
        wrong = False
        for side, tensor in tensors.items():
            axis, size = widths[side]
            if len(tensor.shape) == 2 and tensor.shape[axis] == size:
                found.add(tensor.shape[1 - axis])
                if tensor.shape[1 - axis] % experts == 0:
                    continue
            wrong = True
            message = (
                f"has shape {list(tensor.shape)}; the base expects lora_A [{ranks}, {columns}] and "
                f"lora_B [{rows}, {ranks}]{self._hint(subject, side, tensor)}"
            )
            self._report("shape_mismatch", tensor.name, message)
        if wrong or len(tensors) < 2:
            return None
        if len(found) > 1:
            a, b = (list(tensors[side].shape) for side in "AB")
            message = f"has lora_A {a} and lora_B {b}, which differ in rank"
            self._report("shape_mismatch", subject, message)
            return None
        self.found.ranks[subject] = found.pop() // experts
        return self.found.ranks[subject]

    def _hint(self, subject: str, side: str, tensor: TensorEntry) -> str:
        base = self._base
        larger = tensor.shape and tensor.shape[0] > base.vocab_size
        if subject == base.output_module and side == "B" and larger:
            return "; LoRA on the head of a larger vocabulary is not served: save it whole instead"
        return ""

    def _check_rank(self, subject: str, pattern_name: str, rank: int) -> None:
        config = self._config
        if config is None or config.rank is None or config.rank_pattern is None:
            return
        asked = config.rank_pattern.get(pattern_name, config.rank)
        if rank != asked:
            message = f"has rank {rank} in the file, but {asked} in the config"
            self._report("rank_mismatch", subject, message)

    def _scale(self, subject: str, pattern_name: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) under rank-stabilised LoRA, as PEFT has it."""
        config = self._config
        if config is None or config.alpha is None or config.alpha_pattern is None:
            return 0.0
        alpha = config.alpha_pattern.get(pattern_name, config.alpha)
        scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        self.found.scales[subject] = scale
        return scale

    def _report(self, code: str, subject: str, message: str) -> None:
        self.found.violations.append(Violation(code, subject, message))


def _keys(tensors: dict[str, TensorEntry]) -> Iterator[str]:
    return (tensors[side].name for side in "AB")
