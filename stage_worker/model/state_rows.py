"""Rows of a step by slices, for layers with recurrent states."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stage_worker.model.attention_views import OnHost, Place


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StateRows:
    """Rows of a step, and the slots of their recurrent states.

    One-token slices are `singles` int64 [b] with `single_slots` int64 [b], None without such; `longer` are
    the others: first row, row after the last one, and slot.
    """

    singles: Tensor | None
    single_slots: Tensor | None
    longer: tuple[tuple[int, int, int], ...]


def state_rows(lengths: Sequence[int], slots: Sequence[int]) -> OnHost[StateRows]:
    """Rows of slices of `lengths` tokens, one after the other."""
    ends = list(itertools.accumulate(lengths))
    found = list(zip(lengths, ends, slots, strict=True))
    singles = np.array([end - 1 for length, end, _ in found if length == 1], np.int64)
    single_slots = np.array([slot for length, _, slot in found if length == 1], np.int64)
    longer = tuple((end - length, end, slot) for length, end, slot in found if length > 1)

    def make(place: Place) -> StateRows:
        if not singles.size:
            return StateRows(singles=None, single_slots=None, longer=longer)
        return StateRows(singles=place(singles), single_slots=place(single_slots), longer=longer)

    return OnHost((singles, single_slots) if singles.size else (), make)
