"""The explanation names the causes with the largest shares."""

import random

import pytest

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.explain import (
    STANDS_OUT,
    Cause,
    explain,
    format_seconds,
    ratio_to_median,
    slowest_stage,
    stands_out,
    time_shares,
)
from telemetry.trace_view.read_model import RequestTrace
from tests.otlp_spans import SpanMaker, Times, served


def decoded(*stages: Times, length: float = 1.0, result: float = 0.0) -> SpanMaker:
    """A request that only decodes."""
    maker = SpanMaker()
    maker.decode(0.0, length, stages, result=result)
    maker.root(length)
    return maker


def test_a_stage_that_is_slow_on_purpose_is_named_first() -> None:
    assert explain(decoded(Times(0.2), Times(0.2), Times(0.4), Times(0.2)).trace()) == (
        "1.00 s: 40 % computing on stage 2 (worker-2, layers 8-11), which takes 2.0 x as long as the median "
        "stage; 60 % computing on the other 3 stages."
    )


def test_a_slow_stage_of_many_is_named_at_any_share() -> None:
    stages = [Times(0.01)] * 63 + [Times(0.02)]
    assert "2 % computing on stage 63 (worker-63, layers 252-255), which takes 2.0 x" in explain(
        decoded(*stages).trace()
    )


def test_of_two_stages_the_slow_one_is_compared_with_the_other() -> None:
    assert explain(decoded(Times(0.25), Times(0.75)).trace()) == (
        "1.00 s: 75 % computing on stage 1 (worker-1, layers 4-7), which takes 3.0 x as long as the other "
        "stage; 25 % computing on the other stage."
    )


def test_similar_stages_are_grouped() -> None:
    assert explain(decoded(Times(0.3), Times(0.32), Times(0.38)).trace()) == (
        "1.00 s: 100 % computing, spread evenly over 3 stages."
    )


def test_the_only_stage_is_not_compared() -> None:
    assert explain(decoded(Times(1.0)).trace()) == (
        "1.00 s: 100 % computing on the only stage, stage 0 (worker-0, layers 0-3)."
    )


def test_waiting_at_one_stage_names_it_once() -> None:
    stages = (Times(0.1), Times(0.2, wait=0.6), Times(0.1))
    assert explain(decoded(*stages).trace()) == (
        "1.00 s: 60 % waiting at stage 1 (worker-1, layers 4-7) behind other steps; 20 % computing on stage "
        "1, which takes 2.0 x as long as the median stage; 20 % computing on the other 2 stages."
    )


def test_waiting_everywhere_names_no_stage() -> None:
    assert explain(decoded(*[Times(0.1, wait=0.4)] * 2).trace()) == (
        "1.00 s: 80 % waiting behind other steps at the stages; 20 % computing, spread evenly over 2 stages."
    )


def test_waiting_slightly_more_at_one_stage_names_no_stage() -> None:
    assert explain(decoded(Times(0.2, wait=0.25), Times(0.2, wait=0.35)).trace()).startswith(
        "1.00 s: 60 % waiting behind other steps at the stages; "
    )


def test_a_slow_hop_is_named() -> None:
    stages = (Times(0.1), Times(0.1, hop=0.5, receive=0.1), Times(0.1), Times(0.1))
    assert explain(decoded(*stages).trace()).startswith(
        "1.00 s: 60 % in transit into stage 1 (worker-1, layers 4-7); 40 % computing"
    )


def test_the_link_back_to_the_coordinator_is_named() -> None:
    assert explain(decoded(Times(0.2), Times(0.2, hop=0.1), result=0.5).trace()) == (
        "1.00 s: 50 % in transit from the last stage back to the coordinator; 10 % in transit between "
        "stages; 40 % computing, spread evenly over 2 stages."
    )


def test_the_queue_is_named() -> None:
    maker = SpanMaker()
    maker.queue(0.0, 0.9)
    maker.decode(0.9, 1.0, [Times(0.05), Times(0.05)])
    maker.root(1.0)
    assert explain(maker.trace()) == (
        "1.00 s: 90 % in the queue; 10 % computing, spread evenly over 2 stages."
    )


def test_waiting_between_steps_is_named() -> None:
    assert "70 % between steps, while other sequences were computed" in explain(decoded(Times(0.3)).trace())


