"""A key that comes again starts above every restart count of its past."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler import scheduler, sequence
from coordinator.scheduler.cost_model import StepCost, cost_of_step
from coordinator.scheduler.in_flight import ResultMismatch, StepsInFlight
from coordinator.scheduler.kv_manager import KvCacheManager, KvGroup
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.scheduler import Scheduler
from coordinator.scheduler.sequence import FinishReason, Priority, SequenceState, UsedRestartCounts
from kvcache.sequence import KvWindow
from stage_worker import validation
from stageline_rpc.internal.v1 import step_pb2
from tests.unit.coordinator.scheduler.pipeline_model import PipelineModel, key_of, solo_run
from wire.errors import GrammarFailed, ServingError, SliceFailed
from wire.ids import SequenceKey, new_request_id
from wire.steps import (
    Decode,
    EndRecord,
    Prefill,
    SliceError,
    SliceResult,
    Step,
    StepResult,
    StepSlice,
    TokenLogprobs,
)


def test_restart_counts_exceed_those_of_a_stage_within_four_megabytes() -> None:
    assert sequence.MAX_REMEMBERED > validation.ENDED_REMEMBERED
    assert sequence.MAX_REMEMBERED * 270 < 4e6


def key() -> SequenceKey:
    return SequenceKey(new_request_id(), 0)


def test_a_new_key_starts_at_restart_count_0() -> None:
    assert UsedRestartCounts().first_unused(key()) == 0


def test_a_key_starts_above_the_last_restart_count_of_its_predecessor() -> None:
    used, one, other = UsedRestartCounts(), key(), key()
    used.record_end(one, 2)
    assert (used.first_unused(one), used.first_unused(other)) == (3, 0)


def test_restart_counts_are_reset_by_another_epoch() -> None:
    used, one = UsedRestartCounts(), key()
    used.record_end(one, 2)
    used.clear()
    assert used.first_unused(one) == 0


def test_restart_counts_are_bounded_evicting_the_first_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MAX_REMEMBERED", 2)
    used, first, second, third = UsedRestartCounts(), key(), key(), key()
    for sequence_key in (first, second, first, third):
        used.record_end(sequence_key, used.first_unused(sequence_key))
    assert [used.first_unused(sequence_key) for sequence_key in (first, second, third)] == [2, 0, 1]


def model_of(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_step_tokens: int = 16,
    max_step_sequences: int = 16,
    max_steps_in_flight: int = 1,
    num_stages: int = 1,
    prefix_caching: bool = True,
) -> PipelineModel:
    """A pipeline that serves."""
    limits = SchedulerLimits(
        max_step_tokens=max_step_tokens,
        max_step_sequences=max_step_sequences,
        max_steps_in_flight=max_steps_in_flight,
    )
    model = PipelineModel(
        num_blocks=num_blocks,
        block_size=block_size,
        limits=limits,
        num_stages=num_stages,
        prefix_caching=prefix_caching,
    )
    model.begin_epoch()
    return model


def decodes_of(step: Step) -> list[int]:
    """Numbers of the requests that this step decodes."""
    return [
        int.from_bytes(part.sequence.request_id, "big")
        for part in step.slices
        if isinstance(part.inference_step, Decode)
    ]


def chunks_of(model: PipelineModel, number: int) -> list[Prefill]:
    """The chunks of request `number` that were sent, in order."""
    return [
        part.inference_step
        for step in model.sent
        for part in step.slices
        if part.sequence == key_of(number) and isinstance(part.inference_step, Prefill)
    ]


# Chunks


def test_a_long_prompt_goes_out_in_chunks_that_do_not_wait_for_each_other() -> None:
    model = model_of(max_step_tokens=10, max_steps_in_flight=3)
    model.submit(range(23), max_tokens=1)
    assert chunks_of(model, 0) == [Prefill(0, 8, 23), Prefill(8, 8, 23), Prefill(16, 7, 23)]
    assert model.scheduler.num_steps_in_flight == 3
    assert [len(step.starts) for step in model.sent] == [1, 0, 0]
    model.drain(max_steps=2)
    model.check_all_ended()


@pytest.mark.parametrize(
    ("num_tokens", "sizes"), [(1, [1]), (7, [7]), (8, [8]), (9, [8, 1]), (16, [8, 8]), (17, [8, 8, 1])]
)
def test_only_the_last_chunk_may_end_inside_a_block(num_tokens: int, sizes: list[int]) -> None:
    model = model_of(max_step_tokens=8)
    model.submit(range(num_tokens), max_tokens=1)
    model.drain(max_steps=5)
    assert [chunk.num_tokens for chunk in chunks_of(model, 0)] == sizes
    assert [chunk.is_final for chunk in chunks_of(model, 0)] == [False] * (len(sizes) - 1) + [True]


def test_short_prompts_share_a_step() -> None:
    model = model_of(max_step_tokens=16)
    model.scheduler.end_epoch()
    for number in range(5):
        model.submit([number] * 4, max_tokens=1)
    model.begin_epoch()
    assert [len(step.slices) for step in model.sent] == [4]
    assert len(model.sent[0].starts) == 4
    model.drain(max_steps=4)
    model.check_all_ended()


def test_a_step_has_no_more_sequences_than_allowed() -> None:
    model = model_of(max_step_sequences=3)
    model.scheduler.end_epoch()
    for number in range(5):
        model.submit([number], max_tokens=3)
    model.begin_epoch()
    assert len(model.sent[0].slices) == 3
    model.drain(max_steps=20)
    assert all(len(step.slices) <= 3 for step in model.sent)


def test_a_step_starts_no_more_sequences_than_one_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_RECORD_BYTES", 30)
    model = model_of()
    model.scheduler.end_epoch()
    for number in range(4):
        model.submit([number] * 4, max_tokens=1)
    model.begin_epoch()
    model.drain(max_steps=8)
    assert [len(step.starts) for step in model.sent if step.starts] == [2, 2]
    model.check_all_ended()


# Prefix hits


def test_a_prefix_hit_advances_the_start() -> None:
    model = model_of()
    prompt = list(range(11))
    model.submit(prompt, max_tokens=1)
    model.drain(max_steps=2)
    again = model.submit([*prompt[:9], 50], max_tokens=1)
    assert chunks_of(model, 1) == [Prefill(8, 2, 10)]
    assert again.num_cached_tokens == 8
    model.drain(max_steps=2)
    model.check_all_ended()


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    model = model_of()
    for _ in range(2):
        sequence = model.submit(range(8), max_tokens=2)
        model.drain(max_steps=4)
    assert chunks_of(model, 1) == [Prefill(7, 1, 8)]
    assert sequence.num_cached_tokens == 7
    model.check_all_ended()


def test_a_prompt_is_shared_as_soon_as_the_step_that_computes_it_is_ahead() -> None:
    """The owner is still in flight, in the same step even."""
    model = model_of(max_steps_in_flight=2)
    model.scheduler.end_epoch()
    for _ in range(2):
        model.submit(range(9), max_tokens=3)
    model.begin_epoch()
    assert len(model.sent) == 1
    assert chunks_of(model, 0) == [Prefill(0, 9, 9)]
    assert chunks_of(model, 1) == [Prefill(8, 1, 9)]
    assert model.kv.num_active == 2 + 2
    model.drain(max_steps=10)
    model.check_all_ended()


def test_without_prefix_caching_nothing_is_shared() -> None:
    model = model_of(prefix_caching=False)
    for _ in range(2):
        sequence = model.submit(range(9), max_tokens=3)
        model.drain(max_steps=5)
    assert chunks_of(model, 1) == [Prefill(0, 9, 9)]
    assert sequence.num_cached_tokens == 0
    model.check_all_ended()


def test_a_hit_is_held_from_the_moment_it_counts() -> None:
    """Between admission and first chunk, decodes of others would evict what the start relies on."""
    model = model_of(num_blocks=4, max_step_tokens=4)
    model.submit([1, 1, 1, 1, 1], max_tokens=1)
    model.drain(max_steps=3)
    assert model.kv.num_inactive == 1
    model.submit([2], max_tokens=14)
    model.run_step()
    # One decode in each step leaves room for 3 tokens, which is less than a block.
    late = model.submit([1, 1, 1, 1, 3, 3, 3, 3], max_tokens=1)
    model.drain(max_steps=20)
    assert late.num_cached_tokens == 0
    assert chunks_of(model, 2)[0].start == 0
    model.check_all_ended()


# Admission and preemption


def test_no_request_overtakes_the_head_of_the_queue() -> None:
    model = model_of(num_blocks=4)
    model.submit(range(9), max_tokens=3)
    long, short = model.submit(range(100, 109), max_tokens=1), model.submit([1], max_tokens=1)
    model.run_step()
    assert model.kv.num_free == 1
    assert model.scheduler.queue == (long, short)
    model.drain(max_steps=20)
    model.check_all_ended()


def test_an_admission_leaves_the_watermark_to_running_sequences() -> None:
    model = model_of(num_blocks=200, max_step_tokens=1000, max_steps_in_flight=9)
    model.submit([1], max_tokens=5)
    model.submit(range(4 * 196), max_tokens=1)
    waiting = model.submit(range(1000, 1008), max_tokens=1)
    assert (model.scheduler.queue, model.kv.num_free) == ((waiting,), 3)
    model.drain(max_steps=20)
    model.check_all_ended()


def test_alone_a_request_may_take_the_whole_pool() -> None:
    model = model_of(num_blocks=200, max_step_tokens=1000, max_steps_in_flight=7)
    model.submit(range(4 * 200 - 1), max_tokens=1)
    assert model.kv.num_free == 0
    model.drain(max_steps=5)
    model.check_all_ended()


def test_the_last_to_arrive_is_preempted_and_is_the_first_to_return() -> None:
    model = model_of(num_blocks=4, max_step_tokens=12)
    model.scheduler.end_epoch()
    sequences = [model.submit([number] * 4, max_tokens=9) for number in range(3)]
    model.begin_epoch()
    while not any(sequence.state is SequenceState.PREEMPTED for sequence in sequences):
        assert model.run_step()
    assert [sequence.restart_count for sequence in sequences] == [0, 0, 1]
    assert model.scheduler.queue[0] is sequences[2]
    ends = [end for end in model.sent[-1].ends if end.sequence == sequences[2].key]
    assert ends == [EndRecord(sequences[2].key, 0)]
    # The older ones go on in the very step that preempts the youngest.
    assert decodes_of(model.sent[-1]) == [0, 1]
    model.drain(max_steps=60)
    model.check_all_ended()


def test_the_result_of_an_earlier_start_is_discarded() -> None:
    model = model_of(num_blocks=3, max_steps_in_flight=2)
    model.scheduler.end_epoch()
    first, second = (model.submit([number] * 4, max_tokens=8) for number in range(2))
    model.begin_epoch()
    while second.restart_count == 0:
        assert model.run_step()
    generated = second.generated_tokens
    in_flight = [part for step in model.queues[0] for part in step.slices if part.sequence == second.key]
    assert [part.restart_count for part in in_flight if part.is_sampled][:1] in ([0], [])
    model.drain(max_steps=60)
    assert second.generated_tokens[: len(generated)] == generated
    assert first.restart_count == 0
    model.check_all_ended()


def test_a_client_that_fills_the_queue_waits_for_its_own_requests_and_others_do_not() -> None:
    model = model_of(num_blocks=4)
    flood = [model.submit([number] * 4, max_tokens=4, client="flood") for number in range(8)]
    quiet = model.submit([9] * 4, max_tokens=4, client="quiet")
    assert model.scheduler.queue[-1] is quiet
    while quiet.state is SequenceState.WAITING:
        assert model.run_step()
    assert sum(sequence.state is SequenceState.WAITING for sequence in flood) == 6
    model.drain(max_steps=100)
    model.check_all_ended()


def begun(model: PipelineModel) -> list[list[int]]:
    """Numbers of the requests with a chunk in each step that was sent."""
    return [
        [int.from_bytes(chunk.sequence.request_id, "big") for chunk in step.chunks]
        for step in model.sent
        if step.chunks
    ]


def test_a_shorter_prompt_of_another_client_alternates_with_a_long_one() -> None:
    model = model_of(max_step_tokens=16)
    model.submit(range(100, 180), max_tokens=1, client="long")
    model.submit(range(36), max_tokens=1, client="short")
    model.drain(max_steps=12)
    assert begun(model) == [[0], [1], [0], [1], [0], [1, 0], [0], [0]]
    model.check_all_ended()


def test_prompts_alternate_where_a_window_is_much_shorter_than_the_long_one() -> None:
    """The long one needs blocks for its window and a chunk there, not for all its tokens."""
    window = KvWindow(8, 16)
    group = KvGroup(8 * window.num_blocks(4), window)
    limits = SchedulerLimits(max_step_tokens=16, max_step_sequences=4, max_steps_in_flight=1)
    model = PipelineModel(num_blocks=400, block_size=4, limits=limits, other_groups=(group,))
    model.begin_epoch()
    model.submit(range(100, 500), max_tokens=1, client="long")
    model.submit(range(36), max_tokens=1, client="short")
    model.drain(max_steps=60)
    assert [number for number, chunks in enumerate(begun(model)) if 1 in chunks] == [1, 3, 5]


@pytest.mark.parametrize(
    ("client", "num_tokens", "priority"),
    [("long", 8, Priority.NORMAL), ("short", 65, Priority.NORMAL), ("short", 8, Priority.LOW)],
)
def test_other_prompts_wait_for_the_end_of_a_long_one(
    client: str, num_tokens: int, priority: Priority
) -> None:
    model = model_of(max_step_tokens=16)
    model.submit(range(100, 180), max_tokens=1, client="long")
    model.submit(range(num_tokens), max_tokens=1, client=client, priority=priority)
    model.drain(max_steps=14)
    assert begun(model)[:5] == [[0]] * 5
    model.check_all_ended()


def test_a_prompt_is_not_admitted_where_the_rest_of_a_long_one_has_its_blocks() -> None:
    model = model_of(num_blocks=21, block_size=4, max_step_tokens=16)
    model.submit(range(100, 180), max_tokens=1, client="long")
    model.submit(range(8), max_tokens=1, client="short")
    model.drain(max_steps=12)
    assert begun(model) == [[0], [0], [0], [0], [0], [1]]
    model.check_all_ended()


def test_many_short_prompts_leave_a_long_one_every_second_step() -> None:
    model = model_of(max_step_tokens=16)
    model.submit(range(100, 180), max_tokens=1, client="long")
    for number in range(8):
        model.submit(range(200 + 16 * number, 216 + 16 * number), max_tokens=1, client=f"short {number}")
    model.drain(max_steps=20)
    firsts = [numbers[0] for numbers in begun(model)]
    assert [number == 0 for number in firsts[:8]] == [True, False] * 3 + [True, True]
    model.check_all_ended()


def test_the_client_with_the_most_running_is_preempted() -> None:
    model = model_of(num_blocks=6, max_step_tokens=12)
    model.scheduler.end_epoch()
    flood = [model.submit([number] * 4, max_tokens=9, client="flood") for number in range(3)]
    quiet = model.submit([9] * 4, max_tokens=9, client="quiet")
    model.begin_epoch()
    while not any(sequence.state is SequenceState.PREEMPTED for sequence in (*flood, quiet)):
        assert model.run_step()
    assert [sequence.state for sequence in flood].count(SequenceState.PREEMPTED) == 1
    model.drain(max_steps=100)
    assert quiet.restart_count == 0
    model.check_all_ended()


def test_a_client_with_more_running_is_preempted_after_lower_priorities() -> None:
    model = model_of(num_blocks=6, max_step_tokens=12)
    model.scheduler.end_epoch()
    high = [
        model.submit([number] * 4, max_tokens=9, client="busy", priority=Priority.HIGH) for number in range(2)
    ]
    low = model.submit([9] * 4, max_tokens=9, client="idle", priority=Priority.LOW)
    model.begin_epoch()
    while not any(sequence.state is SequenceState.PREEMPTED for sequence in (*high, low)):
        assert model.run_step()
    assert low.state is SequenceState.PREEMPTED
    model.drain(max_steps=100)
    assert [sequence.restart_count for sequence in high] == [0, 0]
    model.check_all_ended()


# Sharing out


@pytest.mark.parametrize(("num_requests", "in_flight"), [(8, 4), (7, 4), (4, 4), (3, 4), (16, 5), (5, 1)])
def test_sequences_that_arrived_together_spread_out_over_the_steps(num_requests: int, in_flight: int) -> None:
    model = model_of(max_steps_in_flight=in_flight, num_stages=1, max_step_tokens=64)
    model.scheduler.end_epoch()
    for number in range(num_requests):
        model.submit([number], max_tokens=30)
    model.begin_epoch()
    assert len(model.sent[0].slices) == num_requests
    for _ in range(3 * in_flight):
        model.run_step()
    newest = [len(decodes_of(step)) for step in model.sent[-in_flight:]]
    assert max(newest) <= -(-num_requests // in_flight)
    assert max(newest) - min(newest) <= 1
    assert model.scheduler.num_steps_in_flight == min(num_requests, in_flight)
    seen = sorted(number for step in list(model.queues[0]) for number in decodes_of(step))
    assert seen == list(range(num_requests))
    model.drain(max_steps=60 * in_flight)
    model.check_all_ended()


def test_decodes_continue_while_a_long_prompt_is_computed() -> None:
    model = model_of(max_step_tokens=8, max_steps_in_flight=2)
    model.submit([1], max_tokens=20)
    model.run_step()
    model.submit(range(40), max_tokens=1)
    before = len(model.sent)
    while len(chunks_of(model, 1)) < 5:
        assert model.run_step()
    assert sum(len(decodes_of(step)) for step in model.sent[before:]) >= 2
    model.drain(max_steps=80)
    model.check_all_ended()


# Ends


def test_a_cancel_takes_effect_in_the_next_step() -> None:
    model = model_of(max_steps_in_flight=2)
    sequence = model.submit(range(9), max_tokens=9)
    assert model.scheduler.num_steps_in_flight == 1
    model.cancel(sequence.key)
    records_only = model.sent[-1]
    assert (records_only.step_id, records_only.slices) == (1, ())
    assert records_only.ends == (EndRecord(sequence.key, 0),)
    assert len(records_only.signals) == 3
    assert model.kv.num_active == 0
    # The step that was sent before is computed all the same, and its result means nothing.
    assert model.run_step()
    assert model.run_step()
    assert sequence.generated_tokens == ()
    model.check_all_ended()


def test_a_cancel_in_the_queue_sends_nothing() -> None:
    model = model_of(num_blocks=3)
    model.submit(range(9), max_tokens=1)
    waiting = model.submit(range(9), max_tokens=1)
    num_steps = model.num_steps
    model.cancel(waiting.key)
    assert model.num_steps == num_steps
    assert model.scheduler.queue == ()


@pytest.mark.parametrize("max_step_tokens", [5, 6, 9])
def test_decodes_that_could_fill_every_step_leave_a_block_for_prompts(max_step_tokens: int) -> None:
    model = model_of(num_blocks=128, max_step_tokens=max_step_tokens)
    decoding = [model.submit([number], max_tokens=40) for number in range(12)]
    while any(sequence.state is not SequenceState.DECODE for sequence in decoding):
        assert model.run_step()
    late = model.submit(range(20, 30), max_tokens=1)
    while late.state.is_live:
        assert model.run_step()
    assert all(sequence.state is SequenceState.DECODE for sequence in decoding)
    model.drain(max_steps=1000)


def test_a_cancel_waits_for_room_in_the_pipeline() -> None:
    model = model_of(max_steps_in_flight=1)
    sequence = model.submit(range(9), max_tokens=9)
    model.cancel(sequence.key)
    assert model.num_steps == 1
    model.run_step()
    assert model.sent[-1].ends == (EndRecord(sequence.key, 0),)


def test_a_finished_sequence_is_ended_in_the_next_step() -> None:
    model = model_of()
    sequence = model.submit([1, 2], max_tokens=1)
    model.run_step()
    assert sequence.state is SequenceState.FINISHED
    assert model.sent[-1].ends == (EndRecord(sequence.key, 0),)
    assert model.sent[-1].slices == ()


def test_no_step_is_sent_without_work() -> None:
    model = model_of()
    assert model.scheduler.next_step(0.0) is None
    model.submit([1], max_tokens=1)
    model.drain(max_steps=3)
    assert model.scheduler.next_step(0.0) is None


@pytest.mark.parametrize("max_steps_in_flight", [1, 3])
def test_late_tokens_arrive_with_later_results(max_steps_in_flight: int) -> None:
    model = model_of(max_steps_in_flight=max_steps_in_flight)
    late = model.submit([1, 2], max_tokens=3)
    model.late_at = lambda part: part.sequence == late.key
    model.submit([3, 4], max_tokens=12)
    model.drain(max_steps=40)
    model.check_all_ended()


def test_a_late_token_is_asked_for_while_no_step_is_in_flight() -> None:
    model = model_of()
    late = model.submit([1, 2], max_tokens=2)
    model.late_at = lambda part: True
    model.run_step()
    assert (late.num_generated_tokens, model.sent[-1].num_slices) == (0, 0)
    assert model.scheduler.num_steps_in_flight == 1
    assert model.scheduler.next_step(0.0) is None, "one question is enough"
    model.run_step()
    assert late.num_generated_tokens == 1
    model.drain(max_steps=4)
    model.check_all_ended()


def test_the_wait_for_a_mask_does_not_lengthen_the_timeout_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAST waits 10 ms for a mask where nothing is computed: steps would seem slower than planned."""
    learnt: list[int] = []
    monkeypatch.setattr(
        StepsInFlight, "record_result", lambda self, done, _: learnt.append(done.sent.step.num_slices)
    )
    model = model_of()
    late = model.submit([1, 2], max_tokens=2)
    model.late_at = lambda part: True
    model.run_step()
    model.run_step()
    assert late.num_generated_tokens == 1
    assert learnt == [1]


