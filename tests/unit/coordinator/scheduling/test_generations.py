"""A key that comes again starts above every generation of its past."""

import pytest

from coordinator.scheduling import generations
from coordinator.scheduling.generations import UsedGenerations
from stage_worker import sequences
from wire.ids import SequenceKey, new_request_id


def test_more_is_remembered_than_on_a_stage_and_takes_less_than_four_megabytes() -> None:
    assert generations.REMEMBERED > sequences.ENDED_REMEMBERED
    assert generations.REMEMBERED * 270 < 4e6


def key() -> SequenceKey:
    return SequenceKey(new_request_id(), 0)


def test_a_new_key_starts_at_generation_0() -> None:
    assert UsedGenerations().next_of(key()) == 0


def test_a_key_starts_above_the_last_generation_of_its_predecessor() -> None:
    used, one, other = UsedGenerations(), key(), key()
    used.note_ended(one, 2)
    assert (used.next_of(one), used.next_of(other)) == (3, 0)


def test_another_epoch_knows_nothing_of_this_one() -> None:
    used, one = UsedGenerations(), key()
    used.note_ended(one, 2)
    used.clear()
    assert used.next_of(one) == 0


def test_memory_is_bounded_and_forgets_what_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "REMEMBERED", 2)
    used, first, second, third = UsedGenerations(), key(), key(), key()
    for each in (first, second, first, third):
        used.note_ended(each, used.next_of(each))
    assert [used.next_of(each) for each in (first, second, third)] == [2, 0, 1]