def test_recoveries_are_named_with_their_reason_and_number() -> None:
    maker = SpanMaker()
    maker.add(SpanName.RECOVERY, 0.0, 0.4, {Attr.CHOICE: 0, Attr.REASON: "worker-1 is lost"})
    maker.add(SpanName.RECOVERY, 0.5, 0.7, {Attr.CHOICE: 0, Attr.REASON: "a step fault"})
    maker.decode(0.7, 1.0, [Times(0.3)])
    maker.root(1.0)
    assert "60 % recovering twice (worker-1 is lost, ...)" in explain(maker.trace())


def test_one_recovery_of_two_choices_is_one() -> None:
    maker = SpanMaker()
    for choice in (0, 1):
        maker.add(SpanName.RECOVERY, 0.0, 1.0, {Attr.CHOICE: choice, Attr.REASON: "worker-1 is lost"})
    maker.root(1.0)
    assert explain(maker.trace()) == "1.00 s: 100 % recovering (worker-1 is lost)."


def test_preemptions_are_named() -> None:
    maker = SpanMaker()
    for number in range(3):
        maker.add(SpanName.PREEMPTION, 0.3 * number, 0.3 * number + 0.3, {Attr.CHOICE: 0})
    maker.root(1.0)
    assert explain(maker.trace()) == "1.00 s: 90 % preempted 3 times; 10 % in the coordinator."


def test_unreported_stage_time_is_shown() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [], unrecorded=1.0)
    maker.root(1.0)
    assert explain(maker.trace()) == "1.00 s: 100 % in steps without times from every stage."


def test_an_unfinished_request_is_marked() -> None:
    maker = SpanMaker(outcome="cancelled")
    maker.queue(0.0, 2.41)
    maker.root(2.41)
    assert explain(maker.trace()) == "cancelled after 2.41 s: 100 % in the queue."


def test_a_request_of_zero_duration_has_no_explanation() -> None:
    maker = SpanMaker()
    maker.root(0.0)
    assert explain(maker.trace()) == "0 us: no time was spent."


def test_stages_are_compared_within_the_epochs_that_they_shared() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(0.1), Times(0.2)], workers=("a", "b"))
    maker.decode(1.0, 9.0, [Times(1.0), Times(1.0)], workers=("a", "c"), epoch=2)
    maker.root(9.0)
    slow = slowest_stage(maker.trace())
    assert slow is not None
    assert (slow.place.worker, slow.ratio) == ("b", pytest.approx(2.0))
    assert slow.compute_s == pytest.approx(0.2)


def test_a_stage_with_missing_steps_is_compared_step_by_step() -> None:
    maker = SpanMaker()
    prompt_end = maker.chunk(0.0, [Times(0.1), Times(0.2), Times(0.1)])
    parent = maker.decode(prompt_end, 9.0, [Times(0.34)], steps=34)
    maker.stage(SpanName.STAGE_DECODE, parent, 1, 1.0, Times(0.34), steps=17, end=9.0)
    maker.stage(SpanName.STAGE_DECODE, parent, 2, 1.0, Times(0.34), steps=34, end=9.0)
    maker.root(9.0)
    slow = slowest_stage(maker.trace())
    assert slow is not None
    assert (slow.place.index, slow.ratio, slow.num_others) == (1, pytest.approx(2.0), 2)


def test_long_prefills_do_not_hide_that_decode_steps_are_missing() -> None:
    maker = SpanMaker()
    end = maker.chunk(0.0, [Times(1.0), Times(1.0)])
    parent = maker.decode(end, 9.0, [Times(1.0)], steps=100)
    maker.stage(SpanName.STAGE_DECODE, parent, 1, 3.0, Times(0.01), steps=1, end=9.0)
    maker.root(9.0)
    slow = slowest_stage(maker.trace())
    assert slow is not None
    assert slow.ratio == pytest.approx(1.0)


def test_other_stages_are_compared_within_one_epoch() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(0.1), Times(0.2)], workers=("a", "b"))
    maker.decode(1.0, 2.0, [Times(0.1), Times(0.2)], workers=("c", "b"), epoch=2)
    maker.root(2.0)
    slow = slowest_stage(maker.trace())
    assert slow is not None
    assert (slow.place.worker, slow.num_others) == ("b", 1)
    assert "computing on the other stage" in explain(maker.trace())


