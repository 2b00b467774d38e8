"""Steps, results and requests for observability tests."""

from __future__ import annotations

from collections import abc

from coordinator.engine.output_buffer import OutputBuffer
from coordinator.engine.request import Choice, Request
from coordinator.scheduler.sequence import QueueOrder, Sequence
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import Decode, Prefill, StageTime, StartRecord, Step, StepResult, StepSlice


def new_request(*, num_prompt_tokens: int = 4, max_tokens: int = 8, num_choices: int = 1) -> Request:
    request_id = new_request_id()
    sequences = [
        Sequence(
            SequenceKey(request_id, choice),
            tuple(range(1, num_prompt_tokens + 1)),
            max_tokens=max_tokens,
            sampling=StepSampling(),
            stop_token_ids=frozenset(),
            order=QueueOrder(0.0, 0, choice),
        )
        for choice in range(num_choices)
    ]
    return Request(
        request_id, [Choice(sequence, OutputBuffer(None)) for sequence in sequences], client="test"
    )


def sequence_of(request: Request, choice: int = 0) -> Sequence:
    return request.choices[choice].sequence


def step(
    step_id: int = 0,
    *,
    decodes: abc.Sequence[Sequence] = (),
    chunks: abc.Sequence[Sequence] = (),
    starts: abc.Sequence[Sequence] = (),
) -> Step:
    """Decodes, then chunks of 3 tokens, in the scheduler's order."""
    slices = [StepSlice(sequence.key, 0, (1,), Decode(7)) for sequence in decodes]
    slices += [StepSlice(sequence.key, 0, (1, 2, 3), Prefill(0, 3, 3)) for sequence in chunks]
    records = [StartRecord(record.key, 0, 3, (1, 2, 3), record.sampling) for record in starts]
    return Step.of(tuple(slices), epoch=1, step_id=step_id, starts=tuple(records))


def result(step_id: int = 0, *compute_ms: float, wait_ms: float = 0.0, hop_ms: float = 0.0) -> StepResult:
    """Every stage waits `wait_ms`; `compute_ms` has one compute time per stage."""
    times = [
        StageTime(round(wait_ms * 1000), round(stage_ms * 1000), hop_us=round(hop_ms * 1000))
        for stage_ms in compute_ms
    ]
    return StepResult.of(1, step_id, (), tuple(times))
