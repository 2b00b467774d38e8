"""What is recorded arrives as it is, and what is unknown as unknown."""

import pytest

from coordinator.api.activity import KIND_TO_MESSAGE, PHASE_TO_MESSAGE, encode_activity
from coordinator.observability.activity import ActivityRecorder, PipelineLoad, RequestPhase
from coordinator.observability.facts import StepKind


def test_every_phase_and_kind_has_its_message() -> None:
    assert set(PHASE_TO_MESSAGE) == set(RequestPhase)
    assert len(set(PHASE_TO_MESSAGE.values())) == len(RequestPhase)
    assert set(KIND_TO_MESSAGE) == set(StepKind)


@pytest.mark.parametrize("share", [None, 0.0, 0.25])
def test_the_share_of_bubbles_may_be_unknown(share: float | None) -> None:
    snapshot = ActivityRecorder(0.0).snapshot(1.0, now_unix_s=0.0)
    load = PipelineLoad(window_s=1.0, stages=(), bubble_share=share, slowest=None, summary="")
    message = encode_activity(snapshot, load, after_step=0, since_us=0)
    assert (message.bubble_share if message.HasField("bubble_share") else None) == share
