"""Several weighted adapters on a row, against PEFT's concatenation and the sum of its deltas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters.manifest import AdapterManifest, AdapterRef, BaseSpec, TargetSpec, WeightedAdapter
from base_engine.engine import Engine
from base_engine.kernels.dispatch import add_lora
from base_engine.kernels.segments import Run, Segments
from base_engine.request import GenerateRequest, SamplingParams
from tests.base_engine.test_engine import prompt_of
from tests.base_engine.workload import Layout, one_target
from tests.generation import adapter_ref, answers, assert_exact, request, running_engine
from tests.tiny import make_adapter, oracle, signature_adapter

#: Bytes of one KV block of the tiny Llama.
BLOCK = 4 * 2 * 2 * 2 * 16 * 4

#: Which of the adapters, and how much of each; () is the base.
Mix = tuple[tuple[int, float], ...]
MIXES: tuple[Mix, ...] = (
    (),
    ((0, 1.0),),
    ((1, 1.0),),
    ((0, 0.5),),
    ((0, 0.7), (1, 0.3)),
    ((1, -0.5), (0, 1.0)),
    ((0, 0.7), (1, 0.3), (2, 1.5)),
    ((2, 1.0), (1, 1.0)),
)


@pytest.fixture(scope="module")
def three(llama_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Different ranks, scales and targets; one has the head, some modules have one adapter only."""
    folder = tmp_path_factory.mktemp("three")
    shapes: list[dict[str, Any]] = [
        {"r": 4},
        {"r": 17, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "lm_head"]},
        {"r": 3, "target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]},
    ]
    return [
        make_adapter(llama_base, folder / f"a{i}", seed=i, std=0.1, **shape)
        for i, shape in enumerate(shapes)
    ]


@pytest.fixture(scope="module")
def summed(
    llama_base: Path, three: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[Mix, Path]:
    """For each mix a base that has all its deltas in its weights."""
    folder = tmp_path_factory.mktemp("summed")
    found = {}
    for number, mix in enumerate(MIXES):
        model: Any = AutoModelForCausalLM.from_pretrained(llama_base, dtype=torch.float32)
        for index, weight in mix:
            fresh = AutoModelForCausalLM.from_pretrained(llama_base, dtype=torch.float32)
            peft_model = PeftModel.from_pretrained(fresh, str(three[index]))
            for path, module in peft_model.get_base_model().named_modules():
                if isinstance(module, Linear):
                    delta = module.get_delta_weight("default")
                    model.get_submodule(path).weight.data.add_(delta, alpha=weight)
        found[mix] = folder / str(number)
        model.save_pretrained(found[mix])
    return found


def mixed(engine: Engine, folders: Sequence[Path], mix: Mix) -> list[WeightedAdapter]:
    return [WeightedAdapter(adapter_ref(engine, folders[i]), weight) for i, weight in mix]


def test_rows_of_several_adapters_are_exact_beside_single_ones_and_the_base(
    llama_base: Path, three: list[Path], summed: dict[Mix, Path]
) -> None:
    with running_engine(llama_base, step_tokens=256) as engine:
        asked = [
            request(prompt_of(3 + 5 * i, i), mixed(engine, three, mix), 6)
            for i, mix in enumerate(MIXES)
        ]
        for mix, r, got in zip(MIXES, asked, answers(engine, asked), strict=True):
            assert_exact(summed[mix], None, r, got)
        together = {
            "+".join(sorted(a.ref.digest for a in r.adapters)) if r.adapters else "base"
            for r in asked
        }
        assert any(set(step.tokens) == together for step in engine.steps(1000))
        first = answers(engine, asked[-1:])[0]
        assert first.trace is not None and first.trace.max_adapters == 1


def test_a_mix_is_what_peft_concatenates(
    llama_base: Path, three: list[Path], tmp_path: Path
) -> None:
    for number, mix in enumerate(m for m in MIXES if len(m) > 1):
        # PEFT copies the config of the first, its limits to layers and rsLoRA included.
        first_plain = sorted(mix)
        if first_plain[0][0] != 0:
            continue
        base = AutoModelForCausalLM.from_pretrained(llama_base, dtype=torch.float32)
        names = [f"a{index}" for index, _ in first_plain]
        model = PeftModel.from_pretrained(base, str(three[0]), adapter_name=names[0])
        for (index, _), name in zip(first_plain[1:], names[1:], strict=True):
            model.load_adapter(str(three[index]), adapter_name=name)
        weights = [weight for _, weight in first_plain]
        model.add_weighted_adapter(names, weights, "mix", combination_type="cat")
        folder = tmp_path / str(number)
        model.save_pretrained(str(folder), selected_adapters=["mix"], save_embedding_layers=False)
        with running_engine(llama_base) as engine:
            asked = request(prompt_of(20, number), mixed(engine, three, mix))
            assert_exact(llama_base, folder / "mix", asked, answers(engine, [asked])[0])


def test_all_mixes_differ(summed: dict[Mix, Path]) -> None:
    """So that no test passes because two of them are alike."""
    seen: list[Tensor] = []
    for folder in summed.values():
        logprobs = oracle(folder, None)(prompt_of(12))
        assert all((logprobs - other).abs().max() > 0.05 for other in seen)
        seen.append(logprobs)


def test_no_order_of_requests_or_of_adapters_in_them_changes_a_row(
    llama_base: Path, three: list[Path], summed: dict[Mix, Path]
) -> None:
    """Equal mixes only partly adjacent, with unequal lengths."""
    chosen = [MIXES[6], MIXES[6], MIXES[4], MIXES[0], MIXES[1]]
    lengths = (1, 17, 4, 9, 4)
    with running_engine(llama_base) as engine:
        for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 11):
            asked = []
            for i in order:
                adapters = mixed(engine, three, chosen[i])
                adapters = adapters[::-1] if order[0] % 2 else adapters
                asked.append(request(prompt_of(lengths[i], i), adapters, 3))
            for i, r, got in zip(order, asked, answers(engine, asked), strict=True):
                assert_exact(summed[chosen[i]], None, r, got)