def test_a_late_row_does_not_hold_the_others_of_its_step() -> None:
    model = model_of()
    model.scheduler.end_epoch()
    late, mate = model.submit([1, 2], max_tokens=4), model.submit([3, 4], max_tokens=4)
    model.begin_epoch()
    model.late_at = lambda part: part.sequence == late.key
    model.run_step()
    assert (late.num_generated_tokens, mate.num_generated_tokens) == (0, 1)
    assert decodes_of(model.sent[-1]) == [1]
    model.drain(max_steps=20)
    model.check_all_ended()


def test_a_late_error_fails_its_sequence_alone() -> None:
    model = model_of()
    bad, good = model.submit([1, 2], max_tokens=4), model.submit([3, 4], max_tokens=4)
    model.late_at = model.error_at = lambda part: part.sequence == bad.key
    model.drain(max_steps=20)
    assert (bad.state, good.state) == (SequenceState.FAILED, SequenceState.FINISHED)
    model.check_all_ended()


def test_a_sequence_with_a_late_token_is_unfinished() -> None:
    """It is a suspect if its worker is lost."""
    model = model_of()
    late = model.submit([1, 2], max_tokens=4)
    model.late_at = lambda part: True
    model.run_step()
    assert model.scheduler.unfinished == [late]
    model.drain(max_steps=20)
    assert model.scheduler.unfinished == []


