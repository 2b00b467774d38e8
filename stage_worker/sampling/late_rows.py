"""Rows whose masks were not ready when their step was sampled."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from stage_worker.policy import WORKER_POLICY
from stage_worker.sampling.grammar_masks import GrammarMasks
from stage_worker.sampling.sampler_state import SamplerState
from wire.ids import SequenceKey
from wire.steps import StepSlice, identity_of


@dataclass(frozen=True, slots=True)
class LateRow:
    """A row with its logits [1, vocab_size], which waits since `since_s`."""

    step_slice: StepSlice
    state: SamplerState
    logits: Tensor
    since_s: float = field(default_factory=time.monotonic)

    @property
    def identity(self) -> bytes:
        return identity_of(self.step_slice.sequence, self.step_slice.restart_count)


class LateRows:
    """Late rows of one epoch, in the order in which they were sampled."""

    def __init__(self, grammars: GrammarMasks | None) -> None:
        """Without `grammars` no row is late."""
        self._grammars = grammars
        self._rows: dict[bytes, LateRow] = {}

    def late(self, keys: Collection[SequenceKey]) -> set[SequenceKey]:
        """Return those of the sequences whose masks are not ready after a moment."""
        return self._grammars.late(keys) if self._grammars is not None and keys else set()

    def add(self, row: LateRow) -> None:
        self._rows[row.identity] = row

    def keep(self, identities: Collection[bytes]) -> None:
        """Drop the rows of other starts, which have ended."""
        self._rows = {identity: row for identity, row in self._rows.items() if identity in identities}

    def take_ready(self, *, may_wait: bool) -> list[LateRow]:
        """Take the rows whose masks are ready. Waits a moment for one if it `may_wait`."""
        grammars = self._grammars
        if grammars is None or not self._rows:
            return []
        if may_wait:
            grammars.wait_for_any([row.step_slice.sequence for row in self._rows.values()])
        return self._take([row for row in self._rows.values() if grammars.is_ready(row.step_slice.sequence)])

    def take_overdue(self) -> list[LateRow]:
        """Take the rows that wait for longer than `mask_limit_s`."""
        now_s = time.monotonic()
        return self._take(
            [row for row in self._rows.values() if now_s - row.since_s > WORKER_POLICY.mask_limit_s]
        )

    def _take(self, rows: list[LateRow]) -> list[LateRow]:
        for row in rows:
            del self._rows[row.identity]
        return rows