def test_chunked_prompts_evictions_and_preemptions_keep_mixes_exact(
    llama_base: Path, three: list[Path], summed: dict[Mix, Path]
) -> None:
    others: list[Path]
    with running_engine(llama_base) as engine:
        sizes = []
        for folder in three:
            answers(engine, [request([50], adapter_ref(engine, folder), 1)])
            sizes.append(engine.adapters.stats().device_used)
    # Room for the three, and not for one adapter more.
    with running_engine(
        llama_base, adapter_bytes=sizes[-1] + 1024, step_tokens=16, kv_bytes=50 * BLOCK
    ) as engine:
        others = [
            make_adapter(llama_base, three[0].parent / f"other{i}", seed=50 + i) for i in range(2)
        ]
        for other in others:
            mixes = [MIXES[6], MIXES[4], MIXES[0], MIXES[5], MIXES[7]]
            asked = [
                request(prompt_of(33 + 7 * i, i), mixed(engine, three, mix), 12)
                for i, mix in enumerate(mixes)
            ]
            for mix, r, got in zip(mixes, asked, answers(engine, asked), strict=True):
                assert_exact(summed[mix], None, r, got)
            [evicting] = answers(engine, [request([50], adapter_ref(engine, other), 2)])
            assert evicting.reason == "length"
        stats = engine.stats()
        assert stats.adapters.evictions_total > 0 and stats.preemptions > 0