def test_the_late_token_of_an_earlier_start_is_discarded() -> None:
    model = model_of()
    late = model.submit([1, 2], max_tokens=4, client="late")
    other = model.submit([3, 4], max_tokens=4)
    model.late_at = lambda part: part.sequence == late.key
    model.run_step()
    model.scheduler._requeue(late)
    model.drain(max_steps=30)
    assert late.num_restarts == 1
    assert other.state is SequenceState.FINISHED
    model.check_all_ended()


def test_the_late_row_of_an_earlier_start_is_not_that_of_this_one() -> None:
    model = model_of()
    late = model.submit([1, 2], max_tokens=4)
    model.late_at = lambda part: True
    model.run_step()
    model.scheduler._requeue(late)
    model.run_step()
    model.run_step()
    model.advance(0)
    model.results[0] = replace(model.results[0], late_rows=(SliceResult(late.key, 0, 9),))
    model.deliver()
    assert (late.restart_count, late.num_generated_tokens) == (1, 0)


def test_a_cancelled_sequence_asks_for_no_late_token() -> None:
    model = model_of()
    late = model.submit([1, 2], max_tokens=4)
    model.late_at = lambda part: True
    model.run_step()
    model.cancel(late.key)
    model.drain(max_steps=3)
    model.check_all_ended()
    assert model.scheduler.next_step(0.0) is None


