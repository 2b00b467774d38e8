"""Checks of the coordinator's own KV accounting: between steps at bounded cost, and while nothing runs."""

from coordinator.requests.engine import Engine
from kvcache import IntegrityMonitor, IntegrityReport


class LedgerCheck:
    """Reads the engine's ledger and sequences; both methods return the problem, empty if there is none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._monitor = IntegrityMonitor()

    @property
    def report(self) -> IntegrityReport:
        """Result of the last check."""
        return self._monitor.report

    def restart(self) -> None:
        """An epoch begins, with an empty ledger."""
        self._monitor.restart()

    def after_step(self) -> str:
        """A step was answered."""
        return self._run() if self._monitor.count_step() else ""

    def when_idle(self) -> str:
        """To be called now and then; a pause is the time between two calls."""
        scheduler = self._engine.scheduler
        is_idle = not scheduler.running and not scheduler.num_steps_in_flight
        return self._run() if self._monitor.is_due_when_idle() and is_idle else ""

    def _run(self) -> str:
        scheduler = self._engine.scheduler
        kv = scheduler.kv
        if kv is None:
            return ""
        active = [sequence.kv for sequence in scheduler.running]
        return self._monitor.run(lambda: kv.check_integrity(active))
