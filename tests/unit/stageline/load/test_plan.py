"""Arrival times, lengths and tokens of a load plan."""

import math
from dataclasses import replace

import numpy as np
import pytest

from stageline.load.plan import (
    Arrivals,
    ClippedLengths,
    LoadSpec,
    Prompts,
    Shape,
    UniformLengths,
    check_fits,
    make_plan,
    parse_lengths,
)

SPEC = LoadSpec(
    arrivals=Arrivals(rate_per_s=20),
    num_requests=200,
    duration_s=None,
    prompt_lengths=parse_lengths("uniform:10-30"),
    output_lengths=parse_lengths("uniform:1-9"),
    shared_prefix_tokens=5,
    num_prefix_groups=3,
    seed=4,
)


def test_a_load_is_a_function_of_its_specification() -> None:
    plan = make_plan(SPEC)
    assert plan == make_plan(replace(SPEC))
    for other in (replace(SPEC, seed=5), replace(SPEC, arrivals=Arrivals(rate_per_s=21))):
        assert plan != make_plan(other)
    assert [Prompts(SPEC, 100).token_ids(request) for request in plan] == [
        Prompts(SPEC, 100).token_ids(request) for request in plan
    ]


def test_another_rate_leaves_everything_but_the_times() -> None:
    faster = make_plan(replace(SPEC, arrivals=Arrivals(rate_per_s=90)))
    assert [replace(request, time_s=0.0) for request in faster] == [
        replace(request, time_s=0.0) for request in make_plan(SPEC)
    ]


def test_a_longer_load_begins_as_the_shorter_one() -> None:
    assert make_plan(replace(SPEC, num_requests=80)) == make_plan(SPEC)[:80]


def test_a_duration_sets_the_number_of_requests() -> None:
    plan = make_plan(SPEC)
    lasting = make_plan(replace(SPEC, num_requests=None, duration_s=plan[150].time_s))
    assert [request.time_s for request in lasting] == [request.time_s for request in plan[:150]]


def test_lengths_and_groups_are_within_the_specification() -> None:
    plan = make_plan(SPEC)
    assert {request.prompt_tokens for request in plan} == set(range(15, 36)), "the prefix is in it"
    assert {request.output_tokens for request in plan} == set(range(1, 10))
    assert {request.prefix_group for request in plan} == {0, 1, 2}
    assert [request.index for request in plan] == list(range(200))


def test_lengths_of_prompts_and_outputs_are_independent() -> None:
    lengths = parse_lengths("uniform:1-1000")
    plan = make_plan(replace(SPEC, prompt_lengths=lengths, output_lengths=lengths))
    prompts, outputs = (
        [request.prompt_tokens for request in plan],
        [request.output_tokens for request in plan],
    )
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.25, "3.5 standard errors"


def test_requests_of_a_group_share_only_the_prefix() -> None:
    prompts = Prompts(SPEC, vocab_size=50_000)
    plan = make_plan(SPEC)
    texts = [prompts.token_ids(request) for request in plan]
    assert [len(text) for text in texts] == [request.prompt_tokens for request in plan]
    prefixes = {request.prefix_group: tuple(text[:5]) for request, text in zip(plan, texts, strict=True)}
    assert all(tuple(t[:5]) == prefixes[request.prefix_group] for request, t in zip(plan, texts, strict=True))
    assert len(set(prefixes.values())) == 3
    assert len({tuple(text[5:10]) for text in texts}) == len(texts)


def test_token_ids_are_all_of_the_vocabulary() -> None:
    prompts = Prompts(SPEC, vocab_size=7)
    seen = {token_id for request in make_plan(SPEC) for token_id in prompts.token_ids(request)}
    assert seen == set(range(7))


def test_a_plan_that_does_not_fit_is_rejected_with_the_numbers() -> None:
    plan = make_plan(SPEC)
    longest = max(request.num_tokens for request in plan)
    check_fits(plan, longest)
    num_longest = sum(request.num_tokens == longest for request in plan)
    message = f"together {longest}, more than the {longest - 1} that fit; {num_longest} of 200 requests"
    with pytest.raises(ValueError, match=message):
        check_fits(plan, longest - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration_s": 3.0}, "either a number of requests or a duration"),
        ({"num_requests": None}, "either a number of requests or a duration"),
        ({"num_requests": 0}, "number of requests 0 is not in"),
        ({"num_requests": None, "duration_s": math.inf}, "duration of inf s"),
        ({"num_requests": None, "duration_s": -1.0}, "duration of -1 s"),
        ({"num_prefix_groups": 0}, "0 prefix groups of 5 tokens"),
        ({"shared_prefix_tokens": 0}, "3 prefix groups need a shared prefix"),
    ],
)
def test_an_invalid_specification_is_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)


NUM = 20_000


def gaps_of(arrivals: Arrivals, seed: int) -> np.ndarray:
    return np.diff(arrivals.first(NUM, np.random.default_rng(seed)))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_gaps_have_the_mean_and_the_variance_of_an_exponential(rate: float, seed: int) -> None:
    gaps = gaps_of(Arrivals(rate_per_s=rate), seed)
    # Standard errors of 20,000 draws: 0.7 % of the mean, 2 % of the variance.
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert gaps.var() == pytest.approx(1 / rate**2, rel=0.1)
    # A share of 1 / e of them is longer than the mean.
    assert (gaps > 1 / rate).mean() == pytest.approx(1 / math.e, abs=0.015)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_sets_the_variance_and_leaves_the_rate(burstiness: float) -> None:
    gaps = gaps_of(Arrivals(rate_per_s=10, burstiness=burstiness), seed=5)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.var() == pytest.approx(0.01 / burstiness, rel=0.15)