def test_a_late_row_without_a_token_to_come_is_rejected() -> None:
    steps, one = StepsInFlight(DEFAULT_POLICY), key()
    scored = StepSlice(one, 0, (1, 2), Prefill(0, 2, 4, is_scored=True))
    steps.add(Step.of((scored,), epoch=1, step_id=0), StepCost(), 0.0)
    scores = (TokenLogprobs(1, -0.5, 1, ()),)
    row = SliceResult(one, 0, None, prompt_logprobs=scores, is_late=True)
    with pytest.raises(ResultMismatch, match="is late, and has no token"):
        steps.take(StepResult.of(1, 0, [row]), 0.0)


def test_a_slice_error_fails_one_request_and_leaves_none_of_its_blocks_behind() -> None:
    model = model_of(max_step_tokens=32)
    model.scheduler.end_epoch()
    good, bad = model.submit(range(8), max_tokens=2), model.submit(range(50, 59), max_tokens=2)
    model.begin_epoch()
    model.error_at = lambda part: part.sequence == bad.key
    model.drain(max_steps=6)
    assert (good.state, bad.state) == (SequenceState.FINISHED, SequenceState.FAILED)
    assert model.kv.num_inactive == 2
    model.check_all_ended()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (step_pb2.SliceError.KIND_NON_FINITE_LOGITS, SliceFailed),
        (step_pb2.SliceError.KIND_SAMPLER, SliceFailed),
        (step_pb2.SliceError.KIND_GRAMMAR, GrammarFailed),
    ],
)
def test_a_failed_request_has_stage_and_reason(kind: int, error: type[ServingError]) -> None:
    model = model_of()
    sequence = model.submit([1], max_tokens=1)
    outcome = SliceError(kind, 3, "logits are not finite")
    (progress,) = model.scheduler.complete(StepResult.of(1, 0, (SliceResult(sequence.key, 0, outcome),)), 0.0)
    assert type(progress.error) is error
    assert str(progress.error) == "stage 3, step 0: logits are not finite"
    assert (progress.token, progress.finish_reason) == (None, None)


