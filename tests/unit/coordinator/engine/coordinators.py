"""Consecutive coordinators over one journal."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from coordinator.engine.durability import Durability, restore
from coordinator.engine.request import Request
from coordinator.journal.journal import Journal
from coordinator.recovery.policy import DEFAULT_POLICY
from tests.unit.coordinator.engine.engine_model import Call, EngineModel
from tests.unit.coordinator.engine.request_cases import RequestCase
from tests.unit.coordinator.journal.journals import IDENTITY, accepted_request, crashed, host_clocks
from wire.ids import RequestId

GRACE_S = 60.0
RECOVERS_WITHIN_S = 30.0


class Coordinators:
    """Consecutive coordinators; each restores the journal of the previous one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "journal.db"
        self._num = 0
        self._cases: dict[RequestId, RequestCase] = {}
        self.now_s = 1000.0
        self._begin()

    def close(self) -> None:
        self.model.close()
        self.durability.suspend()

    def submit(self, case: RequestCase, *, deadline_s: float | None = None) -> Call:
        request = case.request(arrival=len(self._cases))
        self._cases[request.id] = case
        accepted = replace(accepted_request(request.id), deadline_at=deadline_s)
        return self.model.submit(request, deadline_s=deadline_s, accepted=accepted)

    def crash(self) -> None:
        """Crash the process without any cleanup."""
        self._num += 1
        old, self._path = self._path, crashed(self._path, self._directory / str(self._num))
        assert old != self._path
        self.close()
        self._begin()

    def stop(self) -> None:
        """Stop as after SIGTERM."""
        self.model.engine.suspend()
        self.model.close()
        self._begin()

    def request(self, request_id: RequestId) -> Request:
        return self.model.engine.registry.find(request_id)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.model.now_s = self.now_s
        self.model.engine.sweep()

    def recover(self) -> None:
        """Sweeps until the journal is written again; its probes take real time, on a thread.

        Few seconds pass for the requests, of which some are kept for five.
        """
        end_s = time.monotonic() + RECOVERS_WITHIN_S
        while self.durability.failure is not None:
            assert time.monotonic() < end_s, self.durability.failure
            self.pass_time(0.005)
            time.sleep(0.001)

    def _begin(self) -> None:
        self.journal = Journal(self._path, IDENTITY, host_clocks(lambda: self.now_s))
        self.durability = Durability(self.journal, GRACE_S, policy=DEFAULT_POLICY)
        self.model = EngineModel(num_blocks=64, num_stages=2, durability=self.durability)
        self.model.now_s = self.now_s
        for arrival, left in enumerate(self.journal.take_requests()):
            request_id = left.accepted.request_id
            request = self._cases[request_id].request(arrival=arrival, request_id=request_id)
            ended = restore(request, left.progress, left.end)
            request.deadline_s = left.accepted.deadline_at
            if request.keep_s is None:
                request.reattach_until_s = self.now_s + GRACE_S
            self.model.engine.restore(request, ended=ended)
