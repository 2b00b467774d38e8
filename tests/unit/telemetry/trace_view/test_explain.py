"""The sentence names whoever took the time."""

import pytest

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.explain import explain, format_seconds
from telemetry.trace_view.slow_stage import slowest_stage
from tests.otlp_spans import SpanMaker, Times, served


def decoded(*stages: Times, length: float = 1.0, result: float = 0.0) -> SpanMaker:
    """A request that does nothing but decode."""
    maker = SpanMaker()
    maker.decode(0.0, length, stages, result=result)
    maker.root(length)
    return maker


def test_a_stage_that_is_slow_on_purpose_is_named_first() -> None:
    assert explain(decoded(Times(0.2), Times(0.2), Times(0.4), Times(0.2)).trace()) == (
        "1.00 s: 40 % computing on stage 2 (worker-2, layers 8-11), which takes 2.0 x as long as the median "
        "stage; 60 % computing on the other 3 stages."
    )


def test_a_slow_one_of_many_stages_is_named_however_small_its_share() -> None:
    stages = [Times(0.01)] * 63 + [Times(0.02)]
    assert "2 % computing on stage 63 (worker-63, layers 252-255), which takes 2.0 x" in explain(
        decoded(*stages).trace()
    )


def test_of_two_stages_the_slow_one_is_compared_with_the_other() -> None:
    assert explain(decoded(Times(0.25), Times(0.75)).trace()) == (
        "1.00 s: 75 % computing on stage 1 (worker-1, layers 4-7), which takes 3.0 x as long as the other "
        "stage; 25 % computing on the other stage."
    )


def test_stages_that_are_alike_are_taken_together() -> None:
    assert explain(decoded(Times(0.3), Times(0.32), Times(0.38)).trace()) == (
        "1.00 s: 100 % computing, spread evenly over 3 stages."
    )


def test_the_only_stage_is_compared_with_nobody() -> None:
    assert explain(decoded(Times(1.0)).trace()) == (
        "1.00 s: 100 % computing on the only stage, stage 0 (worker-0, layers 0-3)."
    )


def test_waiting_at_one_stage_names_it_once() -> None:
    stages = (Times(0.1), Times(0.2, wait=0.6), Times(0.1))
    assert explain(decoded(*stages).trace()) == (
        "1.00 s: 60 % waiting at stage 1 (worker-1, layers 4-7) behind other steps; 20 % computing on stage "
        "1, which takes 2.0 x as long as the median stage; 20 % computing on the other 2 stages."
    )


def test_waiting_everywhere_names_nobody() -> None:
    assert explain(decoded(*[Times(0.1, wait=0.4)] * 2).trace()) == (
        "1.00 s: 80 % waiting behind other steps at the stages; 20 % computing, spread evenly over 2 stages."
    )


def test_waiting_a_little_more_at_one_stage_names_nobody() -> None:
    assert explain(decoded(Times(0.2, wait=0.25), Times(0.2, wait=0.35)).trace()).startswith(
        "1.00 s: 60 % waiting behind other steps at the stages; "
    )


def test_a_slow_hop_is_named() -> None:
    stages = (Times(0.1), Times(0.1, hop=0.5, receive=0.1), Times(0.1), Times(0.1))
    assert explain(decoded(*stages).trace()).startswith(
        "1.00 s: 60 % in transit into stage 1 (worker-1, layers 4-7); 40 % computing"
    )


def test_the_way_back_to_the_coordinator_is_named() -> None:
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


def test_waiting_for_a_turn_is_named() -> None:
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


def test_what_stages_have_not_told_is_said() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [], unrecorded=1.0)
    maker.root(1.0)
    assert explain(maker.trace()) == "1.00 s: 100 % in steps of which not every stage has told its times."


def test_a_request_that_did_not_finish_says_so() -> None:
    maker = SpanMaker(outcome="cancelled")
    maker.queue(0.0, 2.41)
    maker.root(2.41)
    assert explain(maker.trace()) == "cancelled after 2.41 s: 100 % in the queue."


def test_a_request_without_length_has_nothing_to_explain() -> None:
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


def test_a_stage_that_has_not_told_of_every_step_is_compared_step_by_step() -> None:
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


def test_the_other_stages_are_those_of_one_epoch() -> None:
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