# Results


@pytest.mark.parametrize(
    ("epoch", "step_id", "keys", "restart_count"),
    [
        (2, 0, [0, 1], 0),
        (1, 1, [0, 1], 0),
        (1, 0, [0], 0),
        (1, 0, [], 0),
        (1, 0, [1, 0], 0),
        (1, 0, [0, 1, 1], 0),
        (1, 0, [0, 2], 0),
        (1, 0, [0, 1], 1),
    ],
    ids=["epoch", "step", "too few", "none", "order", "too many", "another sequence", "restart_count"],
)
def test_a_result_that_does_not_fit_is_rejected_and_changes_nothing(
    epoch: int, step_id: int, keys: list[int], restart_count: int
) -> None:
    model = model_of()
    model.scheduler.end_epoch()
    sequences = [model.submit([number], max_tokens=2) for number in range(2)]
    scheduler = model.scheduler
    scheduler.begin_epoch(1 + scheduler._epoch, KvCacheManager(num_blocks=8, block_size=4), model.limits)
    step = scheduler.next_step(0.0)
    assert step is not None
    wrong_epoch = epoch - 1 + step.epoch
    results = tuple(SliceResult(key_of(number), restart_count, 5) for number in keys)
    with pytest.raises(ResultMismatch):
        scheduler.complete(StepResult.of(wrong_epoch, step_id, results), 0.0)
    assert scheduler.num_steps_in_flight == 1
    assert all(sequence.generated_tokens == () for sequence in sequences)
    right = tuple(SliceResult(key_of(number), 0, 5) for number in range(2))
    assert [update.token for update in scheduler.complete(StepResult.of(step.epoch, 0, right), 0.0)] == [5, 5]


