"""After a crash at any time, the journal has exactly the committed state."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.journal.journal import Journal
from coordinator.journal.records import End, JournalUnusable
from tests.properties import examples
from tests.unit.coordinator.journal.journals import (
    IDENTITY,
    Expected,
    accepted_request,
    crashed,
    entries_of,
    left_in,
    opened,
)
from wire.ids import RequestId

LEAST_LOG_BYTES = 32 + 24 + 4096
"""A header and a frame, which a journal that is open always has."""


class JournalMachine(RuleBasedStateMachine):
    """Records every committed state and compares it with the journal after a truncated log."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="journal-"))
        self.path = self.directory / "journal.db"
        self.journal = Journal(self.path, IDENTITY)
        self.expected = Expected()
        self.history = [self.expected.copy()]
        self.num_crashes = self.num_accepted = 0

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.directory)

    @property
    def ids(self) -> list[RequestId]:
        return list(self.expected.requests)

    @rule()
    def accept(self) -> None:
        # What is drawn from the ids must be the same when an example is tried again.
        self.num_accepted += 1
        accepted = accepted_request(RequestId(self.num_accepted.to_bytes(16, "big")))
        self.journal.accept(accepted)
        self.expected.accept(accepted)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def accept_an_id_again(self, data: st.DataObject) -> None:
        accepted = accepted_request(data.draw(st.sampled_from(self.ids)), num_tokens=1)
        self.journal.accept(accepted)
        del self.expected.requests[accepted.request_id]
        self.history.append(self.expected.copy())  # the old one goes first
        self.expected.accept(accepted)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), at=st.floats(0, 1e9))
    def step(self, data: st.DataObject, at: float) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.ids), min_size=1, max_size=4))
        entries = [data.draw(entries_of(request_id)) for request_id in chosen]
        self.journal.add_step(entries, at=at)
        self.expected.add_step(entries, at)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request_id, end = data.draw(st.sampled_from(self.ids)), End(7.0, "StepFailed", "it says “why”")
        self.journal.end(request_id, end)
        self.expected.end(request_id, end)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        request_ids = data.draw(st.lists(st.sampled_from(self.ids), unique=True))
        self.journal.forget(request_ids)
        for request_id in request_ids:
            del self.expected.requests[request_id]

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.ids), min_size=1, unique=True))
        self.journal.compact(
            [(request_id, self.expected.requests[request_id].progress) for request_id in chosen]
        )

    @rule()
    def trim(self) -> None:
        self.journal.trim()

    @rule()
    def begin_epoch(self) -> None:
        self.expected.epoch += 1
        self.journal.set_epoch(self.expected.epoch)

    @rule(ends_well=st.booleans())
    def come_back(self, ends_well: bool) -> None:
        if ends_well:
            self.journal.close()
            self.history = []  # pages of the file itself cannot be cut off
        else:
            self.num_crashes += 1
            old, self.path = self.path, crashed(self.path, self.directory / f"after-{self.num_crashes}")
            assert old != self.path
            self.journal.close()
        self.journal = Journal(self.path, IDENTITY)
        assert self.journal.take_requests() == list(self.expected.requests.values())
        assert self.journal.epoch == self.expected.epoch

    @rule(share=st.floats(0, 1))
    def crash_with_a_part_of_the_log(self, share: float) -> None:
        num_bytes = round(share * Path(f"{self.path}-wal").stat().st_size)
        with tempfile.TemporaryDirectory() as directory:
            copy = crashed(self.path, Path(directory), wal_bytes=num_bytes)
            if num_bytes < LEAST_LOG_BYTES:
                with pytest.raises(JournalUnusable, match=r"its log journal\.db-wal is missing or empty"):
                    left_in(copy)
                return
            with opened(copy) as journal:
                left = Expected({request.accepted.request_id: request for request in journal.take_requests()})
                left.epoch = journal.epoch
        assert left in self.history

    @invariant()
    def remember(self) -> None:
        self.history.append(self.expected.copy())


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=examples(0.2),
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
