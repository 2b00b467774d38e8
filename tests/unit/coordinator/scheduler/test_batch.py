"""Which ready sequences a step takes, and what they cost."""

import pytest

from coordinator.scheduler.batch import DecodeQueue
from coordinator.scheduler.cost_model import decodes_cost
from coordinator.scheduler.policy import DecodeLoad
from coordinator.scheduler.sequence import QueueOrder, Sequence
from tests.unit.coordinator.scheduler.pipeline_model import GREEDY, key_of


def sequence_of(num_tokens: int, *, number: int) -> Sequence:
    return Sequence(
        key_of(abs(number)),
        (1,) * num_tokens,
        max_tokens=9,
        sampling=GREEDY,
        stop_token_ids=frozenset(),
        order=QueueOrder(0.0, number),
    )


def queue_of(*lengths: int) -> tuple[DecodeQueue, list[Sequence]]:
    """Ready sequences, the last in queue order first."""
    queue = DecodeQueue()
    sequences = [sequence_of(length, number=-number) for number, length in enumerate(lengths)]
    queue.make_ready(sequences)
    return queue, sequences


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_one_step_takes_all_ready_sequences_up_to_the_limit(most: int) -> None:
    queue, sequences = queue_of(5, 6, 7)
    taken = queue.take(1, max_sequences=most)
    assert taken == sequences[:most][::-1]
    assert queue.take(1, max_sequences=9) == sequences[most:][::-1]


def test_steps_share_the_cost() -> None:
    queue, sequences = queue_of(5, 5, 5, 5)
    assert queue.take(2, max_sequences=9) == sequences[1::-1]
    assert queue.take(2, max_sequences=9) == sequences[:1:-1]


def test_the_load_has_ready_sequences_and_those_in_flight() -> None:
    queue, sequences = queue_of(5, 6)
    assert queue.load == DecodeLoad(2, decodes_cost(2, 11))
    queue.take(2, max_sequences=1)
    assert queue.load == DecodeLoad(2, decodes_cost(2, 11))
    sequences[0]._tokens.append(1)
    queue.make_ready([sequences[0], sequence_of(3, number=7)])
    assert queue.load == DecodeLoad(3, decodes_cost(3, 15))
    queue.discard(sequences[1])
    queue.discard(sequences[1])
    assert queue.load == DecodeLoad(2, decodes_cost(2, 9))
    queue.clear()
    assert queue.load == DecodeLoad(0, 0)
