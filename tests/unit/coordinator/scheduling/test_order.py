"""First come, first served within a class; a class is worth a bounded time, so nobody starves."""

from __future__ import annotations

from bisect import insort
from collections import deque
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.scheduling.order import Priority, QueueOrder, queue_order

AGE_S = 10.0
NORMAL, HIGH = Priority.NORMAL, Priority.HIGH
CLASSES = st.sampled_from(Priority)


def order(priority: Priority, arrived_s: float, *, arrival: int, choice: int = 0) -> QueueOrder:
    return queue_order(priority, arrived_s=arrived_s, arrival=arrival, choice=choice, age_s=AGE_S)


def comes_first(late: Priority, early: Priority, after_s: float) -> bool:
    """Whether a request that comes `after_s` later overtakes one that waits."""
    return order(late, 100.0 + after_s, arrival=1) < order(early, 100.0, arrival=0)


@given(st.lists(st.tuples(CLASSES, st.floats(0, 20)), max_size=40))
def test_within_a_class_they_are_served_as_they_came(gaps: list[tuple[Priority, float]]) -> None:
    now_s, queue = 0.0, list[tuple[QueueOrder, Priority]]()
    for arrival, (priority, gap_s) in enumerate(gaps):
        now_s += gap_s
        insort(queue, (order(priority, now_s, arrival=arrival), priority))
    for priority in Priority:
        arrivals = [each.arrival for each, its_class in queue if its_class is priority]
        assert arrivals == sorted(arrivals)


@pytest.mark.parametrize(("late", "early"), list(product(Priority, repeat=2)))
def test_a_higher_class_overtakes_who_has_waited_less_than_so_many_ages(
    late: Priority, early: Priority
) -> None:
    ages = late - early
    for after_s in (0.0, 1.0, 9.9, 10.0, 10.1, 19.9, 20.0, 20.1, 1000.0):
        # Who came first wins when both are due at once.
        assert comes_first(late, early, after_s) == (after_s < ages * AGE_S)


@given(CLASSES, CLASSES, st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_nobody_is_overtaken_by_who_comes_two_ages_later(
    late: Priority, early: Priority, waited_s: float, more_s: float
) -> None:
    first = order(early, waited_s, arrival=0)
    assert first < order(late, waited_s + 2 * AGE_S + more_s, arrival=1)


@given(
    own=CLASSES,
    others=st.lists(st.tuples(CLASSES, st.floats(0.01, 5)), min_size=1, max_size=300),
    service_s=st.floats(0.01, 5),
)
def test_a_request_is_served_however_many_come_after_it(
    own: Priority, others: list[tuple[Priority, float]], service_s: float
) -> None:
    """One server, which is busy when it comes, and arrivals that may come faster than it serves."""
    arrived_s = list(accumulate(gap_s for _, gap_s in others))
    coming = deque(
        order(priority, at_s, arrival=number)
        for number, ((priority, _), at_s) in enumerate(zip(others, arrived_s, strict=True), start=1)
    )
    queue, served, now_s = [order(own, 0.0, arrival=0)], 0, service_s
    while True:
        while coming and arrived_s[coming[0].arrival - 1] <= now_s:
            insort(queue, coming.popleft())
        if queue.pop(0).arrival == 0:
            break
        served += 1
        now_s += service_s
    num_overtakers = sum(at_s < (HIGH - own) * AGE_S for at_s in arrived_s)
    assert served <= num_overtakers


@given(st.lists(st.tuples(CLASSES, st.floats(0, 1000)), min_size=2, max_size=20))
def test_the_order_of_two_never_changes_and_never_ties(arrivals: list[tuple[Priority, float]]) -> None:
    """It depends on nothing that time changes, so a queue stays sorted while it waits."""
    orders = sorted(
        order(priority, at_s, arrival=number, choice=choice)
        for number, (priority, at_s) in enumerate(arrivals)
        for choice in range(2)
    )
    assert all(one < other for one, other in pairwise(orders))


def test_choices_of_a_request_stay_together_in_their_order() -> None:
    keys = list(product((3, 4), (0, 1, 2)))
    orders = {order(NORMAL, 5.0, arrival=arrival, choice=choice) for arrival, choice in keys}
    assert [(each.arrival, each.choice) for each in sorted(orders)] == keys
