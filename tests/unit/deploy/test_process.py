"""Workers are started again where that may help, ever later, and not for ever."""

from __future__ import annotations

import signal

import pytest

from deploy.process import MAX_RESTARTS, WINDOW_S, RestartPolicy


@pytest.mark.parametrize(
    ("code", "is_unexpected"),
    [(0, False), (1, False), (2, False), (3, True), (-signal.SIGKILL, True), (-signal.SIGSEGV, True)],
)
def test_failed_devices_and_signals_are_worth_another_process(code: int, is_unexpected: bool) -> None:
    assert RestartPolicy.is_unexpected(code) is is_unexpected


def test_each_restart_waits_twice_as_long_and_there_is_an_end_of_it() -> None:
    policy = RestartPolicy()
    delays = [policy.next_delay_s(10.0 * number) for number in range(MAX_RESTARTS + 1)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, None]


def test_what_was_long_ago_is_forgotten() -> None:
    policy = RestartPolicy()
    for _ in range(MAX_RESTARTS):
        policy.next_delay_s(0.0)
    assert policy.next_delay_s(WINDOW_S) is None
    assert policy.next_delay_s(WINDOW_S + 1.0) == 0.5
