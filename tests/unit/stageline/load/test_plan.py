"""What is sent when, and which tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest

from stageline.load.arrivals import Arrivals
from stageline.load.lengths import parse_lengths
from stageline.load.plan import LoadSpec, check_fits, make_plan
from stageline.load.prompts import Prompts

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
    assert [Prompts(SPEC, 100).token_ids(each) for each in plan] == [
        Prompts(SPEC, 100).token_ids(each) for each in plan
    ]


def test_another_rate_leaves_everything_but_the_times() -> None:
    faster = make_plan(replace(SPEC, arrivals=Arrivals(rate_per_s=90)))
    assert [replace(each, time_s=0.0) for each in faster] == [
        replace(each, time_s=0.0) for each in make_plan(SPEC)
    ]


def test_a_longer_load_begins_as_the_shorter_one() -> None:
    assert make_plan(replace(SPEC, num_requests=80)) == make_plan(SPEC)[:80]


def test_a_duration_is_another_way_to_say_how_many() -> None:
    plan = make_plan(SPEC)
    lasting = make_plan(replace(SPEC, num_requests=None, duration_s=plan[150].time_s))
    assert [each.time_s for each in lasting] == [each.time_s for each in plan[:150]]


def test_lengths_and_groups_are_within_what_was_specified() -> None:
    plan = make_plan(SPEC)
    assert {each.prompt_tokens for each in plan} == set(range(15, 36)), "the prefix is in it"
    assert {each.output_tokens for each in plan} == set(range(1, 10))
    assert {each.prefix_group for each in plan} == {0, 1, 2}
    assert [each.index for each in plan] == list(range(200))


def test_lengths_of_prompts_and_outputs_have_nothing_to_do_with_each_other() -> None:
    lengths = parse_lengths("uniform:1-1000")
    plan = make_plan(replace(SPEC, prompt_lengths=lengths, output_lengths=lengths))
    prompts, outputs = [each.prompt_tokens for each in plan], [each.output_tokens for each in plan]
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.25, "3.5 standard errors"


def test_requests_of_a_group_share_the_prefix_and_nothing_else() -> None:
    prompts = Prompts(SPEC, vocab_size=50_000)
    plan = make_plan(SPEC)
    texts = [prompts.token_ids(each) for each in plan]
    assert [len(text) for text in texts] == [each.prompt_tokens for each in plan]
    prefixes = {each.prefix_group: tuple(text[:5]) for each, text in zip(plan, texts, strict=True)}
    assert all(tuple(t[:5]) == prefixes[each.prefix_group] for each, t in zip(plan, texts, strict=True))
    assert len(set(prefixes.values())) == 3
    assert len({tuple(text[5:10]) for text in texts}) == len(texts)


def test_token_ids_are_all_of_the_vocabulary() -> None:
    prompts = Prompts(SPEC, vocab_size=7)
    seen = {token_id for each in make_plan(SPEC) for token_id in prompts.token_ids(each)}
    assert seen == set(range(7))


def test_a_plan_that_does_not_fit_is_refused_with_the_numbers() -> None:
    plan = make_plan(SPEC)
    longest = max(each.num_tokens for each in plan)
    check_fits(plan, longest)
    num_longest = sum(each.num_tokens == longest for each in plan)
    told = f"together {longest}, more than the {longest - 1} that fit; {num_longest} of 200 requests"
    with pytest.raises(ValueError, match=told):
        check_fits(plan, longest - 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration_s": 3.0}, "a number of requests or a duration, and not both"),
        ({"num_requests": None}, "a number of requests or a duration, and not both"),
        ({"num_requests": 0}, "0 requests are not in"),
        ({"num_requests": None, "duration_s": math.inf}, "duration of inf s"),
        ({"num_requests": None, "duration_s": -1.0}, "duration of -1 s"),
        ({"num_prefix_groups": 0}, "0 groups of 5 shared tokens"),
        ({"shared_prefix_tokens": 0}, "3 prefix groups need a shared prefix"),
    ],
)
def test_a_specification_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)
