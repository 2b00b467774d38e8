"""What a status says beside code and text."""

import pytest
from google.rpc import error_details_pb2, status_pb2

from wire.errors import STATUS_OF_ERROR, ClusterUnavailable, Overloaded, RequestNotFound, Superseded
from wire.status_details import DETAILS_KEY, details_of, sent_reason


def status_in(error: BaseException) -> status_pb2.Status:
    ((key, data),) = details_of(error)
    assert key == DETAILS_KEY
    return status_pb2.Status.FromString(data)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Superseded("another call reads"), "SUPERSEDED"),
        (ClusterUnavailable("no stages"), "CLUSTER_UNAVAILABLE"),
        (RuntimeError("a secret"), "INTERNAL_ERROR"),
    ],
)
def test_every_answer_names_its_kind(error: Exception, reason: str) -> None:
    info = error_details_pb2.ErrorInfo()
    assert status_in(error).details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "stageline")
    assert b"secret" not in details_of(error)[0][1]


def test_no_two_kinds_have_one_name() -> None:
    names = [sent_reason(kind.__new__(kind)) for kind in STATUS_OF_ERROR]
    assert len(set(names)) == len(names)


def test_an_overload_says_when_to_try_again() -> None:
    status = status_in(Overloaded("full", retry_after_s=1.5))
    retry = error_details_pb2.RetryInfo()
    assert (status.code, status.message) == (8, "full")
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("error", [Overloaded("full"), RequestNotFound("gone")])
def test_nothing_is_said_that_is_not_known(error: Exception) -> None:
    assert len(status_in(error).details) == 1
