"""The whole engine on tiny models, against PEFT in float32."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import AdapterUnavailable
from adapters.manifest import AdapterRef
from base_engine.engine import Engine
from base_engine.errors import EngineStopped, PromptTooLong, QueueFull, StepFailed
from tests.generation import (
    SMALL as SMALL_CONFIG,
)
from tests.generation import (
    adapter_ref,
    answers,
    assert_exact,
    collect,
    ref_or_base,
    request,
    running_engine,
)
from tests.tiny import FAMILIES, make_adapter, signature_adapter, tiny_base

RANKS = (1, 2, 3, 5, 7, 8, 16, 17, 31, 32, 48, 64)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(length)]


@pytest.fixture(scope="module")
def eight(llama_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight adapters of different ranks, targets and scales."""
    folder = tmp_path_factory.mktemp("eight")
    shapes: list[dict[str, Any]] = [
        {"r": 4},
        {"r": 16, "lora_alpha": 16, "use_rslora": True},
        {"r": 8, "target_modules": ["q_proj", "v_proj"]},
        {"r": 2, "target_modules": r".*layers\.1\..*(q|v|down)_proj"},
        {"r": 4, "rank_pattern": {"layers.1.self_attn.q_proj": 17}},
        {"r": 5, "lora_alpha": 8.5, "layers_to_transform": [1]},
        {"r": 3, "target_modules": ["lm_head", "o_proj"]},
        {"r": 32, "alpha_pattern": {"k_proj": 5}, "target_modules": "all-linear"},
    ]
    return [
        make_adapter(llama_base, folder / f"a{index}", seed=index, std=0.1, **shape)
        for index, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_serves_adapters_exactly_in_a_mixed_batch(family: str, tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", family)
    how: dict[str, Any] = {"fan_in_fan_out": family == "gpt2", "std": 0.1}
    one = make_adapter(base, tmp_path / "one", seed=1, **how)
    two = make_adapter(base, tmp_path / "two", seed=2, r=9, use_rslora=True, **how)
    with running_engine(base) as engine:
        folders = [one, None, two, one, None]
        asked = [
            request(prompt_of(5 + 7 * i, i), ref_or_base(engine, folder))
            for i, folder in enumerate(folders)
        ]
        for folder, r, got in zip(folders, asked, answers(engine, asked), strict=True):
            assert_exact(base, folder, r, got)
            assert got.trace is not None and got.trace.max_adapters == 3


def test_nine_adapters_share_steps_and_each_is_exact(llama_base: Path, eight: list[Path]) -> None:
    with running_engine(llama_base) as engine:
        folders = [*eight, None] * 2
        asked = [
            request(prompt_of(3 + i, i), ref_or_base(engine, folder), max_tokens=16)
            for i, folder in enumerate(folders[:16])
        ]
        got = answers(engine, asked)
        for folder, r, answer in zip(folders, asked, got, strict=False):
            assert_exact(llama_base, folder, r, answer)
        steps = engine.steps(1000)
        digests = {r.adapters[0].ref.digest if r.adapters else "base" for r in asked}
        assert max(len(step.tokens) for step in steps) == 9
        assert any(set(step.tokens) == digests for step in steps)
        for answer in got:
            assert answer.trace is not None
            assert answer.trace.max_adapters == 9
            assert 0 < answer.trace.mixed_steps <= answer.trace.steps


def test_all_ranks_in_one_batch(llama_base: Path, tmp_path: Path) -> None:
    folders: list[Path | None] = [
        make_adapter(llama_base, tmp_path / f"r{r}", seed=r, std=0.05, r=r, lora_alpha=2 * r + 1)
        for r in RANKS
    ]
    folders += [None, None]
    with running_engine(llama_base, adapter_bytes=16 << 20) as engine:
        asked = [
            request(prompt_of(4 + i, i), ref_or_base(engine, folder))
            for i, folder in enumerate(folders)
        ]
        for folder, r, got in zip(folders, asked, answers(engine, asked), strict=True):
            assert_exact(llama_base, folder, r, got)


def test_each_single_module_is_wired_to_itself(llama_base: Path, tmp_path: Path) -> None:
    """Equal shapes cannot hide a gate taken for an up, or layer 0 for layer 1."""
    with running_engine(llama_base, adapter_bytes=32 << 20) as engine:
        paths = [path for target in engine.base.targets for path in target.modules]
        folders = [
            make_adapter(
                llama_base, tmp_path / f"m{i}", seed=i, std=0.3, target_modules=rf".*{path}"
            )
            for i, path in enumerate(paths)
        ]
        prompt = prompt_of(9)
        asked = [request(prompt, adapter_ref(engine, folder), 3) for folder in folders]
        got = answers(engine, [*asked, request(prompt, None, 3)])
        for folder, r, answer in zip(folders, asked, got, strict=False):
            assert_exact(llama_base, folder, r, answer)
            assert answer.logprobs != got[-1].logprobs


def test_base_rows_do_not_change_beside_adapters(llama_base: Path, eight: list[Path]) -> None:
    with running_engine(llama_base, prefix_cache=False) as engine:
        prompts = [prompt_of(6 + i, i) for i in range(3)]
        [*alone] = answers(engine, [request(p, None, 12) for p in prompts])
        mixed = []
        for prompt, folder in zip(prompts, eight, strict=False):
            mixed += [request(prompt, None, 12), request(prompt, adapter_ref(engine, folder), 12)]
        together = answers(engine, mixed)[::2]
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_order_in_the_batch_does_not_matter(llama_base: Path, eight: list[Path]) -> None:
    with running_engine(llama_base, prefix_cache=False) as engine:
        a, b, c = (adapter_ref(engine, folder) for folder in eight[:3])
        members = [(a, 1), (a, 17), (b, 5), (None, 9), (c, 12)]
        first = None
        for order in itertools.permutations(range(len(members)), len(members)):
            if order[0] > order[-1]:
                continue  # half of the orders are enough
            asked = [request(prompt_of(members[i][1], i), members[i][0], 2) for i in order]
            got = dict(zip(order, (g.tokens for g in answers(engine, asked)), strict=True))
            first = first or got
            assert got == first


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 16}, {"step_tokens": 5}], ids=str)
def test_chunked_prefill_gives_the_same_as_whole_prompts(
    settings: dict[str, int], llama_base: Path, eight: list[Path]
) -> None:
    folders = [eight[0], eight[1], eight[6], None]
    with running_engine(llama_base, max_running=5, **settings) as engine:
        asked = [
            request(prompt_of(n, n), ref_or_base(engine, folder), 6)
            for n, folder in zip((15, 16, 17, 33, 100, 101), folders * 2, strict=False)
        ]
        for folder, r, got in zip(folders * 2, asked, answers(engine, asked), strict=False):
            assert_exact(llama_base, folder, r, got)


