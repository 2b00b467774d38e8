"""Results of LAST on mock stages."""

from stage_worker.backends.mock_compute import MockCompute
from wire.frames import Frame
from wire.steps import SliceResult, StepResult


def results_of(compute: MockCompute, frame: Frame) -> tuple[SliceResult, ...]:
    """Compute a frame of LAST, whose layouts mocks do not read."""
    result = compute.compute(frame, [])
    assert isinstance(result, StepResult)
    return result.results
