"""Hidden states and logits that are not finite: whether a request is the cause, or this stage.

A row that is not finite fails its request alone, on LAST. But where a step has such rows of two requests, or
no others at all, and they came in finite, the stage has a fault: its step is computed again.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId
from wire.steps import SliceError, SliceResult, Step

LEAST_REQUESTS = 2
"""That are not finite in one step, where others are, before it is the stage's fault."""


def are_finite(hidden: Tensor) -> bool:
    """Whether all of `hidden` [tokens, hidden_size] is; one sum, in which nothing that is not gets lost. A
    sum that is too large says no, too.
    """
    return math.isfinite(hidden.sum(dtype=torch.float32).item())


def check_handed_on(step: Step, incoming: Tensor | None, outgoing: Tensor) -> None:
    """For hidden states that are not all finite: raises StepFault if that is this stage's doing. `incoming`
    is None on FIRST, where tokens come in; both are [tokens, hidden_size].
    """
    _check(step, incoming, outgoing, _bad_requests(step, outgoing))


def check_answered(
    step: Step, incoming: Tensor | None, outgoing: Tensor, results: Sequence[SliceResult]
) -> None:
    """The same for results whose logits are not finite; `outgoing` is what they were made of."""
    bad = {
        result.sequence.request_id
        for result in results
        if isinstance(result.outcome, SliceError)
        and result.outcome.kind == stage_pb2.SliceError.KIND_NON_FINITE_LOGITS
    }
    if bad:
        _check(step, incoming, outgoing, bad)


def _check(step: Step, incoming: Tensor | None, outgoing: Tensor, bad: set[RequestId]) -> None:
    if len(bad) < LEAST_REQUESTS and _good_rows(outgoing).any():
        return
    num_requests = len({part.sequence.request_id for part in step.slices})
    spoilt = bad if incoming is None else bad - _bad_requests(step, incoming)
    if len(spoilt) >= min(LEAST_REQUESTS, num_requests):
        raise StepFault(
            StepFaultKind.NON_FINITE,
            f"what this stage has computed for {len(spoilt)} of {num_requests} requests is not finite, but "
            "what came in for them is",
        )


def _good_rows(hidden: Tensor) -> Tensor:
    return hidden.isfinite().all(dim=1)


def _bad_requests(step: Step, hidden: Tensor) -> set[RequestId]:
    is_good = _good_rows(hidden).tolist()
    ends = itertools.accumulate(len(part.tokens) for part in step.slices)
    return {
        part.sequence.request_id
        for part, end in zip(step.slices, ends, strict=True)
        if not all(is_good[end - len(part.tokens) : end])
    }