def test_preempted_requests_end_as_if_nothing_had_happened(
    llama_base: Path, eight: list[Path]
) -> None:
    block = 4 * 2 * 2 * 2 * 16 * 4  # tokens, k and v, layers, kv heads, head dim, bytes
    folders = [*eight[:5], None]
    with running_engine(llama_base, kv_bytes=24 * block, prefix_cache=False) as engine:
        asked = [
            request(prompt_of(10 + i, i), ref_or_base(engine, folder), 24)
            for i, folder in enumerate(folders)
        ]
        got = answers(engine, asked)
        assert engine.stats().preemptions > 0
        assert sum(answer.trace.preemptions for answer in got if answer.trace) > 0
        for folder, r, answer in zip(folders, asked, got, strict=True):
            assert_exact(llama_base, folder, r, answer)


def test_more_adapters_than_pages_all_finish_exactly(llama_base: Path, tmp_path: Path) -> None:
    """40 adapters, pages for four, host memory for eight; twice over, in random order."""
    folders = [make_adapter(llama_base, tmp_path / f"a{i}", seed=i, std=0.1) for i in range(40)]
    page_bytes = sum(2 * 8 * (i + o) for i, o in PROJECTIONS) * 4
    with running_engine(
        llama_base, adapter_bytes=4 * page_bytes, host_adapter_bytes=8 * page_bytes
    ) as engine:
        refs = [adapter_ref(engine, folder) for folder in folders]
        order = list(range(40)) * 2
        random.Random(3).shuffle(order)
        asked = [request(prompt_of(5 + i % 9, i), refs[i], 5) for i in order]
        for i, r, got in zip(order, asked, answers(engine, asked), strict=True):
            assert_exact(llama_base, folders[i], r, got)
        stats = engine.adapters.stats()
        assert stats.evictions_total > 30 and stats.resident <= 4
        assert stats.device_used <= 4 * page_bytes and stats.host_used <= 8 * page_bytes
        assert max(len(step.tokens) for step in engine.steps(1000)) <= 4


