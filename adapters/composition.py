"""What a composition is: a new adapter out of several, weighted. Pure data; `adapters.merging`
computes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from adapters.manifest import ModuleLora, read_parts

#: Combination type -> whether it prunes, which needs a density.
COMBINATIONS: dict[str, bool] = {
    "cat": False,
    "linear": False,
    "ties": True,
    "dare_linear": True,
    "dare_ties": True,
    "magnitude_prune": True,
}


@dataclass(frozen=True)
class Source:
    """One adapter of a composition: its folder, its LoRAs and its weight."""

    folder: str
    modules: tuple[ModuleLora, ...]
    weight: float


@dataclass(frozen=True)
class Composition:
    """What to compose into `target`, a folder that exists.

    `outputs` maps each module that a source adapts to its output features, in the order in which
    the base has them: PEFT draws its random numbers in that order, starting from `seed`.
    """

    target: str
    base_model: str
    sources: tuple[Source, ...]
    outputs: dict[str, int]
    combination_type: str
    density: float | None = None
    majority_sign_method: Literal["total", "frequency"] = "total"
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Composition:
        sources = tuple(
            Source(s["folder"], read_parts(ModuleLora, s["modules"]), s["weight"])
            for s in data.pop("sources")
        )
        return cls(sources=sources, **data)
