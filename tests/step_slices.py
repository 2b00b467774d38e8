"""Steps with other slices."""

from collections.abc import Sequence

from wire.steps import Prefill, Step, StepSlice


def with_slices(step: Step, slices: Sequence[StepSlice]) -> Step:
    """Return `step` with `slices` instead of its own, decodes first."""
    return Step.of(
        sorted(slices, key=lambda part: isinstance(part.inference_step, Prefill)),
        epoch=step.epoch,
        step_id=step.step_id,
        starts=step.starts,
        ends=step.ends,
        signals=step.signals,
        digest=step.digest,
    )
