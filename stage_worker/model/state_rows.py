"""Which rows of a step belong to which recurrent state: made on the host, with the step's other arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stage_worker.model.attention_views import OnHost, Place
from stage_worker.model.attention_work import Int32s

SEQUENCE_FIELDS = 3
"""First row, number of rows, and slot of one sequence."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StateRows:
    """Rows of a step, and the slots of their recurrent states.

    With Triton kernels, `sequences` int32 [s, SEQUENCE_FIELDS] covers all slices, in the order of their rows;
    further entries have no rows, and begin after the last one. Some have several rows only if `has_longer`.
    Else one-token slices are `singles` int64 [b] with `single_slots` int64 [b], None without such; `longer`
    are the others: first row, row after the last one, and slot.
    """

    has_longer: bool
    sequences: Tensor | None = None
    singles: Tensor | None = None
    single_slots: Tensor | None = None
    longer: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostStates:
    """StateRows on the host: `sequences` int32 [s, SEQUENCE_FIELDS], and what of it a device needs."""

    sequences: Int32s
    has_longer: bool
    rows: OnHost[StateRows]

    @classmethod
    def of(cls, lengths: Sequence[int], slots: Sequence[int], *, by_triton: bool) -> HostStates:
        """Slices of `lengths` tokens, one after the other."""
        counts = np.array(lengths, np.int64)
        columns = (np.cumsum(counts) - counts, counts, np.array(slots, np.int64))
        sequences: Int32s = np.stack(columns, 1).astype(np.int32)
        if by_triton:
            return cls._whole(sequences, has_longer=bool((counts > 1).any()))
        rows = _separated(lengths, slots)
        return cls(sequences=sequences, has_longer=bool((counts > 1).any()), rows=rows)

    def padded(self, num_sequences: int, *, has_longer: bool) -> HostStates | None:
        """The same slices among `num_sequences`, for Triton kernels that also take longer ones if
        `has_longer`; None if there is too little room.
        """
        num_own = len(self.sequences)
        if num_own > num_sequences or (self.has_longer and not has_longer):
            return None
        sequences = np.zeros((num_sequences, SEQUENCE_FIELDS), np.int32)
        sequences[:num_own] = self.sequences
        if num_own:
            sequences[num_own:, 0] = self.sequences[-1, :2].sum()
        return self._whole(sequences, has_longer=has_longer)

    @classmethod
    def _whole(cls, sequences: Int32s, *, has_longer: bool) -> HostStates:
        def make(place: Place) -> StateRows:
            return StateRows(has_longer=has_longer, sequences=place(sequences))

        return cls(sequences=sequences, has_longer=has_longer, rows=OnHost((sequences,), make))


def _separated(lengths: Sequence[int], slots: Sequence[int]) -> OnHost[StateRows]:
    """For torch's operators."""
    found = list(zip(lengths, itertools.accumulate(lengths), slots, strict=True))
    singles = np.array([end - 1 for length, end, _ in found if length == 1], np.int64)
    single_slots = np.array([slot for length, _, slot in found if length == 1], np.int64)
    longer = tuple((end - length, end, slot) for length, end, slot in found if length > 1)

    def make(place: Place) -> StateRows:
        if not singles.size:
            return StateRows(has_longer=bool(longer), longer=longer)
        return StateRows(
            has_longer=bool(longer), singles=place(singles), single_slots=place(single_slots), longer=longer
        )

    return OnHost((singles, single_slots) if singles.size else (), make)
