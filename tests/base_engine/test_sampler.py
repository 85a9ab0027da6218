from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from base_engine.request import SamplingParams
from base_engine.sampler import HEAD, LogitsNotFinite, Sampled, SampleRow, sample


class Fixed(random.Random):
    """A source that gives the numbers it is told to."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


def row(seed: int | random.Random = 0, **params: Any) -> SampleRow:
    source = seed if isinstance(seed, random.Random) else random.Random(seed)
    return SampleRow(SamplingParams(max_tokens=1, **params), source)


def logits(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def support(x: Tensor, draws: int = 400, **params: Any) -> set[int]:
    """The tokens that evenly spread uniforms reach, ends included."""
    points = [i / draws for i in range(draws)] + [1 - 2**-53]
    rows = [row(Fixed(u), **params) for u in points]
    return {s.token_id for s in sample(x.expand(len(rows), -1), rows)}


def naive_probs(
    x: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Step by step, in float64 over the sorted row; made for rows without ties."""
    p = (x.double() / temperature).softmax(-1)
    order = p.argsort(descending=True)
    ranked = p[order]
    if top_k:
        ranked[top_k:] = 0
        ranked = ranked / ranked.sum()
    before = ranked.cumsum(0) - ranked
    ranked[before >= top_p] = 0
    ranked[ranked < min_p * ranked[0]] = 0
    out = torch.zeros_like(p)
    out[order] = ranked / ranked.sum()
    return out


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; rare outcomes are pooled."""
    n = counts.sum()
    common = probs * n >= 10
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([probs[common], probs[~common].sum()[None]]) * n
    if expected[-1] < 10:
        observed, expected = observed[:-1], expected[:-1]
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


class TestDistribution:
    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 1.0},
            {"temperature": 0.5},
            {"temperature": 1.7, "top_k": 7},
            {"temperature": 1.0, "top_p": 0.8},
            {"temperature": 1.3, "min_p": 0.05},
            {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("vocab", [40, 700])
    def test_frequencies_fit_the_exact_probabilities(
        self, vocab: int, params: dict[str, Any]
    ) -> None:
        draws = 2_000
        x = logits(vocab, seed=vocab, scale=1.5)
        probs = naive_probs(x, **params)
        source = random.Random(7)
        counts = torch.zeros(vocab, dtype=torch.long)
        for _ in range(10):
            batch = x.expand(draws // 10, -1)
            drawn = sample(batch, [row(source, **params) for _ in range(draws // 10)])
            ids = torch.tensor([s.token_id for s in drawn])
            counts += torch.bincount(ids, minlength=vocab)
        assert counts[probs == 0].sum() == 0
        statistic, freedom = chi_square(counts, probs)
        # Five standard deviations above the mean of the chi-square distribution.
        assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5

    def test_each_uniform_picks_the_token_whose_share_it_falls_in(self) -> None:
        x = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
        for u, token in [(0.0, 0), (0.09, 0), (0.11, 1), (0.29, 1), (0.31, 2), (0.61, 3)]:
            assert sample(x[None], [row(Fixed(u))])[0].token_id == token

    def test_long_rows_pick_the_token_whose_share_it_falls_in(self) -> None:
        vocab = 5000
        x = logits(vocab, scale=1.0)
        upper = x.double().softmax(-1).cumsum(0)
        for token in (0, 1, 255, 256, 1023, 2500, 4863, 4864, 4999):
            lower = float(upper[token - 1]) if token else 0.0
            middle = (lower + float(upper[token])) / 2
            assert sample(x[None], [row(Fixed(middle))])[0].token_id == token

    @pytest.mark.parametrize("vocab", [4, 3000])
    @pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
    def test_a_token_of_probability_zero_is_never_drawn(self, vocab: int, u: float) -> None:
        x = torch.full((vocab,), -math.inf)
        x[vocab // 2] = 1.0
        drawn = sample(x[None], [row(Fixed(u))])
        assert drawn[0].token_id == vocab // 2


class TestTruncation:
    def test_reference_is_what_transformers_does(self) -> None:
        """The other tests' naive order of steps, against the library's own classes."""
        x = logits(1, 500, scale=1.0)
        steps: list[LogitsProcessor] = [
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(60),
            TopPLogitsWarper(0.85),
            MinPLogitsWarper(0.15),
        ]
        scores = LogitsProcessorList(steps)(torch.LongTensor([[0]]), x)
        expected = naive_probs(x[0], 1.4, top_k=60, top_p=0.85, min_p=0.15)
        assert int((expected > 0).sum()) > 5
        torch.testing.assert_close(scores[0].double().softmax(-1), expected, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize(
        "params",
        [
            {"top_k": 1},
            {"top_k": 5},
            {"top_k": 255},
            {"top_k": 256},
            {"top_k": 300},
            {"top_p": 0.01},
            {"top_p": 0.5},
            {"top_p": 0.97},
            {"top_p": 0.9999},
            {"min_p": 0.1},
            {"min_p": 0.001},
            {"min_p": 1.0},
            {"top_k": 50, "top_p": 0.7},
            {"top_k": 290, "top_p": 0.95},
            {"top_p": 0.95, "min_p": 0.2},
            {"top_k": 400, "top_p": 0.99, "min_p": 0.05},
        ],
        ids=str,
    )
    def test_keeps_what_a_naive_sort_keeps(self, params: dict[str, Any], seed: int) -> None:
        """Every kept token's own share is hit; the shares outside it are never hit."""
        vocab = 600
        x = logits(vocab, seed=seed, scale=0.5)
        probs = naive_probs(x, 1.0, **params)
        # Shares in id order, both below and above the size of the head.
        upper = probs.cumsum(0)
        kept = probs.nonzero().squeeze(1).tolist()
        middles = [float(upper[t] - probs[t] / 2) for t in kept]
        drawn = sample(x.expand(len(kept), -1), [row(Fixed(u), **params) for u in middles])
        assert [s.token_id for s in drawn] == kept

    def test_nucleus_wider_than_the_head_is_exact(self) -> None:
        """A flat distribution needs more tokens than the quick look finds."""
        vocab = 4 * HEAD
        x = logits(vocab, scale=0.01)
        probs = naive_probs(x, 1.0, top_p=0.9)
        assert int((probs > 0).sum()) > HEAD
        upper = probs.cumsum(0)
        kept = probs.nonzero().squeeze(1).tolist()
        drawn = sample(
            x.expand(len(kept), -1),
            [row(Fixed(float(upper[t] - probs[t] / 2)), top_p=0.9) for t in kept],
        )
        assert [s.token_id for s in drawn] == kept

    def test_top_k_of_the_whole_vocabulary_or_more_cuts_nothing(self) -> None:
        x = logits(12, scale=0.1)
        assert support(x, top_k=12) == support(x, top_k=10_000) == set(range(12))

    def test_top_p_zero_keeps_the_most_likely(self) -> None:
        assert support(logits(50), top_p=0.0) == {int(logits(50).argmax())}

    def test_tokens_that_tie_with_the_last_kept_are_kept(self) -> None:
        x = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, -3.0])
        assert support(x, top_k=1) == {1, 3}
        assert support(x, top_k=3) == {1, 2, 3, 4}
        assert support(x, top_p=0.2) == {1, 3}

    def test_ties_that_reach_past_the_head_are_kept(self) -> None:
        vocab = HEAD + 64
        assert support(torch.zeros(vocab), draws=4 * vocab, top_k=3) == set(range(vocab))

    def test_tiny_temperature_neither_overflows_nor_strays(self) -> None:
        x = logits(100) * 1e4
        for temperature in (1e-30, 1e-6, 1e-5, 1e-3):
            drawn = sample(x[None], [row(temperature=temperature, top_p=0.9)])
            assert drawn[0].token_id == int(x.argmax())