def test_a_token_with_unrequested_log_probabilities_is_rejected() -> None:
    model = model_of()
    sequence = model.submit([1], max_tokens=1)
    result = SliceResult(sequence.key, 0, 5, TokenLogprobs(5, -1.0, 1))
    with pytest.raises(ResultMismatch, match="unexpected log-probabilities"):
        model.scheduler.complete(StepResult.of(1, 0, (result,)), 0.0)
    assert sequence.generated_tokens == ()


def test_a_result_without_a_step_is_rejected() -> None:
    model = model_of()
    with pytest.raises(ResultMismatch, match="expected no result"):
        model.scheduler.complete(StepResult.of(1, 0, ()), 0.0)


def test_a_chunk_before_the_final_one_gets_no_token() -> None:
    model = model_of(max_step_tokens=4)
    model.submit(range(8), max_tokens=1)
    with pytest.raises(ResultMismatch, match="got 1 results, expected 0"):
        model.scheduler.complete(StepResult.of(1, 0, (SliceResult(key_of(0), 0, 5),)), 0.0)
    assert model.scheduler.complete(StepResult.of(1, 0, ()), 0.0) == []


# Epochs


def test_a_new_epoch_starts_from_the_tokens_so_far() -> None:
    model = model_of(max_steps_in_flight=3)
    sequence = model.submit(range(6), max_tokens=6)
    for _ in range(3):
        model.run_step()
    num_generated = sequence.num_generated_tokens
    assert num_generated == 3
    model.end_epoch()
    assert sequence.state is SequenceState.PREEMPTED
    assert model.scheduler.next_step(0.0) is None
    model.begin_epoch()
    step = model.sent[-1]
    assert (step.epoch, step.step_id) == (2, 0)
    assert step.starts[0].tokens == sequence.all_tokens
    assert step.starts[0].num_prompt_tokens == 6
    assert step.slices[0].inference_step == Prefill(0, 9, 9)
    model.drain(max_steps=10)
    model.check_all_ended()
    assert list(sequence.generated_tokens) == solo_run(range(6), 6, frozenset())[0]


