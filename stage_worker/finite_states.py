"""Hidden states and logits that are not finite: whether a request is the cause, or this stage.

What a request brings itself (a token whose embedding is not finite, rows that came in so, or pages that hold
such rows) fails it alone, on LAST. But where nothing that came in finite goes on finite, the stage has a
fault: its step is computed again.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.ids import SequenceKey
from wire.steps import Slice, SliceError, SliceResult, Step


def are_finite(hidden: Tensor) -> bool:
    """Whether all of `hidden` [tokens, hidden_size] is; one sum, in which nothing that is not gets lost. A
    sum that is too large says no, too.
    """
    return math.isfinite(hidden.sum(dtype=torch.float32).item())


class FiniteStates:
    """Remembers which sequences are not finite by themselves; used by the compute thread only."""

    def __init__(self) -> None:
        self._tainted: set[SequenceKey] = set()

    def clear(self) -> None:
        """No sequence is known any more."""
        self._tainted.clear()

    def end(self, sequence: SequenceKey) -> None:
        self._tainted.discard(sequence)

    def check_handed_on(self, step: Step, outgoing: Tensor, incoming: Callable[[], Tensor]) -> None:
        """Raises StepFault if this stage has spoilt the step. Both are [tokens, hidden_size]; what came in is
        asked for only where something is not finite.
        """
        if not are_finite(outgoing):
            # A part of a prompt may be finite up to what is not.
            good = [bool(rows.any()) for rows in _finite_rows(step, outgoing)]
            self._check(step.slices, good, step, incoming())

    def check_answered(
        self, step: Step, results: Sequence[SliceResult], incoming: Callable[[], Tensor]
    ) -> None:
        """The same for results whose logits may not be finite."""
        outcomes = {result.sequence: result.outcome for result in results}
        if not any(isinstance(outcome, SliceError) for outcome in outcomes.values()):
            return
        answered = [part for part in step.slices if part.sequence in outcomes]
        good = [not _is_not_finite(outcomes[part.sequence]) for part in answered]
        if not all(good):
            self._check(answered, good, step, incoming())

    def _check(self, parts: Sequence[Slice], good: list[bool], step: Step, incoming: Tensor) -> None:
        came_good = self._came_good(step, incoming)
        judged = [is_good for part, is_good in zip(parts, good, strict=True) if part.sequence in came_good]
        if judged and not any(judged):
            raise StepFault(
                StepFaultKind.NON_FINITE,
                f"nothing that this stage has computed for {len(judged)} of {len(step.slices)} sequences is "
                "finite, but what came in for them is",
            )
        self._tainted.update(part.sequence for part in step.slices if part.sequence not in came_good)

    def _came_good(self, step: Step, incoming: Tensor) -> set[SequenceKey]:
        return {
            part.sequence
            for part, rows in zip(step.slices, _finite_rows(step, incoming), strict=True)
            if part.sequence not in self._tainted and bool(rows.all())
        }


def _finite_rows(step: Step, hidden: Tensor) -> list[Tensor]:
    """Which rows are finite, bool [tokens] for each slice."""
    are_good = hidden.isfinite().all(dim=1)
    ends = itertools.accumulate(len(part.tokens) for part in step.slices)
    return [are_good[end - len(part.tokens) : end] for part, end in zip(step.slices, ends, strict=True)]


def _is_not_finite(outcome: object) -> bool:
    kind = stage_pb2.SliceError.KIND_NON_FINITE_LOGITS
    return isinstance(outcome, SliceError) and outcome.kind == kind