class TestGreedy:
    def test_takes_the_most_likely_and_the_lowest_id_of_equals(self) -> None:
        x = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 1.0, 5.0, 5.0]])
        drawn = sample(x, [row(temperature=0.0), row(temperature=0.0)])
        assert [s.token_id for s in drawn] == [1, 0]

    def test_uses_no_randomness(self) -> None:
        greedy = row(3, temperature=0.0, top_p=0.5, top_k=4)
        sample(logits(1, 50), [greedy])
        assert greedy.random.random() == random.Random(3).random()


class TestIndependence:
    VOCAB = 1500

    def mates(self, seeds: range) -> list[SampleRow]:
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.9, "logprobs": 20},
            {"temperature": 1.5, "top_k": 40, "logprobs": 0},
            {"temperature": 2.0, "top_p": 0.99},
            {"temperature": 1.0, "min_p": 0.05},
        ]
        return [row(s, **kinds[s % len(kinds)]) for s in seeds]

    def test_result_is_the_same_alone_in_a_batch_and_in_any_order(self) -> None:
        x = logits(12, self.VOCAB)
        alone = [sample(x[i : i + 1], [r])[0] for i, r in enumerate(self.mates(range(12)))]
        together = sample(x, self.mates(range(12)))
        assert together == alone
        order = [7, 0, 11, 3, 9, 1, 5, 10, 2, 8, 4, 6]
        mates = self.mates(range(12))
        shuffled = sample(x[order], [mates[i] for i in order])
        assert shuffled == [alone[i] for i in order]

    def test_seed_gives_the_same_tokens_whatever_runs_beside_it(self) -> None:
        def stream(mates: int, seeded: bool) -> list[int]:
            rows = [row(42, temperature=0.8, top_p=0.9)]
            rows += [
                SampleRow(SamplingParams(1, 0.8), random.Random(n if seeded else None))
                for n in range(mates)
            ]
            steps = [logits(1, self.VOCAB, seed=n).expand(len(rows), -1) for n in range(30)]
            return [sample(x, rows)[0].token_id for x in steps]

        alone = stream(0, True)
        assert len(set(alone)) > 10
        assert alone == stream(7, True) == stream(7, False)

    def test_equal_seeds_at_once_agree_and_different_ones_do_not(self) -> None:
        rows = [row(5), row(5), row(6)]
        steps = [sample(logits(1, 400, seed=n).expand(3, -1), rows) for n in range(20)]
        first, second, third = zip(*[[s.token_id for s in step] for step in steps], strict=True)
        assert first == second != third

    def test_one_number_is_drawn_for_each_token(self) -> None:
        for params in ({}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 2}):
            source = row(9, **params)
            sample(logits(1, self.VOCAB, scale=0.1), [source])
            reference = random.Random(9)
            reference.random()
            assert source.random.random() == reference.random()

    def test_logits_are_left_as_they_were(self) -> None:
        x = logits(6, self.VOCAB)
        before = x.clone()
        sample(x, self.mates(range(6)))
        assert torch.equal(x, before)


