"""The retry hint follows the rate at which requests end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.engine.admission import Admission, AdmissionLimits, RetryAfterEstimator
from coordinator.engine.request import Request, RequestRegistry
from coordinator.scheduler.sequence import SequenceState
from kvcache import ActiveSequence
from tests.unit.coordinator.engine.request_cases import RequestCase
from wire.errors import InvalidRequest, Overloaded


def estimator_of(*ends_s: float) -> RetryAfterEstimator:
    estimator = RetryAfterEstimator()
    for now_s in ends_s:
        estimator.record_end(now_s)
    return estimator


def test_the_hint_is_a_second_without_measurements() -> None:
    assert estimator_of().retry_after_s == 1.0
    assert estimator_of(100.0).retry_after_s == 1.0


def test_the_first_interval_counts_whole_and_every_other_one_a_fifth() -> None:
    assert estimator_of(100.0, 102.0).retry_after_s == 2.0
    assert estimator_of(100.0, 102.0, 109.0).retry_after_s == pytest.approx(2 + (7 - 2) / 5)


@pytest.mark.parametrize(("interval_s", "hint_s"), [(0.0, 0.1), (0.01, 0.1), (29.0, 29.0), (1e9, 30.0)])
def test_the_hint_has_a_lower_and_an_upper_bound(interval_s: float, hint_s: float) -> None:
    assert estimator_of(*(number * interval_s for number in range(9))).retry_after_s == pytest.approx(hint_s)


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=30))
def test_the_hint_is_between_the_shortest_and_the_longest_interval(intervals_s: list[float]) -> None:
    now_s, estimator = 0.0, estimator_of(0.0)
    for interval_s in intervals_s:
        estimator.record_end(now_s := now_s + interval_s)
    assert min(intervals_s) - 1e-6 <= estimator.retry_after_s <= max(intervals_s) + 1e-6


def test_the_hint_adapts_to_a_new_rate() -> None:
    slow = [number * 10.0 for number in range(10)]
    fast = [90.0 + number * 0.5 for number in range(1, 30)]
    assert estimator_of(*slow, *fast).retry_after_s == pytest.approx(0.5, rel=0.1)


class House:
    """Admission with its inputs."""

    def __init__(self, *, queue_size: int = 100, max_client_requests: int | None = None) -> None:
        self.registry, self.estimator = RequestRegistry(), RetryAfterEstimator()
        limits = AdmissionLimits(queue_size=queue_size, max_client_requests=max_client_requests)
        self.admission = Admission(limits, self.registry, self.estimator)

    def enter(self, client: str = "client", *, n: int = 1) -> Request:
        request = RequestCase(client=client, n=n).request()
        self.registry.add(request)
        return request

    def refusal(self, client: str = "client") -> Overloaded:
        before = self.admission.num_preparing
        with pytest.raises(Overloaded) as caught, self.admission.preparing(client):
            pass
        assert self.admission.num_preparing == before
        return caught.value

    def admits(self, client: str = "client") -> bool:
        with self.admission.preparing(client):
            return True


def start_first_choice(request: Request) -> None:
    sequence = request.choices[0].sequence
    ids: Iterator[int] = iter(range(9))
    blocks = ActiveSequence(sequence.all_tokens, block_size=4, max_output_tokens=4, new_id=ids.__next__)
    sequence.begin_prefill(blocks, num_cached_tokens=0)


def leave(house: House, request: Request) -> None:
    for sequence in request.live_sequences:
        sequence.end(SequenceState.CANCELLED)
    request.end(0.0)
    house.registry.end(request)


@pytest.mark.parametrize("name", ["queue_size", "max_client_requests", "max_unread_tokens"])
def test_a_limit_below_one_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is 0, must be in \[1, inf\)"):
        AdmissionLimits(**{"queue_size": 1, name: 0})


def test_requests_in_preparation_count_towards_the_queue() -> None:
    house = House(queue_size=2)
    house.enter()
    with house.admission.preparing("client"):
        assert house.admission.num_preparing == 1
        assert str(house.refusal()) == "2 sequences are waiting, the limit is 2 (queue_size); retry in 1.0 s"
        # The place of an admitted request is kept.
        house.admission.check_queue("client")
    assert house.admission.num_preparing == 0
    assert house.admits()


def test_a_place_is_freed_when_the_request_is_rejected_later() -> None:
    house = House(queue_size=1, max_client_requests=1)
    with pytest.raises(KeyError), house.admission.preparing("client"):
        raise KeyError
    assert house.admission.num_preparing == 0
    assert house.admits()
    assert not house.admission._num_preparing, "clients that have left are forgotten"


def test_each_choice_waits_until_it_has_started() -> None:
    house = House(queue_size=3)
    request = house.enter(n=3)
    house.refusal()
    start_first_choice(request)
    house.admission.check_queue("client")
    with pytest.raises(Overloaded, match=r"2 sequences are waiting, the limit is 3 \(queue_size\)"):
        house.admission.check_queue("client", 2)
    request.choices[1].sequence.end(SequenceState.CANCELLED)
    house.admission.check_queue("client", 2)


def test_a_request_counts_as_its_choices() -> None:
    house = House(max_client_requests=66)
    with house.admission.preparing("a", 64):
        assert house.admission.num_preparing == 64
        assert house.admits("a")
        with house.admission.preparing("a", 2):
            assert (
                str(house.refusal("a"))
                == "client a has 66 active sequences, the limit is 66 (max_client_requests); retry in 1.0 s"
            )
    many = house.enter("a", n=64)
    with pytest.raises(Overloaded), house.admission.preparing("a", 3):
        pass
    leave(house, many)
    with house.admission.preparing("a", 3):
        pass


@pytest.mark.parametrize("limits", [{"queue_size": 4}, {"max_client_requests": 4}])
def test_more_choices_than_the_limit_are_invalid_and_not_an_overload(limits: dict[str, int]) -> None:
    house = House(**limits)
    with (
        pytest.raises(InvalidRequest, match=f"n is 5, the limit is 4 .{next(iter(limits))}."),
        house.admission.preparing("a", 5),
    ):
        pass


def test_the_client_limit_counts_requests_in_any_state() -> None:
    house = House(max_client_requests=2)
    running = house.enter("a")
    start_first_choice(running)
    assert house.admits("a")
    with house.admission.preparing("a"):
        expected = "client a has 2 active sequences, the limit is 2 (max_client_requests); retry in 1.0 s"
        assert str(house.refusal("a")) == expected
        assert house.admits("b")
    house.enter("a")
    house.refusal("a")
    leave(house, running)
    assert house.admits("a")


def test_without_a_limit_a_client_may_have_any_number() -> None:
    house = House()
    for _ in range(50):
        house.enter()
    assert house.admits()


def test_a_rejection_has_a_retry_hint() -> None:
    house = House(queue_size=1)
    house.enter()
    for now_s in (10.0, 14.0):
        house.estimator.record_end(now_s)
    error = house.refusal()
    assert error.retry_after_s == 4.0
    assert str(error).endswith("; retry in 4.0 s")


def test_a_client_keeps_its_part_of_a_queue_that_another_one_has_filled() -> None:
    house = House(queue_size=4)
    for _ in range(4):
        house.enter("flood")
    house.refusal("flood")
    for _ in range(2):
        assert house.admits("quiet")
        house.enter("quiet")
    house.refusal("quiet")
    assert house.admits("third")
