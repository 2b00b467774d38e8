"""Checks are spread over steps to limit their cost; a long check waits for a pause."""

from kvcache import IntegrityBroken, IntegrityMonitor, IntegrityReport


class Clock:
    """A check takes `took_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.took_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def check(self) -> None:
        self.now_s += self.took_s


def steps_until_due(monitor: IntegrityMonitor, limit: int = 100_000) -> int | None:
    return next((count for count in range(1, limit) if monitor.count_step()), None)


def new_monitor(clock: Clock) -> IntegrityMonitor:
    return IntegrityMonitor(clock=clock, wall_clock=lambda: 7.5)


def test_checks_take_at_most_a_millisecond_per_256_steps() -> None:
    clock = Clock()
    monitor = new_monitor(clock)
    assert steps_until_due(monitor) == 256
    for took_s, interval in ((0.0002, 256), (0.001, 256), (0.01, 2560), (0.04, 10_240), (0.0, 256)):
        clock.took_s = took_s
        assert monitor.run(clock.check) == ""
        assert steps_until_due(monitor) in (interval, interval + 1)
    assert monitor.report == IntegrityReport(5, 7_500_000, "")


def test_a_check_that_takes_long_waits_for_a_pause() -> None:
    clock = Clock()
    monitor = new_monitor(clock)
    clock.took_s = 0.06
    monitor.run(clock.check)
    assert steps_until_due(monitor) is None
    assert not monitor.is_due_when_idle(), "steps have come"
    assert monitor.is_due_when_idle()
    clock.took_s = 0.0
    monitor.run(clock.check)
    assert steps_until_due(monitor) == 256


def test_a_pause_starts_a_check_immediately_and_then_periodically() -> None:
    monitor = new_monitor(Clock())
    monitor.count_step()
    assert [monitor.is_due_when_idle() for _ in range(3)] == [False, True, True]
    for _ in range(2):
        monitor.run(lambda: None)
        assert [monitor.is_due_when_idle() for _ in range(20)] == [False] * 19 + [True]


def test_the_problem_stays_until_the_next_check() -> None:
    def broken() -> None:
        raise IntegrityBroken("1 free + 0 active")

    monitor = new_monitor(Clock())
    assert monitor.run(broken) == "1 free + 0 active" == monitor.report.problem
    monitor.restart()
    assert monitor.report.problem
    monitor.run(lambda: None)
    assert monitor.report == IntegrityReport(2, 7_500_000, "")