def test_arrivals_start_at_zero_and_never_decrease() -> None:
    times = Arrivals(rate_per_s=3).first(500, np.random.default_rng(1))
    assert times.shape == (500,)
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    assert Arrivals(rate_per_s=3).first(1, np.random.default_rng(1)).tolist() == [0.0]


def test_an_infinite_rate_sends_all_requests_at_time_zero() -> None:
    times = Arrivals(rate_per_s=math.inf).first(7, np.random.default_rng(0))
    assert times.tolist() == [0.0] * 7


def test_a_duration_holds_all_arrivals_before_its_end() -> None:
    arrivals = Arrivals(rate_per_s=100)
    within = arrivals.within(30.0, np.random.default_rng(4))
    assert len(within) == pytest.approx(3000, rel=0.08)
    assert within[0] == 0
    assert 29.5 < within[-1] < 30
    assert (np.diff(within) >= 0).all()


def test_another_rate_is_the_same_pattern_at_another_speed() -> None:
    slow = Arrivals(rate_per_s=1).first(50, np.random.default_rng(9))
    fast = Arrivals(rate_per_s=8).first(50, np.random.default_rng(9))
    np.testing.assert_allclose(slow, fast * 8)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_an_invalid_rate_is_rejected(rate: float) -> None:
    with pytest.raises(ValueError, match=f"rate of {rate:g} per second is not above 0"):
        Arrivals(rate_per_s=rate)


@pytest.mark.parametrize("burstiness", [0.0, math.inf, math.nan])
def test_an_invalid_burstiness_is_rejected(burstiness: float) -> None:
    with pytest.raises(ValueError, match=f"burstiness of {burstiness:g}"):
        Arrivals(rate_per_s=1, burstiness=burstiness)


def test_a_duration_with_endlessly_many_requests_is_rejected() -> None:
    with pytest.raises(ValueError, match="needs a number of requests"):
        Arrivals(rate_per_s=math.inf).within(1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="more than 1000000 requests"):
        Arrivals(rate_per_s=1e9).within(1, np.random.default_rng(0))


def draw(text: str, seed: int = 0) -> np.ndarray:
    return parse_lengths(text).draw(NUM, np.random.default_rng(seed))


def test_length_specifications_are_parsed() -> None:
    assert parse_lengths("128") == UniformLengths(lowest=128, highest=128)
    assert parse_lengths("uniform:64-512") == UniformLengths(lowest=64, highest=512)
    assert parse_lengths("normal:256,64") == ClippedLengths(shape=Shape.NORMAL, mean=256, deviation=64)
    assert parse_lengths("lognormal:25.5,0.5:16-64") == ClippedLengths(
        shape=Shape.LOGNORMAL, mean=25.5, deviation=0.5, bounds=UniformLengths(lowest=16, highest=64)
    )


def test_a_number_is_always_that_number() -> None:
    assert set(draw("17").tolist()) == {17}


def test_a_uniform_range_has_both_its_ends_and_all_between_equally_often() -> None:
    values, counts = np.unique(draw("uniform:3-7"), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert counts == pytest.approx([NUM / 5] * 5, rel=0.08)


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_a_shape_has_its_mean_and_its_deviation(kind: str) -> None:
    lengths = draw(f"{kind}:256,64")
    assert lengths.mean() == pytest.approx(256, rel=0.01)
    assert lengths.std() == pytest.approx(64, rel=0.05)
    skewness = ((lengths - lengths.mean()) ** 3).mean() / lengths.std() ** 3
    # Of a lognormal distribution: (v + 2) sqrt(v - 1) with v = 1 + (64 / 256)^2.
    assert skewness == pytest.approx(0 if kind == "normal" else 0.766, abs=0.12)


def test_values_beyond_the_bounds_are_clipped() -> None:
    lengths = draw("normal:100,50:80-120")
    assert (lengths.min(), lengths.max()) == (80, 120)
    # Beyond 0.4 standard deviations lie 34.5 % on each side.
    assert (lengths == 80).mean() == pytest.approx(0.345, abs=0.02)


def test_nothing_is_shorter_than_a_token() -> None:
    assert draw("normal:1,50").min() == 1


MISWRITTEN = [
    *("", "many", "-5", "1.5", "128 ", "٣", "zipf:2"),
    *("uniform", "uniform:5", "uniform:5-", "uniform:5-x", "uniform:1.5-3"),
    *("normal:5", "normal:5,-1", "normal:5,nan", "normal: 5,1", "normal:5,1:3", "normal:5,1:3-"),
]


@pytest.mark.parametrize("text", MISWRITTEN)
def test_malformed_lengths_are_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a distribution of lengths; examples: 128, uniform"):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["0", "uniform:0-5", "uniform:9-5", "uniform:1-99999999", "normal:5,1:9-5"])
def test_an_empty_range_is_rejected_with_its_numbers(text: str) -> None:
    numbers = text.rpartition(":")[2].split("-")
    with pytest.raises(ValueError, match=rf"^{numbers[0]} to {numbers[-1]} tokens is not a range"):
        parse_lengths(text)


def test_a_mean_below_a_token_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"mean of 0.5 tokens"):
        parse_lengths("lognormal:0.5,1")
