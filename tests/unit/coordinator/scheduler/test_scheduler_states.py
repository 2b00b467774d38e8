"""Sequences with recurrent states: one slot each, and prefix hits where a state was saved."""

from __future__ import annotations

import pytest

from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.sequence import SequenceState
from kvcache import StatePool
from tests.unit.coordinator.scheduler.pipeline_model import PipelineModel, key_of
from wire.steps import Prefill


def model_of(
    *,
    num_states: int = 8,
    num_blocks: int = 64,
    grid_tokens: int = 8,
    max_step_tokens: int = 64,
    prefix_caching: bool = True,
) -> PipelineModel:
    """A pipeline of two stages with blocks of 4 tokens."""
    limits = SchedulerLimits(max_step_tokens=max_step_tokens, max_step_sequences=16, max_steps_in_flight=4)
    model = PipelineModel(
        num_blocks=num_blocks,
        block_size=4,
        limits=limits,
        num_stages=2,
        num_states=num_states,
        grid_tokens=grid_tokens,
        prefix_caching=prefix_caching,
    )
    model.begin_epoch()
    return model


def states_of(model: PipelineModel) -> StatePool:
    ledger = model.kv._states
    assert ledger is not None
    return ledger.pool


def chunks_of(model: PipelineModel, number: int) -> list[tuple[int, int]]:
    """Begin and end of each chunk of request `number`."""
    steps = [
        part.inference_step
        for step in model.sent
        for part in step.slices
        if part.sequence == key_of(number) and isinstance(part.inference_step, Prefill)
    ]
    return [(step.start, step.start + step.num_tokens) for step in steps]


def test_a_prefill_stops_where_states_are_saved() -> None:
    model = model_of()
    model.submit(range(22), max_tokens=1)
    model.drain(max_steps=9)
    assert chunks_of(model, 0) == [(0, 8), (8, 16), (16, 20), (20, 22)]
    assert states_of(model).num_snapshots == 3
    model.check_all_ended()


def test_a_prefill_whose_states_are_not_saved_stops_nowhere() -> None:
    model = model_of(prefix_caching=False)
    model.submit(range(22), max_tokens=12)
    model.drain(max_steps=30)
    assert chunks_of(model, 0) == [(0, 22)]
    assert states_of(model).num_snapshots == 0
    model.check_all_ended()


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [
        (range(22), 20),  # the last block boundary before the last token of the same prompt
        (range(20), 16),  # the state after 20 tokens lacks the last token's logits
        ([*range(19), 99, 98], 16),
        ([*range(15), 99, 98], 8),  # 12 tokens are cached, the state was saved at 8
        ([*range(7), 99], 0),  # 4 tokens are cached, no state was saved
    ],
)
def test_a_prefix_hit_ends_at_the_snapshot_grid_and_nowhere_else(prompt: list[int], begin: int) -> None:
    model = model_of()
    model.submit(range(22), max_tokens=1)
    model.drain(max_steps=9)
    second = model.submit(list(prompt), max_tokens=3)
    model.drain(max_steps=19)
    assert chunks_of(model, 1)[0][0] == begin == second.num_cached_tokens
    model.check_all_ended()


def test_decodes_are_saved_on_the_grid() -> None:
    model = model_of(grid_tokens=8)
    first = model.submit(range(6), max_tokens=15)
    model.drain(max_steps=40)
    assert states_of(model).num_snapshots == 3, "at 4, 8 and 16"
    second = model.submit([*first.all_tokens, 5], max_tokens=2)
    model.drain(max_steps=20)
    assert second.num_cached_tokens == 16


def test_running_sequences_are_limited_by_the_states() -> None:
    model = model_of(num_states=2)
    for _ in range(4):
        model.submit([1, 2, 3], max_tokens=8)
        assert len(model.scheduler.running) <= 2
    model.drain(max_steps=80)
    model.check_all_ended()


def test_a_preempted_sequence_continues_from_its_last_snapshot() -> None:
    model = model_of(num_blocks=8, num_states=4, grid_tokens=4, max_step_tokens=16)
    for base in (10, 30):
        model.submit(range(base, base + 10), max_tokens=9)
    model.drain(max_steps=90)
    assert model.scheduler.counts.num_preemptions > 0
    restarts = [part for part in chunks_of(model, 1) if part[0] > 0]
    assert restarts, "it began at a snapshot"
    model.check_all_ended()


def test_a_failed_sequence_leaves_neither_state_nor_snapshot() -> None:
    model = model_of(grid_tokens=4)
    bad = model.submit(range(50, 61), max_tokens=2)
    model.error_at = lambda part: part.sequence == bad.key
    model.drain(max_steps=9)
    assert bad.state is SequenceState.FAILED
    assert (states_of(model).num_live, states_of(model).num_snapshots) == (0, 0)
    model.check_all_ended()


def test_a_new_epoch_begins_without_states() -> None:
    model = model_of(grid_tokens=4)
    model.submit(range(11), max_tokens=6)
    for _ in range(4):
        model.run_step()
    assert states_of(model).num_live == 1
    model.end_epoch()
    model.begin_epoch()
    assert [begin for begin, _ in chunks_of(model, 0)].count(0) == 2
    model.drain(max_steps=30)
    model.check_all_ended()


def test_a_snapshot_evicted_in_the_same_step_is_no_hit() -> None:
    model = model_of(num_states=3, grid_tokens=1024)
    for begin in (10, 30):
        model.submit(range(begin, begin + 9), max_tokens=1)
        model.drain(max_steps=9)
    assert states_of(model).num_snapshots == 2
    model.submit(range(50, 59), max_tokens=1)
    evicted = model.submit(range(10, 19), max_tokens=1)
    model.drain(max_steps=30)
    assert evicted.num_cached_tokens == 0
    model.check_all_ended()


def test_a_hit_does_not_wait_where_another_sequence_would_start() -> None:
    """The only snapshot has the last slot: it makes room for the state of whatever begins next."""
    for prompt in (range(10, 19), range(50, 59)):
        model = model_of(num_states=2, grid_tokens=1024)
        model.submit(range(10, 19), max_tokens=1)
        model.drain(max_steps=9)
        running = model.submit([1, 2, 3], max_tokens=8)
        model.run_step()
        assert (states_of(model).num_live, states_of(model).num_snapshots) == (1, 1)
        second = model.submit(prompt, max_tokens=6)
        model.run_step()
        assert model.scheduler.running == (running, second)
        assert second.num_cached_tokens == 0
        model.drain(max_steps=30)
        model.check_all_ended()