class TestLogprobs:
    def test_are_of_the_distribution_before_temperature_and_truncation(self) -> None:
        x = logits(1, 300)
        drawn = sample(x, [row(1, temperature=0.3, top_k=2, logprobs=5)])[0]
        exact = x[0].double().log_softmax(-1)
        values, ids = exact.topk(5)
        assert drawn.logprobs is not None
        assert drawn.logprobs.chosen == pytest.approx(float(exact[drawn.token_id]), abs=1e-5)
        assert [i for i, _ in drawn.logprobs.top] == ids.tolist()
        assert [v for _, v in drawn.logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)

    def test_none_asked_none_given_and_zero_gives_only_the_chosen(self) -> None:
        drawn = sample(logits(2, 50), [row(temperature=0.0), row(temperature=0.0, logprobs=0)])
        assert drawn[0].logprobs is None
        assert drawn[1].logprobs is not None
        assert drawn[1].logprobs.top == ()

    def test_equals_come_by_id_and_a_batch_mate_asking_for_more_changes_nothing(self) -> None:
        x = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]]).expand(2, -1)
        rows = [row(temperature=0.0, logprobs=2), row(temperature=0.0, logprobs=5)]
        few, many = sample(x, rows)
        assert few.logprobs and [i for i, _ in few.logprobs.top] == [0, 2]
        assert many.logprobs and [i for i, _ in many.logprobs.top] == [0, 2, 3, 1, 4]
        assert sample(x[:1], rows[:1]) == [few]

    def test_more_alternatives_than_tokens_gives_all(self) -> None:
        drawn = sample(logits(1, 3), [row(temperature=0.0, logprobs=20)])[0]
        assert drawn.logprobs is not None
        assert len(drawn.logprobs.top) == 3