PROJECTIONS = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]


def test_pages_of_a_big_adapter_leave_nothing_behind_for_a_small_one(
    llama_base: Path, tmp_path: Path
) -> None:
    big = make_adapter(llama_base, tmp_path / "big", seed=1, r=16)
    small = make_adapter(llama_base, tmp_path / "small", seed=2, r=2, target_modules=["q_proj"])
    bytes_for_big = 2 * sum(2 * 8 * (i + o) for i, o in PROJECTIONS) * 4
    with running_engine(
        llama_base, adapter_bytes=bytes_for_big, host_adapter_bytes=1, prefix_cache=False
    ) as engine:
        refs = {None: None, big: adapter_ref(engine, big), small: adapter_ref(engine, small)}
        first: dict[Path | None, list[float]] = {}
        for folder in [big, small, None, small, big, None, big]:
            asked = request(prompt_of(11), refs[folder], 6)
            [got] = answers(engine, [asked])
            assert_exact(llama_base, folder, asked, got)
            assert got.logprobs == first.setdefault(folder, got.logprobs)


def test_sampling_with_a_seed_does_not_depend_on_what_else_runs(
    llama_base: Path, eight: list[Path]
) -> None:
    block = 4 * 2 * 2 * 2 * 16 * 4
    sampling: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 20}
    with running_engine(llama_base, kv_bytes=60 * block, prefix_cache=False) as engine:
        ref = adapter_ref(engine, eight[0])

        def run(*seeds: int | None) -> list[list[int]]:
            asked = [request(prompt_of(10), ref, seed=seed, **sampling) for seed in seeds]
            return [answer.tokens for answer in answers(engine, asked)]

        [alone] = run(42)
        assert run(42, *[None] * 7)[0] == alone
        assert run(*range(7), 42)[-1] == alone
        assert run(42, 42) == [alone, alone]
        before = engine.stats().preemptions
        assert run(*[None] * 12, 42)[-1] == alone
        assert engine.stats().preemptions > before
        assert len({tuple(tokens) for tokens in run(1, 2, 3)}) == 3


def test_prefixes_are_reused_within_one_adapter_and_tenant_only(
    llama_base: Path, tmp_path: Path
) -> None:
    """The adapters change keys and values from the first layer on, so a mix-up would show."""
    a, b = (
        make_adapter(llama_base, tmp_path / n, seed=i, std=0.3, target_modules=["k_proj", "v_proj"])
        for i, n in enumerate("ab")
    )
    with running_engine(llama_base) as engine:
        prompt = prompt_of(64)
        seen: set[tuple[Path | None, str]] = set()
        visits = [(None, ""), (a, ""), (b, ""), (a, ""), (None, ""), (a, "x"), (None, "x"), (b, "")]
        for folder, salt in visits:
            asked = request(prompt, ref_or_base(engine, folder), salt=salt)
            [got] = answers(engine, [asked])
            assert_exact(llama_base, folder, asked, got)
            assert got.trace is not None
            assert got.trace.cached_tokens == (60 if (folder, salt) in seen else 0)
            seen.add((folder, salt))
        assert engine.stats().cached_tokens == 3 * 60


