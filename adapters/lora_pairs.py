"""The tensors of a file as LoRA pairs: each A and B assigned to one linear of the base.

PEFT names them `base_model.model.<module path>.lora_A.weight`; state dicts that were saved without
PEFT's help have the adapter's name in between, `lora_A.default.weight`, and mean the same. Any
other name is reported, never guessed at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from adapters.errors import Violation
from adapters.manifest import WEIGHTS_FILE, BaseSpec, TargetSpec
from adapters.peft_files import TensorEntry, TensorTable

#: The dtypes served, as safetensors spells them.
SERVED_DTYPES = ("F32", "F16", "BF16")


@dataclass
class LoraPair:
    """The tensors of one module: `tensors` has the keys "A" and "B", A [rank, in], B [out, rank].

    `target` is the index into the base's targets. `rank` is None where the shapes are wrong.
    """

    module: str
    target: int
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    rank: int | None = None


def find_pairs(table: TensorTable, base: BaseSpec) -> tuple[list[LoraPair], list[Violation]]:
    """The pairs in the base's order, and a violation for all that is no half of a whole pair."""
    finder = _Finder(base)
    for tensor in table.tensors:
        finder.assign(tensor)
    if not table.tensors:
        finder.report("empty_adapter", WEIGHTS_FILE, "holds no tensors")
    order = base.module_index
    pairs = sorted(finder.pairs.values(), key=lambda pair: order[pair.module])
    for pair in pairs:
        finder.check(pair)
    return pairs, finder.violations


class _Finder:
    def __init__(self, base: BaseSpec) -> None:
        self._base = base
        self.pairs: dict[str, LoraPair] = {}
        self.violations: list[Violation] = []

    def report(self, code: str, subject: str, message: str) -> None:
        self.violations.append(Violation(code, subject, message))

    def assign(self, tensor: TensorEntry) -> None:
        """Put a tensor into the pair it names, or report why it can't be."""
        if tensor.dtype not in SERVED_DTYPES:
            message = f"has dtype {tensor.dtype}; {', '.join(SERVED_DTYPES)} are served"
            self.report("unsupported_dtype", tensor.name, message)
        key = _KEY.fullmatch(tensor.name)
        if key is None:
            self.report(*_unusable(tensor.name, self._base))
            return
        module, side = key["module"], key["side"]
        place = self._base.module_index.get(module)
        if place is None:
            message = (
                f"belongs to {module!r}, which is no linear layer of {self._base.name!r}; "
                f"a known name is {_example(self._base)!r}"
            )
            self.report("unknown_module", tensor.name, message)
            return
        pair = self.pairs.setdefault(module, LoraPair(module, place[0]))
        if side in pair.tensors:
            message = f"means the same tensor as {pair.tensors[side].name!r}"
            self.report("duplicate_tensor", tensor.name, message)
        pair.tensors.setdefault(side, tensor)

    def check(self, pair: LoraPair) -> None:
        """Report missing halves and wrong shapes; fill in the pair's rank."""
        for side, other in (("A", "B"), ("B", "A")):
            if side not in pair.tensors:
                message = f"has lora_{other} but no lora_{side} in the file"
                self.report("incomplete_adapter", pair.module, message)
        target = self._base.targets[pair.target]
        wrong = [t for side, t in pair.tensors.items() if not _fits(side, t, target)]
        for tensor in wrong:
            message = (
                f"has shape {list(tensor.shape)}; the base expects lora_A "
                f"[rank, {target.in_features}] and lora_B [{target.out_features}, rank]"
            )
            self.report("shape_mismatch", tensor.name, message)
        ranks = {t.shape[_RANK_AXIS[side]] for side, t in pair.tensors.items() if t not in wrong}
        if len(ranks) > 1:
            a, b = (list(pair.tensors[side].shape) for side in "AB")
            message = f"has lora_A {a} and lora_B {b}, which differ in rank"
            self.report("shape_mismatch", pair.module, message)
        elif not wrong:
            pair.rank = ranks.pop()


_PREFIX = "base_model.model."
_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight", re.DOTALL
)
_RANK_AXIS = {"A": 0, "B": 1}

#: What tensors beyond A and B are, by a part of their name.
_FEATURES = {
    "lora_magnitude_vector": "a DoRA magnitude",
    "lora_embedding_": "a LoRA of an embedding",
    "base_layer.": "a tensor of the base itself (save with save_embedding_layers=False)",
    "token_adapter.": "trained token rows",
    "modules_to_save.": "a saved module",
    "lora_E": "an AdaLoRA tensor",
    "lora_diag": "a KaSA tensor",
    "bias": "a bias",
}


def _fits(side: str, tensor: TensorEntry, target: TargetSpec) -> bool:
    size = target.in_features if side == "A" else target.out_features
    return len(tensor.shape) == 2 and tensor.shape[1 - _RANK_AXIS[side]] == size


def _unusable(name: str, base: BaseSpec) -> tuple[str, str, str]:
    """Code, subject and message for a tensor whose name is not that of an A or B."""
    for part, what in _FEATURES.items():
        if part in name:
            return "unsupported_tensor", name, f"is {what}, which is not served"
    if name.startswith(_PREFIX) and "lora_" not in name:
        return "unsupported_tensor", name, "is a full tensor (modules_to_save), which is not served"
    return "unexpected_key", name, f"is not named as PEFT names it, such as {_example(base)!r}"


def _example(base: BaseSpec) -> str:
    module = next((path for target in base.targets for path in target.modules), "<module>")
    return f"{_PREFIX}{module}.lora_A.weight"
