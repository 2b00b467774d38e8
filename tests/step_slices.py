"""Steps with other slices, and their signals."""

from collections.abc import Sequence

from wire.steps import Prefill, SequenceSignal, Step, StepSlice, key_of


def with_slices(step: Step, slices: Sequence[StepSlice]) -> Step:
    """Return `step` with `slices` instead of its own, decodes first."""
    return Step.of(
        sorted(slices, key=lambda part: isinstance(part.inference_step, Prefill)),
        epoch=step.epoch,
        step_id=step.step_id,
        starts=step.starts,
        ends=step.ends,
        signals=step.signals,
        grows=step.grows,
        digest=step.digest,
    )


def all_signals(step: Step) -> tuple[SequenceSignal, ...]:
    """Return the signals of `step` in order, two for each grow."""
    grown = [
        SequenceSignal(key_of(identity)[0], signal)
        for identity, grow in step.grows
        for signal in grow.signals
    ]
    return (*step.signals[: step.grows.position], *grown, *step.signals[step.grows.position :])
