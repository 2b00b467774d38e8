"""Recorded values arrive unchanged, and unknown ones as unknown."""

import pytest

from coordinator.api.activity import KIND_TO_MESSAGE, PHASE_TO_MESSAGE, encode_activity
from coordinator.engine.observer import EndCause
from coordinator.observability.activity import ActivityRecorder, PipelineLoad, RequestPhase, pipeline_load
from coordinator.observability.facts import RequestRecord, StepKind
from stageline_rpc.v1 import cluster_pb2, telemetry_pb2
from tests.unit.coordinator.observability.makers import new_request
from wire.errors import ClusterUnavailable, GrammarFailed, ServingError


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


def test_the_end_of_an_epoch_is_a_sentence_and_a_code() -> None:
    recorder = ActivityRecorder(0.0)
    for epoch, cause in enumerate((*EndCause, None)):
        recorder.epoch_started(epoch, 1.0)
        recorder.epoch_stopped(cause, "worker w1 is lost", 2.0)
    epochs = _encode(recorder).epochs
    assert {epoch.detail for epoch in epochs} == {"worker w1 is lost"}
    names = [cluster_pb2.EpochEndCause.Name(epoch.cause) for epoch in epochs]
    assert names == [f"EPOCH_END_CAUSE_{cause.name}" for cause in EndCause] + ["EPOCH_END_CAUSE_UNSPECIFIED"]
    assert len(names) == len(cluster_pb2.EpochEndCause.values())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ClusterUnavailable("no pipeline within 30 s"), "CLUSTER_UNAVAILABLE"),
        (GrammarFailed("the grammar ends at token 3"), "GRAMMAR_FAILED"),
        (None, ""),
    ],
)
def test_the_error_of_a_request_is_a_sentence_and_a_code(error: ServingError | None, reason: str) -> None:
    recorder = ActivityRecorder(0.0)
    record = RequestRecord(new_request(), 1.0, 1.0, False)
    recorder.request_accepted(record)
    record.ended_s, record.error = 2.0, error
    recorder.request_ended(record)
    (request,) = _encode(recorder).requests
    assert (request.error, request.reason) == ("" if error is None else str(error), reason)


def _encode(recorder: ActivityRecorder) -> telemetry_pb2.GetActivityResponse:
    snapshot = recorder.snapshot(3.0, now_unix_s=3.0)
    return encode_activity(snapshot, pipeline_load(snapshot), after_step=0, since_us=0)
