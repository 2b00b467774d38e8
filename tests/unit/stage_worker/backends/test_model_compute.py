"""Attribution of non-finite values to a request or a stage."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint, DType, ScaledDType
from stage_worker.backends.model_compute import FiniteStates, ModelCompute
from stage_worker.backends.tensor_views import sum_of
from stage_worker.executor import StepExecutor
from stage_worker.loading.stage_pages import new_pages
from stage_worker.model.decoder import DecoderStage
from stageline_rpc.internal.v1 import step_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.stage_bench import GREEDY, Log, hidden_for, new_assignment
from tests.step_slices import with_slices
from tests.unit.stage_worker.test_fake_cuda_steps import steps
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.ids import RequestId, SequenceKey
from wire.steps import Decode, Prefill, SliceError, SliceResult, Step, StepResult, StepSlice
from wire.tensors import WireDType

WIDTH = 8
NOT_FINITE = step_pb2.SliceError.KIND_NON_FINITE_LOGITS


def key(request: int, choice: int = 0) -> SequenceKey:
    return SequenceKey(RequestId(bytes([request]) * 16), choice)


STEP = Step.of(
    (
        StepSlice(key(2), 0, (8,), Decode(9)),
        StepSlice(key(3), 0, (9,), Decode(4)),
        StepSlice(key(3, 1), 0, (9,), Decode(4)),
        StepSlice(key(1), 0, (5, 6, 7), Prefill(0, 3, 3)),
    ),
    epoch=1,
    step_id=3,
    digest=0,
)


def states(*bad_rows: int, value: float = math.nan) -> torch.Tensor:
    hidden = torch.ones(6, WIDTH)
    for row in bad_rows:
        hidden[row, 3] = value
    return hidden


def are_finite(hidden: torch.Tensor) -> bool:
    return math.isfinite(sum_of([hidden]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_single_non_finite_value_is_detected(dtype: torch.dtype, value: float) -> None:
    assert are_finite(states().to(dtype))
    assert not are_finite(states(4, value=value).to(dtype))


def test_large_values_that_add_up_to_more_than_the_dtype_holds_are_finite() -> None:
    assert are_finite(torch.full((64, 64), 6e4, dtype=torch.float16))


def handed_on(incoming: torch.Tensor, outgoing: torch.Tensor, step: Step = STEP) -> None:
    check(FiniteStates(), step, outgoing, incoming)


def check(finite: FiniteStates, step: Step, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    finite.check_handed_on(step, float(sum_of([outgoing])), lambda: [outgoing], lambda: [incoming])


ALL = tuple(range(6))


@pytest.mark.parametrize("rows", [(), (3,), (3, 4, 5), (0,), (3, 4, 5, 0, 1)], ids=str)
def test_while_others_are_finite_the_request_is_the_cause(rows: tuple[int, ...]) -> None:
    handed_on(states(), states(*rows))


def test_a_stage_that_produces_no_finite_value_is_the_cause() -> None:
    with pytest.raises(StepFault, match="4 of 4 sequences") as raised:
        handed_on(states(), states(*ALL))
    assert raised.value.kind is StepFaultKind.NON_FINITE
    with pytest.raises(StepFault, match="3 of 4 sequences"):
        handed_on(states(4), states(*ALL))


def test_non_finite_input_is_not_the_fault_of_this_stage() -> None:
    handed_on(states(*ALL), states(*ALL))
    handed_on(states(5, 0, 1, 2), states(5, 0, 1, 2))


def test_a_lone_request_is_the_cause_unless_all_of_it_is_non_finite() -> None:
    step, fine = with_slices(STEP, STEP.chunks), states()[:3]
    handed_on(fine, states(1, 2)[:3], step)
    handed_on(states(1)[:3], states(0, 1, 2)[:3], step)
    with pytest.raises(StepFault, match="1 of 1 sequences"):
        handed_on(fine, states(0, 1, 2)[:3], step)


def test_non_finite_pages_of_a_sequence_affect_its_later_tokens() -> None:
    finite = FiniteStates()
    first = with_slices(STEP, STEP.chunks)
    later = with_slices(STEP, (StepSlice(key(1), 0, (8,), Prefill(3, 1, 4)),))
    check(finite, first, states(0, 1, 2)[:3], states(0)[:3])
    check(finite, later, states(0)[:1], states()[:1])
    finite.end([key(1)])
    with pytest.raises(StepFault):
        check(finite, later, states(0)[:1], states()[:1])


def answered(incoming: torch.Tensor, *bad: int, kind: int = NOT_FINITE) -> None:
    error = SliceError(kind, 1, "logits are not finite")
    results = [
        SliceResult(part.sequence, 0, error if place in bad else 7) for place, part in enumerate(STEP.slices)
    ]
    FiniteStates().check_answered(STEP, StepResult.of(1, 3, results), lambda: [incoming])


def test_logits_are_judged_like_hidden_states() -> None:
    answered(states(), 0, 1)
    answered(states(3, 0), 3, 0)
    answered(states(), 0, 1, 2, 3, kind=step_pb2.SliceError.KIND_SAMPLER)
    answered(states(*ALL), 0, 1, 2, 3)
    with pytest.raises(StepFault):
        answered(states(), 0, 1, 2, 3)
    with pytest.raises(StepFault, match="3 of 4 sequences"):
        answered(states(0), 0, 1, 2, 3)


class Poisoned(DecoderStage):
    """Computes no finite value."""

    def forward(self, hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        return super().forward(hidden, *others) * math.nan


@pytest.mark.parametrize("stage_type", [DecoderStage, Poisoned])
@pytest.mark.parametrize("wire_dtype", [None, DType.BF16, *ScaledDType])
def test_a_stage_that_hands_on_nothing_finite_faults_in_every_wire_dtype(
    wire_dtype: WireDType | None, stage_type: type[DecoderStage], tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path, "llama", num_layers=3)
    assignment = replace(new_assignment(directory, stage=1), wire_dtype=wire_dtype)
    checkpoint = Checkpoint.open(directory)
    model = stage_type(
        checkpoint.config, layer_begin=1, layer_end=2, has_embeddings=False, has_head=False, dtype=DType.F32
    )
    model.load(checkpoint)
    pages = new_pages(assignment, checkpoint.config, torch.device("cpu"))
    executor = StepExecutor(assignment, ModelCompute(model, pages, wire_dtype=assignment.sent_dtype))
    executor.begin_epoch(1, stage=1)
    _, step = steps(Log(assignment), (GREEDY,))[0]
    frame = Frame(step, hidden_for(step, checkpoint.config.hidden_size))
    if stage_type is DecoderStage:
        executor.run(frame)
        return
    with pytest.raises(StepFault) as raised:
        executor.run(frame)
    assert raised.value.kind is StepFaultKind.NON_FINITE