def test_alternating_adapters_with_aborts_do_not_disturb_long_requests(
    llama_base: Path, tmp_path: Path
) -> None:
    a, b = (
        make_adapter(llama_base, tmp_path / n, seed=i, std=0.2, target_modules=["k_proj", "v_proj"])
        for i, n in enumerate("ab")
    )
    shared = prompt_of(128)
    block = 4 * 2 * 2 * 2 * 16 * 4

    async def round_trip(engine: Engine) -> list[list[int]]:
        refs = [adapter_ref(engine, a), adapter_ref(engine, b)]
        anchors = [engine.submit(request(shared, ref, 30)) for ref in refs]
        tasks = [asyncio.create_task(collect(anchor)) for anchor in anchors]
        for i in range(20):
            generation = engine.submit(request(shared[:40] + [3 + i], refs[i % 2], 6))
            tasks.append(asyncio.create_task(collect(generation)))
            await asyncio.sleep(0.003)
            if i % 2:
                generation.abort()
        results = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        return [r.tokens for r in results[:2]]

    with running_engine(llama_base, step_tokens=16, kv_bytes=110 * block) as engine:
        solo = [
            answers(engine, [request(shared, adapter_ref(engine, folder), 30)])[0].tokens
            for folder in (a, b)
        ]
        for _ in range(5):
            assert asyncio.run(round_trip(engine)) == solo


def test_requests_behind_one_without_room_go_ahead(scripted: Path, tmp_path: Path) -> None:
    """Pages for one adapter only: the base and the resident adapter do not wait for the other."""
    seven, nine = (signature_adapter(scripted, tmp_path / f"s{t}", t) for t in (7, 9))
    page_bytes = 8 * (64 + 320) * 4

    async def run(engine: Engine) -> None:
        s7, s9 = adapter_ref(engine, seven), adapter_ref(engine, nine)
        long = asyncio.create_task(collect(engine.submit(request([50], s7, 300))))
        while not engine.steps(1):
            await asyncio.sleep(0.01)
        order: list[str] = []

        async def ask(name: str, ref: AdapterRef | None) -> list[int]:
            got = await collect(engine.submit(request([60], ref, 4)))
            order.append(name)
            return got.tokens

        blocked = asyncio.create_task(ask("s9", s9))
        await asyncio.sleep(0.05)
        others = await asyncio.gather(ask("base", None), ask("s7", s7), ask("base", None))
        assert others[1] == [7] * 4 and others[0] == others[2] == [61, 62, 63, 64]
        assert not long.done() and not blocked.done()
        assert (await long).tokens == [7] * 300
        assert await blocked == [9] * 4

    with running_engine(scripted, adapter_bytes=page_bytes) as engine:
        asyncio.run(asyncio.wait_for(run(engine), 60))


def test_a_cold_adapter_gets_in_under_a_flood_for_the_hot_one(
    scripted: Path, tmp_path: Path
) -> None:
    seven, nine = (signature_adapter(scripted, tmp_path / f"s{t}", t) for t in (7, 9))

    async def run(engine: Engine) -> int:
        s7, s9 = adapter_ref(engine, seven), adapter_ref(engine, nine)
        served = 0
        stop = asyncio.Event()

        async def flood() -> None:
            nonlocal served
            while not stop.is_set():
                assert (await collect(engine.submit(request([50], s7, 10)))).tokens == [7] * 10
                served += 1

        floods = [asyncio.create_task(flood()) for _ in range(4)]
        while served < 4:
            await asyncio.sleep(0.01)
        before = served
        got = await collect(engine.submit(request([50], s9, 3)))
        passed = served - before
        stop.set()
        await asyncio.gather(*floods)
        assert got.tokens == [9] * 3
        return passed

    with running_engine(scripted, adapter_bytes=8 * (64 + 320) * 4, patience=8) as engine:
        passed = asyncio.run(asyncio.wait_for(run(engine), 60))
        assert passed <= 8 + 2 * 4