def test_a_trace_without_stages_has_no_slowest() -> None:
    maker = SpanMaker()
    maker.root(1.0)
    assert slowest_stage(maker.trace()) is None
    assert slowest_stage(served((0.2, 0.4, 0.2)).trace()) is not None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (85e-6, "85 us"),
        (0.0009996, "1.00 ms"),
        (0.0081, "8.10 ms"),
        (-0.0081, "-8.10 ms"),
        (0.8124, "812 ms"),
        (0.9997, "1.00 s"),
        (2.41, "2.41 s"),
        (12.34, "12.3 s"),
        (99.96, "100 s"),
        (1234.0, "1234 s"),
    ],
)
def test_seconds_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("own_s", "others_s", "ratio"),
    [
        (0.04, (0.02, 0.02), 2.0),
        (0.04, (0.01, 0.02, 0.5), 2.0),
        (0.03, (0.01, 0.02), 2.0),
        (0.04, (), None),
        (0.04, (0.0, 0.0), None),
    ],
)
def test_slowness_is_relative_to_the_median_of_the_others(
    own_s: float, others_s: tuple[float, ...], ratio: float | None
) -> None:
    found = ratio_to_median(own_s, others_s)
    assert found == (None if ratio is None else pytest.approx(ratio))


def test_a_stage_without_peers_is_not_slow() -> None:
    assert [stands_out(ratio) for ratio in (None, 1.0, STANDS_OUT - 0.01, STANDS_OUT)] == [
        *(False, False, False, True)
    ]


def spent(trace: RequestTrace) -> dict[tuple[Cause, int | None], float]:
    shares = time_shares(trace)
    assert sum(share.seconds for share in shares) == pytest.approx(trace.duration_s, abs=1e-9)
    assert [share.seconds for share in shares] == sorted((share.seconds for share in shares), reverse=True)
    return {
        (share.cause, None if share.place is None else share.place.index): share.seconds for share in shares
    }


def test_a_request_of_one_chunk_and_one_decode_equals_its_steps() -> None:
    found = spent(served((0.2, 0.4)).trace())
    assert found[Cause.QUEUE, None] == pytest.approx(0.1)
    assert found[Cause.COMPUTE, 0] == pytest.approx(0.22)
    assert found[Cause.COMPUTE, 1] == pytest.approx(0.44)
    assert found[Cause.WAIT, 1] == pytest.approx(0.01)
    assert found[Cause.HOP, 1] == pytest.approx(0.005)
    assert found[Cause.RECEIVE, 0] == pytest.approx(0.002)
    assert found[Cause.RESULT, None] == pytest.approx(0.006)
    assert found[Cause.TURN, None] == pytest.approx(0.005)
    assert found.get((Cause.UNRECORDED, None), 0.0) < 1e-9


def test_chunks_that_follow_each_other_count_every_instant_once() -> None:
    maker = SpanMaker()
    maker.chunk(0.0, [Times(0.5), Times(0.5)])
    maker.chunk(0.5, [Times(0.5), Times(0.5)])
    maker.root(1.5)
    found = spent(maker.trace())
    assert found == pytest.approx({(Cause.COMPUTE, 0): 0.75, (Cause.COMPUTE, 1): 0.75})


def test_choices_that_run_at_once_share_the_time() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(1.0)], choice=0)
    maker.queue(0.0, 0.5, choice=1)
    maker.root(1.0)
    found = spent(maker.trace())
    assert found == pytest.approx({(Cause.COMPUTE, 0): 0.75, (Cause.QUEUE, None): 0.25})


def test_a_recovery_takes_precedence_over_interrupted_work() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(1.0)])
    maker.add(SpanName.RECOVERY, 0.5, 1.0, {Attr.CHOICE: 0})
    maker.queue(0.75, 1.0)
    maker.root(1.0)
    assert spent(maker.trace()) == pytest.approx({(Cause.COMPUTE, 0): 0.5, (Cause.RECOVERY, None): 0.5})


def test_time_between_steps_is_waiting_or_coordinator_time() -> None:
    maker = SpanMaker()
    end = maker.chunk(0.25, [Times(0.25)])
    maker.chunk(end + 0.125, [Times(0.25)])
    maker.root(1.0)
    assert spent(maker.trace()) == pytest.approx(
        {(Cause.COMPUTE, 0): 0.5, (Cause.TURN, None): 0.125, (Cause.COORDINATOR, None): 0.375}
    )


def test_steps_without_stage_spans_are_unrecorded() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(0.25)], unrecorded=0.5)
    maker.root(1.0)
    assert spent(maker.trace()) == pytest.approx(
        {(Cause.COMPUTE, 0): 0.25, (Cause.UNRECORDED, None): 0.5, (Cause.TURN, None): 0.25}
    )


