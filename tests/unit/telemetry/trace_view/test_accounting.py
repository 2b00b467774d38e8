"""The parts of a request's time add up to the whole, whatever happened in it."""

import random

import pytest

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.accounting import Cause, account
from telemetry.trace_view.read_model import RequestTrace
from tests.otlp_spans import SpanMaker, Times, served


def spent(trace: RequestTrace) -> dict[tuple[Cause, int | None], float]:
    shares = account(trace)
    assert sum(share.seconds for share in shares) == pytest.approx(trace.duration_s, abs=1e-9)
    assert [share.seconds for share in shares] == sorted((share.seconds for share in shares), reverse=True)
    return {
        (share.cause, None if share.place is None else share.place.index): share.seconds for share in shares
    }


def test_a_request_of_one_chunk_and_one_decode_is_its_steps() -> None:
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


def test_a_recovery_comes_before_what_it_interrupts() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(1.0)])
    maker.add(SpanName.RECOVERY, 0.5, 1.0, {Attr.CHOICE: 0})
    maker.queue(0.75, 1.0)
    maker.root(1.0)
    assert spent(maker.trace()) == pytest.approx({(Cause.COMPUTE, 0): 0.5, (Cause.RECOVERY, None): 0.5})


def test_time_between_steps_is_waiting_for_a_turn_and_the_rest_is_the_coordinators() -> None:
    maker = SpanMaker()
    end = maker.chunk(0.25, [Times(0.25)])
    maker.chunk(end + 0.125, [Times(0.25)])
    maker.root(1.0)
    assert spent(maker.trace()) == pytest.approx(
        {(Cause.COMPUTE, 0): 0.5, (Cause.TURN, None): 0.125, (Cause.COORDINATOR, None): 0.375}
    )


def test_steps_of_which_a_stage_tells_nothing_are_unrecorded() -> None:
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


def test_stages_that_tell_more_than_there_was_get_their_share_of_it() -> None:
    maker = SpanMaker()
    maker.decode(0.0, 1.0, [Times(3.0), Times(1.0)])
    maker.root(1.0)
    assert spent(maker.trace()) == pytest.approx({(Cause.COMPUTE, 0): 0.75, (Cause.COMPUTE, 1): 0.25})


def test_a_clock_that_is_off_moves_no_time_from_one_cause_to_another() -> None:
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
        sum(seconds for (cause, _), seconds in each.items() if cause in (Cause.HOP, Cause.RESULT))
        for each in found
    ]
    assert ways == pytest.approx([0.4, 0.4])


def test_what_lies_outside_the_request_does_not_count() -> None:
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
    assert account(maker.trace()) == ()


@pytest.mark.parametrize("seed", range(20))
def test_any_spans_add_up(seed: int) -> None:
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
