"""Workers restart after recoverable failures, with growing delays and a limit."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from deploy.process import MAX_RESTARTS, WINDOW_S, LocalProcess, RestartPolicy


@pytest.mark.parametrize(
    ("code", "is_unexpected"),
    [(0, False), (1, False), (2, False), (3, True), (-signal.SIGKILL, True), (-signal.SIGSEGV, True)],
)
def test_failed_devices_and_signals_lead_to_a_restart(code: int, is_unexpected: bool) -> None:
    assert RestartPolicy.is_unexpected(code) is is_unexpected


@pytest.mark.parametrize(
    ("exit_code", "last_line", "text"),
    [
        (1, "stageline: error[BAD]: no disk", "exit code 1, error[BAD]: no disk; its log is {log}"),
        (1, "oops", "exit code 1; end of log {log}:\n  | before\n  | oops"),
        (
            3,
            "stageline: error[BAD]: gone",
            "exit code 3; end of log {log}:\n  | before\n  | stageline: error[BAD]: gone",
        ),
    ],
)
async def test_a_process_that_fails_with_a_reason_is_reported_in_one_line(
    exit_code: int, last_line: str, text: str, tmp_path: Path
) -> None:
    code = f"import sys; print('before'); print({last_line!r}); sys.exit({exit_code})"
    log = tmp_path / "log"
    process = await LocalProcess.start("worker-0", [sys.executable, "-c", code], log=log, environment={})
    await process.wait()
    assert str(process.failure()) == f"worker-0 (pid {process.pid}) ended: {text.format(log=log)}"


def test_restart_delays_double_up_to_a_limit() -> None:
    policy = RestartPolicy()
    delays = [policy.next_delay_s(10.0 * number) for number in range(MAX_RESTARTS + 1)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, None]


def test_old_entries_are_forgotten() -> None:
    policy = RestartPolicy()
    for _ in range(MAX_RESTARTS):
        policy.next_delay_s(0.0)
    assert policy.next_delay_s(WINDOW_S) is None
    assert policy.next_delay_s(WINDOW_S + 1.0) == 0.5