def test_a_chunk_that_was_never_answered_is_unrecorded() -> None:
    maker = SpanMaker()
    maker.add(SpanName.PREFILL_CHUNK, 0.0, 1.0, {Attr.CHOICE: 0})
    maker.root(1.0)
    assert spent(maker.trace()) == {(Cause.UNRECORDED, None): 1.0}


def test_overlong_stage_times_are_scaled_down() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(3.0), Times(1.0)])
    maker.root(1.0)
    assert spent(maker.trace()) == pytest.approx({(Cause.COMPUTE, 0): 0.75, (Cause.COMPUTE, 1): 0.25})


def test_a_clock_offset_does_not_shift_time_between_causes() -> None:
    times = [Times(0.2, hop=0.08), Times(0.2, hop=0.1), Times(0.2, hop=0.1)]
    off = [Times(0.2, hop=0.08), Times(0.2, hop=0.1 - 0.15), Times(0.2, hop=0.1 + 0.15)]
    found = []
    for stages in (times, off):
        maker = SpanMaker()
        maker.decode(0.0, 1.0, stages, result=0.12)
        maker.root(1.0)
        found.append(spent(maker.trace()))
    for key in ((Cause.COMPUTE, 0), (Cause.COMPUTE, 1), (Cause.COMPUTE, 2)):
        assert found[0][key] == found[1][key] == pytest.approx(0.2)
    ways = [
        sum(seconds for (cause, _), seconds in seconds_by_cause.items() if cause in (Cause.HOP, Cause.RESULT))
        for seconds_by_cause in found
    ]
    assert ways == pytest.approx([0.4, 0.4])


def test_time_outside_the_request_does_not_count() -> None:
    maker = SpanMaker()
    maker.queue(-1.0, 0.5)
    maker.decode(0.5, 3.0, [Times(2.5)])
    maker.root(1.0)
    assert spent(maker.trace()) == pytest.approx({(Cause.QUEUE, None): 0.5, (Cause.COMPUTE, 0): 0.5})


def test_a_decode_without_steps_takes_no_time() -> None:
    maker = SpanMaker()
    maker.decode(0.5, 0.5, [], steps=0)
    maker.root(1.0)
    assert spent(maker.trace()) == {(Cause.COORDINATOR, None): 1.0}


def test_a_request_without_length_has_no_parts() -> None:
    maker = SpanMaker()
    maker.queue(0.0, 0.0)
    maker.root(0.0)
    assert time_shares(maker.trace()) == ()


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_any_spans_add_up(seed: int) -> None:
    draws = random.Random(seed)
    maker = SpanMaker()
    for _ in range(30):
        start, choice = draws.uniform(-0.1, 1.0), draws.randrange(3)
        end = start + draws.choice([0.0, draws.uniform(0.0, 0.5)])
        stages = [Times(draws.uniform(0, 0.1), hop=draws.uniform(0, 0.01)) for _ in range(3)]
        match draws.randrange(4):
            case 0:
                maker.queue(start, end, choice=choice)
            case 1:
                maker.chunk(start, stages, choice=choice)
            case 2:
                maker.decode(start, end, stages, choice=choice, unrecorded=draws.uniform(0, 0.2))
            case 3:
                maker.add(SpanName.PREEMPTION, start, end, {Attr.CHOICE: choice})
    maker.root(1.0)
    spent(maker.trace())


def test_the_gateways_part_is_named() -> None:
    maker = SpanMaker()
    maker.queue(0.0, 0.9)
    maker.decode(0.9, 1.0, [Times(0.1)])
    maker.root(1.0)
    maker.gateway(-0.6, 1.4)
    found = spent(maker.trace())
    assert found[Cause.GATEWAY_PROMPT, None] == pytest.approx(0.6)
    assert found[Cause.GATEWAY_RESPONSE, None] == pytest.approx(0.4)
    assert found[Cause.QUEUE, None] == pytest.approx(0.9)
    assert explain(maker.trace()) == (
        "2.00 s: 45 % in the queue; 30 % in the gateway before the coordinator (body, chat template, "
        "tokenizer); 20 % in the gateway after the last token (text, sending to the client); 5 % computing "
        "on the only stage, stage 0 (worker-0, layers 0-3)."
    )


def test_a_gateway_within_its_request_takes_no_time_of_it() -> None:
    maker = SpanMaker()
    maker.queue(0.0, 1.0)
    maker.root(1.0)
    maker.gateway(0.1, 0.2)
    assert spent(maker.trace()) == {(Cause.QUEUE, None): pytest.approx(1.0)}