def test_a_new_epoch_serves_the_oldest_first() -> None:
    model = model_of(num_blocks=3)
    sequences = [model.submit([number] * 8, max_tokens=2) for number in range(3)]
    model.end_epoch()
    assert model.scheduler.queue == tuple(sequences)
    model.begin_epoch()
    assert [part.sequence for part in model.sent[-1].slices] == [sequences[0].key]


def test_an_epoch_number_is_used_once() -> None:
    model = model_of()
    model.end_epoch()
    with pytest.raises(ValueError, match="epoch 1 does not follow epoch 1"):
        model.scheduler.begin_epoch(1, KvCacheManager(num_blocks=1, block_size=1), model.limits)


def test_the_sequences_of_a_step_are_its_computed_ones() -> None:
    model = model_of(max_steps_in_flight=2, max_step_tokens=4)
    first, second = model.submit(range(8), max_tokens=2), model.submit([9], max_tokens=2)
    scheduler = model.scheduler
    assert scheduler.sequences_in_step(0) == [first]
    assert scheduler.sequences_in_step(1) == [first]
    assert scheduler.sequences_in_step(2) == []
    assert second not in scheduler.sequences_in_step(0)
    model.cancel(first.key)
    assert scheduler.sequences_in_step(0) == []


def test_a_restarted_sequence_is_not_part_of_its_old_step() -> None:
    """A faulty step fails its requests, but not those that were preempted since."""
    model = model_of(num_blocks=4, max_step_tokens=8, max_steps_in_flight=2)
    model.scheduler.end_epoch()
    first, second = model.submit(range(7), max_tokens=9), model.submit(range(20, 27), max_tokens=2)
    model.begin_epoch()
    model.run_step()
    model.run_step()
    with_second = [step for step in model.sent if second.key in {part.sequence for part in step.slices}]
    assert [part.restart_count for part in with_second[-1].slices] == [0]
    assert second in model.scheduler.sequences_in_step(with_second[-1].step_id)
    release = second.preempt()
    assert release.end is not None
    assert second not in model.scheduler.sequences_in_step(with_second[-1].step_id)
    assert first.restart_count == 0


