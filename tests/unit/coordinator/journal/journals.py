"""Journals for tests, their entries, and their files as after a crash."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

from coordinator.journal.clock import HostClocks
from coordinator.journal.database import ServedIdentity
from coordinator.journal.journal import Journal
from coordinator.journal.records import AcceptedRequest, End, Entry, JournalledRequest, RequestProgress
from coordinator.scheduler.sequence import FinishReason
from wire.ids import RequestId, new_request_id
from wire.sampling import GrammarSpec
from wire.steps import TokenLogprobs

IDENTITY = ServedIdentity("f" * 32, "f32")


def host_clocks(now_s: Callable[[], float], *, boot_id: str = "a boot") -> HostClocks:
    """Clocks that agree."""
    return HostClocks(boot_id=lambda: boot_id, uptime_s=now_s, wall_s=now_s)


@contextmanager
def opened(path: Path) -> Iterator[Journal]:
    journal = Journal(path, IDENTITY)
    try:
        yield journal
    finally:
        journal.close()


def crashed(path: Path, into: Path, *, wal_bytes: int | None = None) -> Path:
    """The files of an open journal as they are now, or with this many bytes of the write-ahead log."""
    into.mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copy(path, into / path.name))
    wal = Path(f"{path}-wal")
    if wal.exists():
        Path(f"{copy}-wal").write_bytes(wal.read_bytes()[:wal_bytes])
    return copy


def accepted_request(request_id: RequestId | None = None, *, num_tokens: int = 3) -> AcceptedRequest:
    return AcceptedRequest(
        request_id=request_id or new_request_id(),
        message=b"\x00message",
        prompt=tuple(range(num_tokens)),
        bad_words=((1,), (2, 3)),
        grammar=GrammarSpec(definition='start: "é"', tokenizer_checksum=2**64 - 1),
        client="somebody",
        arrived_at=1.5,
        deadline_at=None,
    )


def left_in(path: Path) -> list[JournalledRequest]:
    with opened(path) as journal:
        return journal.take_requests()


@dataclass
class Expected:
    """Reference model of a journal's contents."""

    requests: dict[RequestId, JournalledRequest] = field(default_factory=dict)
    epoch: int = 0

    def accept(self, accepted: AcceptedRequest) -> None:
        self.requests.pop(accepted.request_id, None)
        self.requests[accepted.request_id] = JournalledRequest(
            accepted=accepted, progress=RequestProgress(), end=None
        )

    def add_step(self, entries: list[Entry], at: float) -> None:
        for entry in entries:
            self.requests[entry.request_id].progress.add(entry, at)

    def end(self, request_id: RequestId, end: End) -> None:
        known = self.requests[request_id]
        self.requests[request_id] = JournalledRequest(
            accepted=known.accepted, progress=known.progress, end=end
        )

    def copy(self) -> Expected:
        return deepcopy(self)


_floats = st.floats(allow_nan=False)
_tokens = st.integers(0, 2**32 - 1)
logprobs = st.builds(
    TokenLogprobs,
    _tokens,
    _floats,
    st.integers(1, 2**32 - 1),
    st.lists(st.tuples(_tokens, _floats), max_size=2).map(tuple),
)


def entries_of(request_id: RequestId) -> st.SearchStrategy[Entry]:
    """Of a request whose tokens have log-probabilities, all of them or none, as its id says.

    The id is of this run, so what is drawn does not depend on it.
    """
    has_scores = sum(request_id) % 2 == 1
    token = st.none() | st.tuples(_tokens, logprobs)
    return token.flatmap(lambda drawn: _entries(request_id, drawn, has_scores))


def _entries(
    request_id: RequestId, token: tuple[int, TokenLogprobs] | None, has_scores: bool
) -> st.SearchStrategy[Entry]:
    return st.builds(
        Entry,
        request_id=st.just(request_id),
        choice=st.integers(0, 2),
        token=st.just(token and token[0]),
        logprobs=st.just(token[1] if token and has_scores else None),
        prompt_logprobs=st.lists(logprobs, max_size=2).map(tuple),
        finish_reason=st.none() | st.sampled_from(FinishReason),
        num_cached_tokens=st.integers(0, 100),
        num_restarts=st.integers(0, 3),
    )
