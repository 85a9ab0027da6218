"""The full tensors of a file: saved modules, biases, embeddings, token rows, added vocabulary.

What PEFT 0.21 does with each was taken from `set_peft_model_state_dict`: those of `modules_to_save`
go to a copy of the module; any other whose name is that of a parameter of the adapted model is
loaded into the base itself, where a tied head and embedding change together; the rest is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from adapters.errors import Violation
from adapters.expectation import Expectation
from adapters.lora_pairs import Loras
from adapters.manifest import BaseSpec, ReplacedParameter, TokenRows
from adapters.peft_config import PeftConfig
from adapters.peft_files import TensorEntry
from adapters.tensor_contents import Contents
from adapters.tensor_roles import Role, Roles, owner, parameter_shape


@dataclass
class FullTensors:
    """`replaced` maps parameters to tensors of the file, `biases` linears to keys of their own
    bias; `unused` are as in AdapterManifest."""

    replaced: dict[str, TensorEntry] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    token_rows: list[TokenRows] = field(default_factory=list)
    vocab_size: int = 0
    unused: list[tuple[str, str]] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)

    def parameters(self) -> Iterator[ReplacedParameter]:
        return (ReplacedParameter(path, tensor.name) for path, tensor in self.replaced.items())


def find_full_tensors(
    roles: Roles,
    base: BaseSpec,
    config: PeftConfig,
    expected: Expectation,
    loras: Loras,
    contents: Contents,
) -> FullTensors:
    """A violation for each tensor that PEFT would not load, or that the config does not ask for,
    and for each that is missing. Raises AdapterRejected where the file ends early."""
    finder = _Finder(roles, base, config, expected, contents)
    for role, tensor in roles.of("parameter", "base", "token base", "original", "spare"):
        finder.assign(role, tensor)
    finder.replace_vocabulary()
    finder.report_missing()
    finder.measure_vocabulary(loras)
    finder.find_token_rows()
    return finder.found


class _Finder:
    def __init__(
        self,
        roles: Roles,
        base: BaseSpec,
        config: PeftConfig,
        expected: Expectation,
        contents: Contents,
    ) -> None:
        self._roles = roles
        self._base = base
        self._config = config
        self._expected = expected
        self._contents = contents
        self._tables = [f"{base.embedding}.weight"]
        if base.output_module is not None:
            self._tables.append(f"{base.output_module}.weight")
        # Embedding and head as PEFT loads them into the base: parameter -> tensor, and whether it
        # may differ from the base's.
        self._loaded: dict[str, tuple[TensorEntry, bool]] = {}
        self._biases: set[str] = set()
        self._renamed = {name for name, _ in roles.mapped}
        self.found = FullTensors()

    def assign(self, role: Role, tensor: TensorEntry) -> None:
        path, module = role.path, owner(role.path)
        is_bias = path.endswith(".bias")
        if role.kind in ("original", "spare"):
            self._assign_spare(role, tensor)
        elif role.kind == "parameter" and path in self._expected.saved:
            if self._has_shape(path, tensor):
                self.found.replaced[path] = tensor
        elif is_bias and role.kind != "token base" and path not in self._expected.saved:
            self._assign_bias(role, tensor)
        elif path in self._tables and path not in self._expected.saved:
            if self._has_shape(path, tensor):
                self._assign_table(role, tensor)
        elif role.kind == "parameter":
            message = "is a full tensor, but the config's modules_to_save does not name its module"
            self._report("module_not_targeted", tensor.name, message)
        else:
            message = f"is a copy of the base's {module!r}, which PEFT does not load; leave it out"
            self._report("unsupported_tensor", tensor.name, message)

    def replace_vocabulary(self) -> None:
        """Embedding and head that are not the base's; where tied, what is loaded into one of them
        is loaded into both."""
        shared = self._base.tied_head and not self._expected.saved.intersection(self._tables)
        for paths in [self._tables] if shared else [[path] for path in self._tables]:
            loaded = {path: self._loaded[path] for path in paths if path in self._loaded}
            if loaded:
                self._load(paths, loaded)

    def report_missing(self) -> None:
        for path in sorted(self._expected.saved - self._named()):
            message = "is in a module that modules_to_save names, but is not in the file"
            self._report("incomplete_adapter", path, message)
        if self._config.bias == "none":
            return
        settled = self._biases | self._expected.saved
        for path in self._base.parameters:
            if not path.endswith(".bias") or path in settled:
                continue
            wrapped = self._expected.wrappers(owner(path), self._base)
            if wrapped or self._config.bias == "all":
                message = f'is not in the file, though bias is "{self._config.bias}"'
                self._report("incomplete_adapter", path, message)

    def measure_vocabulary(self, loras: Loras) -> None:
        """How many token ids the adapter has, which all that goes by them must agree on."""
        base = self._base
        rows = {tensor.name: tensor.shape[0] for tensor in self._of_vocabulary()}
        rows |= {delta.a_key: self._columns(delta.a_key) for delta in loras.embeddings}
        size = max(rows.values(), default=0)
        if size <= base.vocab_size:
            return
        self.found.vocab_size = size
        for name, count in rows.items():
            if count != size:
                message = f"is for {count} tokens, but others in the file are for {size}"
                self._report("vocabulary_mismatch", name, message)
        fixed = {lora.module for lora in loras.modules}
        fixed |= {owner(lora.parameter) for lora in loras.parameters}
        for path in self._tables:
            if owner(path) in fixed:
                message = f"has LoRA for the base's vocabulary, but others are for {size} tokens"
                self._report("vocabulary_mismatch", owner(path), message)
            if path not in self.found.replaced:
                message = (
                    f"is not in the file for its vocabulary of {size} tokens, of which the base "
                    f"has {base.vocab_size}; save both whole, with modules_to_save"
                )
                self._report("vocabulary_mismatch", path, message)
        if f"{base.output_module}.bias" in base.parameters:
            message = "is for the base's vocabulary; a larger one is not served beside it"
            self._report("vocabulary_mismatch", f"{base.output_module}.bias", message)

    def find_token_rows(self) -> None:
        base, expected = self._base, self._expected
        size = self.found.vocab_size or base.vocab_size
        for role, stray in self._roles.of("trainable_tokens_delta"):
            if role.path not in expected.tokens:
                message = "are token rows that the config's trainable_token_indices does not name"
                self._report("module_not_targeted", stray.name, message)
        for module, indices in expected.tokens.items():
            follows = expected.shared_tokens and module == base.output_module
            tensor = self._roles.get("trainable_tokens_delta", module)
            source = base.embedding if follows else module
            own = self._roles.get("trainable_tokens_delta", source)
            if own is None:
                message = "is named by trainable_token_indices, but has no token rows in the file"
                self._report("incomplete_adapter", module, message)
                continue
            if follows and tensor is not None:
                self._set_aside_twin(tensor, own)
            hidden = (parameter_shape(f"{module}.weight", base) or (0, 0))[1]
            if max(indices) >= size:
                message = f"names token {max(indices)}; there are {size}"
                self._report("token_out_of_range", "trainable_token_indices", message)
            elif own.shape != (len(indices), hidden):
                message = f"has shape {list(own.shape)}, not {[len(indices), hidden]}"
                self._report("shape_mismatch", own.name, message)
            else:
                self.found.token_rows.append(TokenRows(module, indices, own.name))

    def _set_aside_twin(self, tensor: TensorEntry, of: TensorEntry) -> None:
        if self._contents.same(tensor, of):
            reason = "equals the embedding's, which a tied head shares"
            self.found.unused.append((tensor.name, reason))
        else:
            message = f"differs from {of.name!r}, though the base ties head and embedding"
            self._report("unsupported_tensor", tensor.name, message)

    def _assign_spare(self, role: Role, tensor: TensorEntry) -> None:
        path = role.path
        if path not in self._expected.saved:
            message = "is a copy beside a saved module, but modules_to_save does not name it"
            self._report("module_not_targeted", tensor.name, message)
            return
        # PEFT loads the original, which a tied head shares with the embedding.
        shared = role.kind == "original" and path in self._tables and self._base.tied_head
        if shared and not self._equals_shared(tensor, path):
            message = "is a copy of the base's, but is not known to be equal to it; leave it out"
            self._report("base_mismatch", tensor.name, message)
            return
        self.found.unused.append((tensor.name, f"PEFT takes {path!r} from its own tensor"))

    def _equals_shared(self, tensor: TensorEntry, path: str) -> bool:
        """Whether a tensor holds what the other name of a tied weight has from this file, or from
        the base."""
        for other in self._tables:
            loaded = self._roles.get("parameter", other)
            if other != path and other not in self._expected.saved and loaded is not None:
                return self._contents.same(tensor, loaded)
        return bool(self._contents.equals_base(tensor, path))

    def _assign_bias(self, role: Role, tensor: TensorEntry) -> None:
        path, module, bias = role.path, owner(role.path), self._config.bias
        wrapped = self._expected.wrappers(module, self._base)
        shape = self._base.parameters[path]
        if bias == "none" or (bias == "lora_only" and not wrapped):
            message = f'is a bias of the base, which bias "{bias}" leaves as it is'
            self._report("config_mismatch", tensor.name, message)
        elif role.levels != wrapped:
            message = f"is not where PEFT looks for it, {module + wrapped * '.base_layer'}.bias"
            self._report("unsupported_tensor", tensor.name, message)
        elif tensor.shape != shape:
            message = f"has shape {list(tensor.shape)}, not {list(shape)}"
            self._report("shape_mismatch", tensor.name, message)
        elif module in self._base.module_index:
            self.found.biases[module] = tensor.name
        else:
            self.found.replaced[path] = tensor
        self._biases.add(path)

    def _assign_table(self, role: Role, tensor: TensorEntry) -> None:
        """Embedding and head, of which PEFT saves a copy where it adapts them."""
        path, module = role.path, owner(role.path)
        place = ("base", 1) if self._expected.wrappers(module, self._base) else ("parameter", 0)
        place = ("token base", 1) if module in self._expected.tokens else place
        larger = tensor.shape[0] > self._base.vocab_size
        # PEFT loads it for its name alone: under another one it would be left out.
        if (role.kind, role.levels) != place or tensor.name in self._renamed:
            if self._contents.equals_base(tensor, path):
                self.found.unused.append((tensor.name, "equals the base's"))
                return
            message = "is not where PEFT would load it from, and it is not known to be the base's"
            self._report("unsupported_tensor", tensor.name, message)
        else:
            self._loaded[path] = tensor, role.kind == "parameter" or larger

    def _load(self, paths: list[str], loaded: dict[str, tuple[TensorEntry, bool]]) -> None:
        """What PEFT loads into one weight of the base, which has all names in `paths`."""
        path, (first, _) = next(iter(loaded.items()))
        tensors = [tensor for tensor, _ in loaded.values()]
        for other in tensors[1:]:
            if not self._contents.same(first, other):
                message = f"differs from {first.name!r}, though the base ties head and embedding"
                self._report("unsupported_tensor", other.name, message)
                return
        equal = self._contents.equals_base(first, path)
        if equal:
            self.found.unused += [(tensor.name, "equals the base's") for tensor in tensors]
        elif any(may_differ for _, may_differ in loaded.values()):
            self.found.replaced |= {path: loaded.get(path, (first, True))[0] for path in paths}
        elif equal is None:
            message = (
                "is a copy of the base's, but it cannot be compared with it here; leave it out"
            )
            self._report("unsupported_tensor", first.name, message)
        else:
            message = "differs from the base's: the adapter was trained on another base"
            self._report("base_mismatch", first.name, message)

    def _has_shape(self, path: str, tensor: TensorEntry) -> bool:
        shape = parameter_shape(path, self._base)
        assert shape is not None
        rows = tensor.shape[:1] if path in self._tables else ()
        if rows and rows[0] > shape[0] and tensor.shape[1:] == shape[1:]:
            return True
        if tensor.shape != shape:
            message = f"has shape {list(tensor.shape)}; the base's is {list(shape)}"
            self._report("shape_mismatch", tensor.name, message)
        return tensor.shape == shape

    def _named(self) -> set[str]:
        return {role.path for role, _ in self._roles.of("parameter")}

    def _of_vocabulary(self) -> Iterator[TensorEntry]:
        return (self.found.replaced[path] for path in self._tables if path in self.found.replaced)

    def _columns(self, key: str) -> int:
        tensors = self._roles.tensors.values()
        return next(tensor.shape[1] for tensor in tensors if tensor.name == key)

    def _report(self, code: str, subject: str, message: str) -> None:
        self.found.violations.append(Violation(code, subject, message))
