"""The parity table: every feature in every situation, measured against PEFT.

Run, it measures everything anew, which takes some minutes, and writes docs/parity.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adapters.errors import AdapterRejected
from adapters.foreign import convert
from adapters.layout import layout
from adapters.manifest import AdapterRef, BaseSpec, WeightedAdapter
from adapters.validation import Limits, validate
from base_engine.engine import Engine
from base_engine.request import GenerateRequest
from tests.features import FEATURES, INVOCATION, Feature, Served
from tests.generation import Answer, answers, request, running_engine
from tests.tiny import byte_ids, make_adapter, oracle_logprobs, tiny_base

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parity.md"
CONDITIONS = ("alone", "mixed batch", "chunked prefill", "after eviction")

#: Largest difference of a log-probability that counts as equal, in float32.
TOLERANCE = 1e-4

#: Condition -> the difference found, or "refused: <code>".
Found = Mapping[str, float | str]

_TOKENS = 6
_TOP = 20
_PROMPT = (*byte_ids("A parrot, a plain one, "), *INVOCATION, 75, 5, 7, 3, 90)
#: Ends differently and is longer than the other, for the company in a mixed batch.
_OTHER = (*byte_ids("Something else that is a good deal longer than that, "), *INVOCATION, 40)


def measure(feature: Feature, base: Path, folder: Path) -> Found:
    """Condition -> largest difference to PEFT, or "refused: <code>" for every one of them.

    `base` is a tiny model of the feature's family; `folder` is for the adapters.
    """
    served = feature.build(base, folder)
    with running_engine(base) as engine:
        try:
            parts = _accepted(engine, served)
        except AdapterRejected as error:
            code = error.violations[0].code
            return dict.fromkeys(CONDITIONS, f"refused: {code}")
        found: dict[str, float | str] = {"alone": _largest(engine, base, served, parts, [])}
        others = [
            _other(engine, base, folder / "other0", 0),
            _other(engine, base, folder / "other1", 1),
            _other(engine, base, folder / "other2", 2, use_dora=True),
        ]
        one = [_ONE[feature.family]]
        small = _other(engine, base, folder / "small", 7, r=1, target_modules=one)
        company = [(), *others, (WeightedAdapter(others[0][0].ref, 0.5), *others[1])]
        found["mixed batch"] = _largest(engine, base, served, parts, company)
    with running_engine(base, step_tokens=7) as engine:
        found["chunked prefill"] = _largest(engine, base, served, parts, [])
        assert max(step.prefill_tokens for step in engine.steps(100)) <= 7
    own, other = (_elements(who, engine.base) for who in (parts, small))
    with running_engine(base, adapter_bytes=4 * max(own, other)) as engine:
        _largest(engine, base, served, parts, [])
        answers(engine, [_request(_OTHER, small)])
        found["after eviction"] = _largest(engine, base, served, parts, [])
        assert engine.adapters.stats().evictions_total >= 2
    return found


def table(
    features: Sequence[Feature] = FEATURES,
) -> Iterator[tuple[Feature, Found]]:
    """All features measured, one after the other, each on a fresh adapter."""
    with tempfile.TemporaryDirectory() as root:
        for number, feature in enumerate(features):
            base = Path(root) / feature.family
            if not base.exists():
                tiny_base(base, feature.family)
            yield feature, measure(feature, base, Path(root) / str(number))


def page(rows: Sequence[tuple[Feature, Found]]) -> str:
    """The page that shows `rows`."""
    lines = [
        "# Parity with PEFT",
        "",
        "Largest difference of a log-probability to PEFT's own model, unmerged, in float32, over",
        f"the {_TOP} most likely tokens of each of {_TOKENS} generated positions, on tiny random",
        "models of the named architecture. A mixed batch also holds base rows, two other adapters,",
        "one with DoRA, and a weighted sum. What is refused is refused at upload, with the code",
        "shown. Made by `scripts/parity_table`.",
        "",
        f"| feature | base | {' | '.join(CONDITIONS)} |",
        f"|---|---|{'---|' * len(CONDITIONS)}",
    ]
    for feature, found in rows:
        cells = " | ".join(_cell(found[condition]) for condition in CONDITIONS)
        lines.append(f"| {feature.name} | {feature.family} | {cells} |")
    return "\n".join(lines) + "\n"


def _elements(parts: Sequence[WeightedAdapter], base: BaseSpec) -> int:
    return sum(layout(part.ref.manifest, base).elements for part in parts)


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.0e}"


#: A linear that every base of the family has.
_ONE = dict.fromkeys((feature.family for feature in FEATURES), "q_proj") | {
    "gpt2": "c_attn",
    "phi3": "o_proj",
}


def _accepted(engine: Engine, served: Served) -> tuple[WeightedAdapter, ...]:
    return tuple(WeightedAdapter(_ref(engine, folder), weight) for folder, weight in served.parts)


def _ref(engine: Engine, folder: Path) -> AdapterRef:
    convert(folder, engine.base)
    manifest = validate(folder, engine.base, Limits(), parameters=engine.decoder.parameter)
    return AdapterRef(manifest.digest, folder.name, folder, manifest)


def _other(
    engine: Engine, base: Path, folder: Path, seed: int, **options: Any
) -> tuple[WeightedAdapter, ...]:
    adapter = make_adapter(base, folder, seed=100 + seed, **options)
    return (WeightedAdapter(_ref(engine, adapter)),)


def _request(prompt: Sequence[int], parts: Sequence[WeightedAdapter]) -> GenerateRequest:
    return request(prompt, parts, max_tokens=_TOKENS, logprobs=_TOP)


def _largest(
    engine: Engine,
    base: Path,
    served: Served,
    parts: tuple[WeightedAdapter, ...],
    company: Sequence[tuple[WeightedAdapter, ...]] = (),
) -> float:
    """The largest difference to the oracle of two requests on `parts`, run beside `company`."""
    vocab = max(part.ref.manifest.vocab_size for part in parts)
    prompts = [(*prompt, vocab - 1) if vocab else prompt for prompt in (_PROMPT, _OTHER)]
    own = [_request(prompt, parts) for prompt in prompts]
    others = [_request(prompt, who) for who in company for prompt in (_OTHER, _PROMPT)]
    mixed = [*others[: len(others) // 2], *own, *others[len(others) // 2 :]]
    got = dict(zip(mixed, answers(engine, mixed), strict=True))
    return max(_difference(base, served.oracle, asked, got[asked]) for asked in own)


def _difference(base: Path, oracle: Path, asked: GenerateRequest, got: Answer) -> float:
    assert got.error is None and len(got.tokens) == _TOKENS, got
    prompt = list(asked.prompt_ids)
    want = oracle_logprobs(base, oracle, prompt + got.tokens)[len(prompt) - 1 : -1]
    largest = 0.0
    for row, token, reported in zip(want, got.tokens, got.reported, strict=True):
        assert float(row.max() - row[token]) < 2 * TOLERANCE, "not the most likely token"
        ids = torch.tensor([token, *(other for other, _ in reported.top)])
        values = torch.tensor([reported.chosen, *(value for _, value in reported.top)])
        largest = max(largest, float((row[ids] - values).abs().max()))
    return largest


def main() -> int:
    """Measure everything, write the page, and say what is not equal."""
    argparse.ArgumentParser("scripts/parity_table", description=__doc__).parse_args()
    rows = []
    for feature, found in table():
        rows.append((feature, found))
        print(f"{feature.name}: {found}", flush=True)
    PAGE.write_text(page(rows))
    wrong = [feature.name for feature, found in rows if not right(feature, found)]
    print(f"{len(rows)} features, {len(wrong)} wrong{': ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong else 0


def right(feature: Feature, found: Found) -> bool:
    """Whether every situation came out as it must: equal to PEFT, or refused as intended."""
    if feature.refused:
        return all(value == f"refused: {feature.refused}" for value in found.values())
    return all(isinstance(v, float) and v <= TOLERANCE for v in found.values())


if __name__ == "__main__":
    sys.exit(main())
