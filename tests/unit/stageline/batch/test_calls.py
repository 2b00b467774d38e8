"""Pauses between the calls of one line."""

import pytest
from httpx2 import Response

from stageline.batch.calls import CallLimits, RetryPauses

LIMITS = CallLimits(concurrency=1, num_retries=2, wait_s=10.0, timeout_s=1.0)


def pauses(*responses: Response) -> list[float | None]:
    line = RetryPauses(LIMITS)
    return [line.after(response, now_s=1_000_000_000.0) for response in responses]


@pytest.mark.parametrize("status", [200, 400, 401, 404, 413])
def test_other_statuses_are_not_retried(status: int) -> None:
    assert pauses(Response(status, headers={"retry-after": "1"})) == [None]


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_retries_without_a_delay_are_counted_and_their_pauses_grow(status: int) -> None:
    first, second, third = pauses(*[Response(status)] * 3)
    assert first is not None
    assert second is not None
    assert 0.3 < first < second < 1.1
    assert third is None


@pytest.mark.parametrize(
    ("headers", "asked_s"),
    [
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "Sun, 09 Sep 2001 01:46:43 GMT"}, 3.0),
    ],
)
def test_delays_of_an_overloaded_server_add_up(headers: dict[str, str], asked_s: float) -> None:
    given = pauses(*[Response(429, headers=headers)] * 20)
    num_pauses = int(LIMITS.wait_s / asked_s)
    assert all(pause is not None and asked_s <= pause <= asked_s * 1.1 for pause in given[:num_pauses])
    assert given[num_pauses] is None


def test_a_delay_of_a_broken_server_counts_as_a_retry() -> None:
    first, second, third = pauses(*[Response(500, headers={"retry-after": "4"})] * 3)
    assert (first, second, third) == (4.0, 4.0, None)


def test_the_server_decides_about_retries() -> None:
    assert pauses(Response(500, headers={"x-should-retry": "false"})) == [None]
    assert pauses(Response(400, headers={"x-should-retry": "true"})) != [None]
