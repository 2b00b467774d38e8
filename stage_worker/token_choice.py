"""Turns the logits of a step into one result per sampled slice: a token, or that sequence's error."""

from collections.abc import Sequence

from torch import Tensor

from stage_worker.sampling.draws import Draw, check_sampling, non_finite_rows, sample
from stage_worker.sequences import SequenceState
from stageline_rpc.v1 import stage_pb2
from wire.steps import Slice, SliceError, SliceResult, StepSampling


def choose_tokens(
    slices: Sequence[Slice], states: Sequence[SequenceState], logits: Tensor, *, stage: int
) -> tuple[SliceResult, ...]:
    """`logits` is float32 [n, vocab_size], one row per slice; `states` are the slices' sequences."""
    outcomes: dict[int, int | SliceError] = {}
    for row in non_finite_rows(logits):
        position = slices[row].first_position + len(slices[row].tokens)
        outcomes[row] = SliceError(
            stage_pb2.SliceError.KIND_NON_FINITE_LOGITS,
            stage,
            f"logits for position {position} of {slices[row].sequence} are not finite",
        )
    for row, state in enumerate(states):
        if (problem := _sampling_problem(state.sampling)) is not None:
            outcomes.setdefault(row, SliceError(stage_pb2.SliceError.KIND_SAMPLER, stage, problem))
    rows = [row for row in range(len(slices)) if row not in outcomes]
    if rows:
        draws = [_draw(slices[row], states[row]) for row in rows]
        chosen = sample(logits if len(rows) == len(slices) else logits[rows], draws)
        outcomes.update(zip(rows, chosen, strict=True))
    return tuple(
        SliceResult(part.sequence, part.generation, outcomes[row]) for row, part in enumerate(slices)
    )


def _draw(part: Slice, state: SequenceState) -> Draw:
    position = part.first_position + len(part.tokens)
    return Draw(state.sampling, part.sequence.choice, position)


def _sampling_problem(sampling: StepSampling) -> str | None:
    try:
        check_sampling(sampling)
    except ValueError as error:
        return str(error)
    return None