class TestForeignIds:
    """Columns of -inf: ids that only a batch mate's larger vocabulary has."""

    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 1.5, "top_p": 0.9},
            {"temperature": 1.5, "top_k": 400},
            {"temperature": 1.5, "top_k": 20, "top_p": 1.0, "min_p": 0.01},
            {"temperature": 1.5, "top_p": 0.999999},
        ],
        ids=str,
    )
    @pytest.mark.parametrize(("vocab", "extra"), [(40, 3), (320, 300), (700, 1)])
    def test_change_no_token(self, vocab: int, extra: int, params: dict[str, Any]) -> None:
        x = logits(100, vocab, seed=vocab)
        wide = torch.nn.functional.pad(x, (0, extra), value=-math.inf)
        drawn = [
            [s.token_id for s in sample(y, [row(i, **params) for i in range(100)])]
            for y in (x, wide)
        ]
        assert drawn[0] == drawn[1] and max(drawn[1]) < vocab

    def test_are_not_among_the_alternatives(self) -> None:
        x = logits(2, 6)
        wide = torch.nn.functional.pad(x, (0, 4), value=-math.inf)
        wide[1, 6:8] = 1.0  # the mate has two of them
        for asked, own, mates in ((5, 5, 5), (6, 6, 6), (7, 6, 7), (20, 6, 8)):
            rows = [row(temperature=0.0, logprobs=asked)] * 2
            first, second = (s.logprobs for s in sample(wide, rows))
            assert first is not None and second is not None
            assert (len(first.top), len(second.top)) == (own, mates)
            assert all(token < 6 for token, _ in first.top)
            assert all(math.isfinite(value) for _, value in (*first.top, *second.top))
        [narrow] = sample(x[:1], [row(temperature=0.0, logprobs=6)])
        [padded] = sample(wide[:1], [row(temperature=0.0, logprobs=10)])
        assert narrow.logprobs is not None and padded.logprobs is not None
        assert [t for t, _ in narrow.logprobs.top] == [t for t, _ in padded.logprobs.top]
        assert padded.logprobs.chosen == pytest.approx(narrow.logprobs.chosen, abs=1e-6)

    def test_do_not_hide_an_overflow(self) -> None:
        wide = torch.nn.functional.pad(logits(3, 6), (0, 4), value=-math.inf)
        wide[0, 3], wide[1, :6] = math.nan, -math.inf
        first, second, third = sample(wide, [row(temperature=1.0)] * 3)
        assert isinstance(first.error, LogitsNotFinite)
        assert isinstance(second.error, LogitsNotFinite)
        assert third.error is None and third.token_id < 6


class TestLogits:
    def test_are_a_copy_of_the_rows_that_asked(self) -> None:
        x = logits(3, 50)
        asked = sample(x, [row(logits=i == 1) for i in range(3)])
        assert asked[0].logits is asked[2].logits is None
        got = asked[1].logits
        assert got is not None and torch.equal(got, x[1])
        x.zero_()
        assert got.abs().max() > 0

    def test_that_are_not_finite_are_an_error(self) -> None:
        x = logits(2, 50)
        x[0, 7] = math.inf
        bad, good = sample(x, [row(logits=True)] * 2)
        assert isinstance(bad.error, LogitsNotFinite) and bad.logits is None
        assert good.logits is not None


class TestUnusableRows:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_fail_alone(self, temperature: float) -> None:
        x = logits(5, 200)
        x[0, 7] = math.nan
        x[2, 9] = math.inf
        x[4] = -math.inf
        params: dict[str, Any] = {"temperature": temperature, "top_p": 0.9, "logprobs": 3}
        drawn = sample(x, [row(i, **params) for i in range(5)])
        for i in (0, 2, 4):
            assert drawn[i].token_id == -1
            assert drawn[i].logprobs is None
            assert isinstance(drawn[i].error, LogitsNotFinite)
        for i in (1, 3):
            assert drawn[i] == sample(x[i : i + 1], [row(i, **params)])[0]
            assert drawn[i].error is None

    def test_masked_tokens_are_allowed(self) -> None:
        x = logits(1, 20)
        x[0, 5:] = -math.inf
        drawn: list[Sampled] = sample(x, [row(temperature=5.0, logprobs=7)])
        assert drawn[0].token_id < 5

    def test_rows_and_parameters_must_match(self) -> None:
        with pytest.raises(ValueError, match="2 rows of parameters for 3 rows of logits"):
            sample(logits(3, 10), [row(), row()])

    def test_no_rows_give_nothing(self) -> None:
        assert sample(torch.zeros(0, 10), []) == []