def test_rare_adapters_beside_mixes_are_exact(
    llama_base: Path, three: list[Path], summed: dict[Mix, Path], tmp_path: Path
) -> None:
    """Rows with other weights, a larger vocabulary, an activation: each for itself alone."""
    rare = [
        make_adapter(llama_base, tmp_path / "dora", seed=7, std=0.1, use_dora=True, r=9),
        make_adapter(llama_base, tmp_path / "saved", seed=8, modules_to_save=["lm_head"]),
        make_adapter(llama_base, tmp_path / "added", seed=9, std=0.1, added_tokens=3),
        make_adapter(llama_base, tmp_path / "a", seed=6, std=0.1, alora_invocation_tokens=[265]),
    ]
    mixes = [MIXES[6], MIXES[0], MIXES[4], MIXES[3]]
    with running_engine(llama_base, step_tokens=30) as engine:
        asked: list[tuple[Path, Path | None, GenerateRequest]] = []
        for i, (mix, folder) in enumerate(zip(mixes, rare, strict=True)):
            prompt = [*prompt_of(4 + 3 * i, i), 265, *prompt_of(5, i)]
            asked.append((summed[mix], None, request(prompt, mixed(engine, three, mix))))
            asked.append((llama_base, folder, request(prompt, adapter_ref(engine, folder))))
        for (base, adapter, r), got in zip(
            asked, answers(engine, [r for *_, r in asked]), strict=True
        ):
            assert_exact(base, adapter, r, got)
            assert got.trace is not None and got.trace.max_adapters == 8


def test_prefixes_of_other_adapters_or_weights_are_not_reused(
    llama_base: Path, tmp_path: Path
) -> None:
    """The adapters change keys and values from the first layer on, so a mix-up would show."""
    a, b = (
        make_adapter(llama_base, tmp_path / n, seed=i, std=0.3, target_modules=["k_proj", "v_proj"])
        for i, n in enumerate("ab")
    )
    prompt = prompt_of(32)
    with running_engine(llama_base) as engine:
        ra, rb = adapter_ref(engine, a), adapter_ref(engine, b)
        w = WeightedAdapter
        mixes = [
            [],
            [w(ra)],
            [w(ra, 0.5)],
            [w(ra), w(rb)],
            [w(ra), w(rb, 0.5)],
            [w(rb), w(ra, 0.5)],
        ]
        first: dict[int, list[float]] = {}
        for i, mix in enumerate(mixes):
            [got] = answers(engine, [request(prompt, mix)])
            assert got.trace is not None and got.trace.cached_tokens == 0
            assert all(got.logprobs != other for other in first.values())
            first[i] = got.logprobs
        for i, mix in enumerate(mixes):
            [got] = answers(engine, [request(prompt, mix[::-1])])
            assert got.trace is not None and got.trace.cached_tokens == 28
            torch.testing.assert_close(got.logprobs, first[i], atol=1e-5, rtol=0)


def test_mixes_wait_for_pages_without_starving(scripted: Path, tmp_path: Path) -> None:
    """Pages for three signature adapters; pairs and triples of five compete for them."""
    folders = [signature_adapter(scripted, tmp_path / f"s{t}", t) for t in range(5, 10)]
    with running_engine(scripted, adapter_bytes=3 * 8 * (64 + 320) * 4) as engine:
        refs = [adapter_ref(engine, folder) for folder in folders]
        asked, strongest = [], []
        for size in (1, 2, 3):
            for members in itertools.combinations(range(5), size):
                weights = [1.0] + [0.25] * (size - 1)
                picked = zip(members, weights, strict=True)
                asked.append(request([50], [WeightedAdapter(refs[i], w) for i, w in picked], 4))
                strongest.append(members[0] + 5)
        for token, got in zip(strongest, answers(engine, asked, 60), strict=True):
            assert got.tokens == [token] * 4


def test_a_mix_with_a_damaged_adapter_fails_alone(scripted: Path, tmp_path: Path) -> None:
    seven, nine = (signature_adapter(scripted, tmp_path / f"s{t}", t) for t in (7, 9))
    with running_engine(scripted) as engine:
        s7, s9 = (WeightedAdapter(adapter_ref(engine, folder)) for folder in (seven, nine))
        (nine / "adapter_model.safetensors").unlink()
        good, bad, base = answers(engine, [request([50], m, 3) for m in ([s7], [s7, s9], [])])
        assert good.tokens == [7] * 3 and base.tokens == [51, 52, 53]
        assert bad.reason == "error" and bad.tokens == []


