"""The queue of sequences, of which clients take turns."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from coordinator.scheduler.sequence import Priority, Sequence, queue_order
from coordinator.scheduler.sequence_queue import SequenceQueue
from tests.unit.coordinator.scheduler.pipeline_model import key_of
from wire.sampling import StepSampling

AGE_S = 30.0


def sequence_of(number: int, client: str, priority: Priority = Priority.NORMAL) -> Sequence:
    sequence = Sequence(
        key_of(number),
        (1, 2, 3),
        max_tokens=4,
        sampling=StepSampling(),
        stop_token_ids=frozenset(),
        order=queue_order(priority, arrived_s=number / 7, arrival=number, age_s=AGE_S),
    )
    sequence.client = client
    return sequence


def fairest_by_scan(waiting: list[Sequence], running: Counter[str]) -> Sequence | None:
    """The straightforward choice: of those that are of the head's priority and behind none above it."""
    firsts: dict[str, Sequence] = {}
    for sequence in (ordered := sorted(waiting, key=lambda sequence: sequence.order)):
        priority = ordered[0].order.priority
        if sequence.order.priority > priority:
            break
        if sequence.order.priority is priority:
            firsts.setdefault(sequence.client, sequence)
    return min(firsts.values(), key=lambda first: (running[first.client], first.order), default=None)


@pytest.mark.parametrize("seed", range(20))
def test_the_turn_is_that_of_a_scan_of_the_whole_queue(seed: int) -> None:
    random, queue, waiting, running = Random(seed), SequenceQueue(), list[Sequence](), Counter[str]()
    for number in range(300):
        if waiting and random.random() < 0.45:
            sequence = queue.fairest(running) if random.random() < 0.5 else random.choice(waiting)
            assert sequence is not None
            queue.remove(sequence)
            waiting.remove(sequence)
            running[sequence.client] += 1
        else:
            sequence = sequence_of(number, random.choice("abcd"), random.choice(list(Priority)))
            queue.add(sequence)
            waiting.append(sequence)
        running[random.choice("abcd")] //= 2
        assert queue.fairest(running) is fairest_by_scan(waiting, running)
        assert list(queue) == sorted(waiting, key=lambda sequence: sequence.order)
        assert len(queue) == len(waiting)


def test_a_sequence_that_is_not_in_the_queue_cannot_be_removed() -> None:
    queue = SequenceQueue()
    queue.add(sequence_of(1, "a"))
    with pytest.raises(ValueError, match="not in the queue"):
        queue.remove(sequence_of(2, "a"))
    with pytest.raises(ValueError, match="not in the queue"):
        queue.remove(sequence_of(1, "a"))


def test_clients_with_nothing_running_take_turns() -> None:
    queue, turns = SequenceQueue(), []
    first, *others = [sequence_of(number, "flood") for number in range(4)]
    for sequence in (first, *others):
        queue.add(sequence)
    queue.admit(first)
    for number, client in enumerate(("quiet", "other", "quiet"), 4):
        queue.add(sequence_of(number, client))
    while (next_one := queue.fairest(Counter())) is not None:
        queue.admit(next_one)
        turns.append(next_one.client)
    assert turns == ["quiet", "other", "flood", "quiet", "flood", "flood"]


def test_no_turn_of_a_client_overtakes_a_higher_priority() -> None:
    queue = SequenceQueue()
    old, high, new = (
        sequence_of(0, "busy", Priority.LOW),
        sequence_of(450, "other", Priority.HIGH),
        sequence_of(460, "idle", Priority.LOW),
    )
    for sequence in (new, high, old):
        queue.add(sequence)
    assert list(queue) == [old, high, new]
    assert queue.fairest(Counter(busy=5)) is old