@pytest.mark.parametrize("seed", range(3))
def test_random_load_on_scarce_memory_neither_fails_nor_leaks(
    seed: int, scripted: Path, tmp_path: Path
) -> None:
    """Two adapters' pages, few KV blocks, chunked prompts, aborts: answers never leak."""
    rng = random.Random(seed)
    folders = {t: signature_adapter(scripted, tmp_path / f"s{t}", t) for t in range(4, 10)}
    block = 4 * 2 * 2 * 2 * 16 * 4

    async def run(engine: Engine) -> None:
        refs = {t: adapter_ref(engine, folder) for t, folder in folders.items()}

        async def one() -> None:
            token = rng.choice([None, *folders])
            prompt = prompt_of(rng.choice([1, 5, 30, 100]), rng.randrange(99))
            ref = refs[token] if token is not None else None
            generation = engine.submit(request(prompt, ref, rng.randint(1, 20)))
            task = asyncio.create_task(collect(generation))
            aborts = rng.random() < 0.3
            if aborts:
                await asyncio.sleep(rng.random() * 0.05)
                generation.abort()
            got = await task
            assert got.reason in ("length", "abort") if aborts else got.reason == "length"
            if token is not None:
                assert set(got.tokens) <= {token}
            else:
                assert not set(got.tokens) & set(folders)

        for _ in range(8):
            await asyncio.gather(*(one() for _ in range(12)))

    with running_engine(
        scripted, adapter_bytes=2 * 8 * (64 + 320) * 4, kv_bytes=70 * block, step_tokens=32
    ) as engine:
        asyncio.run(asyncio.wait_for(run(engine), 120))
        assert max(len(set(s.tokens) - {"base"}) for s in engine.steps(10_000)) <= 2


def test_an_adapter_whose_files_are_damaged_fails_its_own_requests_only(
    scripted: Path, tmp_path: Path
) -> None:
    seven, nine = (signature_adapter(scripted, tmp_path / f"s{t}", t) for t in (7, 9))
    with running_engine(scripted) as engine:
        s7, s9 = adapter_ref(engine, seven), adapter_ref(engine, nine)
        weights = nine / "adapter_model.safetensors"
        good = weights.read_bytes()
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        first, bad, base = answers(engine, [request([50], ref, 5) for ref in (s7, s9, None)])
        assert first.tokens == [7] * 5 and base.tokens == [51, 52, 53, 54, 55]
        assert bad.tokens == [] and bad.reason == "error"
        assert isinstance(bad.error, AdapterUnavailable)
        weights.unlink()
        [gone] = answers(engine, [request([50], s9, 5)])
        assert isinstance(gone.error, AdapterUnavailable)
        weights.write_bytes(good)
        deadline = time.monotonic() + 20
        while answers(engine, [request([50], s9, 5)])[0].tokens != [9] * 5:
            assert time.monotonic() < deadline, "a healed adapter is never tried again"
            time.sleep(0.2)


def test_one_physical_load_however_many_ask(scripted: Path, tmp_path: Path) -> None:
    seven = signature_adapter(scripted, tmp_path / "s7", 7)
    with running_engine(scripted) as engine:
        ref = adapter_ref(engine, seven)
        got = answers(engine, [request([50], ref, 3) for _ in range(20)])
        assert all(answer.tokens == [7] * 3 for answer in got)
        assert engine.adapters.stats().loads_total == 1


def test_requests_that_can_never_fit_are_refused_at_once(scripted: Path) -> None:
    block = 4 * 2 * 2 * 2 * 16 * 4
    with running_engine(scripted, kv_bytes=24 * block) as engine:
        assert engine.max_length == 96

        async def refused(length: int) -> None:
            with pytest.raises(PromptTooLong, match=str(length)):
                engine.submit(request([50] * length, None, 1))

        for length in (96, 97, 255, 600):
            asyncio.run(refused(length))
        [longest] = answers(engine, [request([50] * 95, None, 1)])
        assert len(longest.tokens) == 1
        [clamped] = answers(engine, [request([50] * 60, None, 1000)])
        assert len(clamped.tokens) == 36 and clamped.reason == "length"