def manifest(digest: str, **rare: Any) -> AdapterManifest:
    return AdapterManifest(digest, (), 0, 0, (), 4, **rare)


def asking(*adapters: tuple[str, float], **rare: Any) -> GenerateRequest:
    refs = [(AdapterRef(d, d, Path(), manifest(d, **rare)), weight) for d, weight in adapters]
    weighted = tuple(WeightedAdapter(ref, weight) for ref, weight in refs)
    return GenerateRequest("r", (1,), SamplingParams(1), weighted)


def test_only_plain_adapters_can_be_weighted_or_added_up() -> None:
    asking(("a", 1.0), ("b", -2.0))
    asking(("a", 1.0), vocab_size=400)
    with pytest.raises(ValueError, match="'a' is more than LoRA on linear layers"):
        asking(("a", 1.0), ("b", 1.0), vocab_size=400)
    with pytest.raises(ValueError, match="'a' is more than LoRA on linear layers"):
        asking(("a", 0.5), invocation=(1, 2))
    with pytest.raises(ValueError, match="'a' comes twice"):
        asking(("a", 1.0), ("b", 1.0), ("a", 0.5))
    for weight in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"the weight {weight} is not finite"):
            asking(("a", weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_add_up_all_adapters_of_a_row(dtype: torch.dtype) -> None:
    layout = Layout(one_target(24, 32, layers=2), dtype)
    a, b, c = (layout.add([r, r // 2], [s, -s]) for r, s in ((8, 1.0), (17, 0.5), (2, 2.0)))
    runs = [
        Run(0, 2, ((a, 1.0),)),
        Run(2, 5, ((a, 1.0), (b, 0.5))),
        Run(5, 6, ((b, 1.0), (c, -1.0), (a, 2.0))),
        Run(7, 9, ((c, 3.0),)),
    ]
    rounds = Segments.build(runs, layout.base, "cpu").targets[0]
    assert [[(s.start, s.end) for s in r.segments] for r in rounds] == [
        [(0, 2), (2, 5), (5, 6), (7, 9)],
        [(2, 5), (5, 6)],
        [(5, 6)],
    ]
    for layer in range(2):
        x, y = layout.randn(10, 24).to(dtype), layout.randn(10, 32).to(dtype)
        expected = y.double() + layout.delta(runs, x, 0, layer)
        for segments in rounds:
            add_lora(y, x, layout.buffer, segments, layer)
        tolerance = 2e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_target_has_no_more_rounds_than_a_row_has_adapters_for_it() -> None:
    specs = tuple(TargetSpec(name, 8, 8, (f"{name}.0",)) for name in ("q", "v"))
    layout = Layout(BaseSpec("base", 32, 64, specs))
    q, v = layout.add([4], [1.0], target=0), layout.add([4], [1.0], target=1)
    segments = Segments.build([Run(0, 3, ((q, 1.0), (v, 0.5)))], layout.base, "cpu")
    assert {index: len(rounds) for index, rounds in segments.targets.items()} == {0: 1, 1: 1}
    assert segments.targets[0][0].segments[0].pages is q.targets[0]  # not copied at weight 1
    assert segments.targets[1][0].segments[0].pages.scales == (0.5,)


def test_adjacent_runs_of_equal_adapters_and_weights_are_one_segment() -> None:
    layout = Layout(one_target(8, 8))
    a, b = layout.add([4], [1.0]), layout.add([4], [1.0])
    mix, other = ((a, 1.0), (b, 0.5)), ((a, 1.0), (b, 0.25))
    runs = [Run(0, 1, mix), Run(1, 3, tuple(mix)), Run(3, 4, other)]
    rounds = Segments.build(runs, layout.base, "cpu").targets[0]
    assert [[(s.start, s.end) for s in r.segments] for r in rounds] == [[(0, 3), (3, 4)]] * 2