@pytest.mark.parametrize("name", ["max_step_tokens", "max_step_sequences", "max_steps_in_flight"])
def test_limits_below_one_are_rejected(name: str) -> None:
    values = {"max_step_tokens": 1, "max_step_sequences": 1, "max_steps_in_flight": 1, name: 0}
    with pytest.raises(ValueError, match=rf"{name} is 0, must be in \[1, inf\)"):
        SchedulerLimits(**values)


def test_a_step_that_holds_less_than_a_block_is_rejected() -> None:
    """A long prompt could never begin."""
    limits = SchedulerLimits(max_step_tokens=3, max_step_sequences=1, max_steps_in_flight=1)
    with pytest.raises(ValueError, match="max_step_tokens 3 is less than one block of 4 tokens"):
        Scheduler(DEFAULT_POLICY).begin_epoch(1, KvCacheManager(num_blocks=8, block_size=4), limits)


def test_finish_reasons_reach_the_caller() -> None:
    model = model_of()
    prompt = [1, 2, 3]
    generated, _ = solo_run(prompt, 8, frozenset())
    stop = generated[2]
    sequence = model.submit(prompt, max_tokens=8, stop_token_ids=frozenset({stop}))
    model.drain(max_steps=12)
    assert sequence.generated_tokens[-1] == stop
    assert solo_run(prompt, 8, frozenset({stop}))[1] is FinishReason.STOP
    model.check_all_ended()


# Lending an idle epoch to the self-check


def test_an_epoch_is_lent_only_while_idle() -> None:
    model = model_of()
    model.submit([1, 2], max_tokens=1)
    assert model.scheduler.lend_epoch() is None, "a sequence waits"
    model.pump()
    assert model.scheduler.lend_epoch() is None, "a step is in flight"
    model.drain(max_steps=3)
    assert model.scheduler.lend_epoch() == (model.kv, len(model.sent))
    assert model.scheduler.lend_epoch() is None, "it is lent already"


def test_requests_wait_while_an_epoch_is_lent_and_run_after_it() -> None:
    model = model_of()
    lent = model.scheduler.lend_epoch()
    assert lent is not None
    model.submit([1, 2], max_tokens=1)
    assert model.scheduler.next_step(0.0) is None
    model.scheduler.reclaim_epoch(next_step_id=lent[1] + 7)
    step = model.scheduler.next_step(0.0)
    assert step is not None and step.step_id == 7


def test_a_step_of_a_lent_epoch_is_overdue_like_any_other() -> None:
    lent = model_of().scheduler
    assert lent.lend_epoch() is not None
    for step_id in range(2):
        lent.add_lent_step(Step(epoch=1, step_id=step_id), 5.0)
    assert lent.overdue_step(14.0, unknown_s=10.0) is None
    lent.record_lent_result(14.0)
    assert lent.overdue_step(23.0, unknown_s=10.0) is None, "it counts from the answer before"
    overdue = lent.overdue_step(24.5, unknown_s=10.0)
    assert overdue is not None
    assert (overdue.step.step_id, overdue.waited_s, overdue.limit_s) == (1, 10.5, 10.0)
    lent.record_lent_result(24.5)
    assert lent.overdue_step(100.0, unknown_s=10.0) is None
    lent.reclaim_epoch(next_step_id=2)


def test_the_cost_of_a_step_equals_the_cost_its_builder_counted() -> None:
    model = model_of()
    for length in (1, 5, 9, 20):
        model.submit(list(range(length)), max_tokens=4)
    works = []
    while not model.is_done:
        model.pump()
        works += [
            (in_flight.cost, cost_of_step(in_flight.step)) for in_flight in model.scheduler._in_flight._steps
        ]
        model.run_step()
    assert all(counted == stored for counted, stored in works)
    assert any(stored.decode_cost and stored.chunk_pairs for _, stored in works)


def test_the_end_of_an_epoch_ends_the_loan() -> None:
    model = model_of()
    assert model.scheduler.lend_epoch() is not None
    model.end_epoch()
    assert model.scheduler.lend_epoch() is None
    model.begin_epoch()
    assert model.scheduler.lend_epoch() is not None