def test_a_full_queue_refuses_and_says_when_to_come_back(scripted: Path) -> None:
    async def run(engine: Engine) -> None:
        held = [engine.submit(request([50], None, 400)) for _ in range(3)]
        with pytest.raises(QueueFull) as refused:
            engine.submit(request([50], None, 1))
        assert refused.value.retry_after >= 1
        for generation in held:
            generation.abort()
        assert {a.reason for a in await asyncio.gather(*map(collect, held))} == {"abort"}
        assert len((await collect(engine.submit(request([50], None, 1)))).tokens) == 1

    with running_engine(scripted, max_running=1, max_waiting=2) as engine:
        asyncio.run(asyncio.wait_for(run(engine), 30))


def test_an_abort_gives_everything_back_whatever_the_phase(scripted: Path, tmp_path: Path) -> None:
    refs_of = [signature_adapter(scripted, tmp_path / f"s{t}", t) for t in (5, 6, 7)]

    async def run(engine: Engine) -> None:
        refs = [adapter_ref(engine, folder) for folder in refs_of]
        for delay in (0.0, 0.001, 0.01, 0.05):
            held = [engine.submit(request([50] * 80, refs[i % 3], 400)) for i in range(8)]
            await asyncio.sleep(delay)
            started = time.monotonic()
            for generation in held:
                generation.abort()
            ends = await asyncio.gather(*map(collect, held))
            assert {answer.reason for answer in ends} == {"abort"}
            assert time.monotonic() - started < 1
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
            assert stats.adapters.pinned == 0

    with running_engine(scripted, step_tokens=32) as engine:
        asyncio.run(asyncio.wait_for(run(engine), 60))


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_engine(scripted) as engine:
        run = engine.runner.run
        failures = [RuntimeError("planted")]

        def failing(chunks: list[object]) -> object:
            if failures:
                raise failures.pop()
            return run(chunks)  # type: ignore[arg-type]

        monkeypatch.setattr(engine.runner, "run", failing)
        hurt = answers(engine, [request([50], None, 3), request([60], None, 3)])
        assert any(isinstance(answer.error, StepFailed) for answer in hurt)
        assert all(answer.reason in ("error", "length") for answer in hurt)
        [fine] = answers(engine, [request([50], None, 3)])
        assert fine.tokens == [51, 52, 53] and engine.healthy


def test_an_engine_that_keeps_failing_says_so_and_leaves_nobody_waiting(
    scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(scripted, SMALL_CONFIG)
    engine.start()

    def failing(chunks: object) -> object:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.runner, "run", failing)
    try:

        async def run() -> None:
            for _ in range(3):
                got = await asyncio.wait_for(collect(engine.submit(request([50], None, 3))), 10)
                assert got.reason == "error"
            while engine.healthy:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineStopped, match="planted"):
                engine.submit(request([50], None, 3))

        asyncio.run(asyncio.wait_for(run(), 30))
        assert engine.failure is not None and "planted" in engine.failure
    finally:
        engine.stop()


def test_stopping_ends_open_requests_with_an_error(scripted: Path) -> None:
    engine = Engine(scripted, SMALL_CONFIG)
    engine.start()

    async def run() -> None:
        held = [engine.submit(request([50], None, 400)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.stop)
        ends = await asyncio.wait_for(asyncio.gather(*map(collect, held)), 10)
        assert all(isinstance(answer.error, EngineStopped) for answer in ends)
        with pytest.raises(EngineStopped):
            engine.submit(request([50], None, 1))

    asyncio.run(run())


def test_a_request_stops_at_its_end_token_unless_told_to_go_on(
    scripted: Path, tmp_path: Path
) -> None:
    ends = signature_adapter(scripted, tmp_path / "ends", 2)
    with running_engine(scripted) as engine:
        ref = adapter_ref(engine, ends)
        stopped, going_on, stop_id = answers(
            engine,
            [
                request([50], ref, 5, ignore_eos=False),
                request([50], ref, 5),
                request([50], None, 9, stop_token_ids=(53,)),
            ],
        )
        assert stopped.tokens == [2] and stopped.reason == "stop"
        assert going_on.tokens == [2] * 5 and going_on.reason == "length"
        assert stop_id.tokens == [51, 52, 53] and stop_id.reason == "stop"
