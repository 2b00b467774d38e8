"""Silent computation faults, planted into one stage of a real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stage_worker.model.decoder import DecoderStage
from stage_worker.model.rope import RotaryTable
from stage_worker.model.step_layout import LayerKv, StepArrays
from stage_worker.validation import SliceLayout

Plant = Callable[[DecoderStage], None]
"""Makes a loaded stage faulty."""


class _Faulty:
    """A layer's operations, except those replaced by a fault."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def _replace_operations(stage: DecoderStage, faulty: type[_Faulty]) -> None:
    untyped: Any = stage
    for layer in untyped._loaded().layers:
        mix = layer._mix
        mix._operations = mix._write._operations = faulty(mix._operations)


def decode_attention_is_zero(stage: DecoderStage) -> None:
    class Zero(_Faulty):
        def decode(self, query: Tensor, output: Tensor, view: Any, *rest: Any) -> None:
            if view.rows is None:
                output.zero_()
            else:
                output.index_fill_(0, view.rows, 0)

    _replace_operations(stage, Zero)


def keys_and_values_are_not_written(stage: DecoderStage) -> None:
    class Unwritten(_Faulty):
        def rotate_and_write(
            self, heads: Tensor, num_heads: int, rotary: RotaryTable, kv: LayerKv, between: Any
        ) -> None:
            before = kv.store.clone()
            self.real.rotate_and_write(heads, num_heads, rotary, kv, between)
            kv.store.copy_(before)

    _replace_operations(stage, Unwritten)


def decoded_tokens_are_not_written(stage: DecoderStage) -> None:
    class Unwritten(_Faulty):
        def rotate_and_write(
            self, heads: Tensor, num_heads: int, rotary: RotaryTable, kv: LayerKv, between: Any
        ) -> None:
            before = kv.store.clone()
            self.real.rotate_and_write(heads, num_heads, rotary, kv, between)
            if not kv.step.prefill_rows:
                kv.store.copy_(before)

    _replace_operations(stage, Unwritten)


def slots_are_off_by_one(stage: DecoderStage) -> None:
    class Shifted(_Faulty):
        def rotate_and_write(
            self, heads: Tensor, num_heads: int, rotary: RotaryTable, kv: LayerKv, between: Any
        ) -> None:
            writes, num_slots = kv.writes, kv.pages.num_slots
            shifted = replace(
                writes,
                slots=(writes.slots + 1) % num_slots,
                by_row=torch.where(writes.by_row < 0, writes.by_row, (writes.by_row + 1) % num_slots),
                highest_slot=num_slots - 1,
            )
            kv = replace(kv, step=replace(kv.step, writes=shifted))
            self.real.rotate_and_write(heads, num_heads, rotary, kv, between)

    _replace_operations(stage, Shifted)


def positions_are_off_by_one_in_decodes(stage: DecoderStage) -> None:
    untyped: Any = stage
    step_arrays = stage.step_arrays

    def shifted(slices: list[SliceLayout], **others: Any) -> StepArrays:
        arrays = step_arrays(slices, **others)
        is_longer = np.zeros(len(arrays.positions), np.int64)
        for begin, end in arrays.prefill_rows:
            is_longer[begin:end] = 1
        positions = arrays.positions + 1 - is_longer
        return replace(arrays, positions=positions, end_position=arrays.end_position + 1)

    untyped.step_arrays = shifted


def pages_of_another_sequence_are_read(stage: DecoderStage) -> None:
    """Affects prefix hits: slices of several tokens after cached ones."""
    _change_slices(stage, lambda item: replace(item, pages=[_OTHER_PAGE, *item.pages[1:]]))


def prefix_hits_are_ignored(stage: DecoderStage) -> None:
    """The page of a hit is treated as a fresh one."""
    _change_slices(stage, lambda item: replace(item, pages=[_FRESH_PAGE, *item.pages[1:]]))


_OTHER_PAGE, _FRESH_PAGE = 1, 31


def _change_slices(stage: DecoderStage, change: Callable[[SliceLayout], SliceLayout]) -> None:
    untyped: Any = stage
    step_arrays = stage.step_arrays

    def changed(slices: list[SliceLayout], **others: Any) -> StepArrays:
        return step_arrays(
            [change(item) if item.first_position and item.num_tokens > 1 else item for item in slices],
            **others,
        )

    untyped.step_arrays = changed


def second_chunks_do_not_see_the_first(stage: DecoderStage) -> None:
    untyped: Any = stage
    step_arrays = stage.step_arrays

    def blind(slices: list[SliceLayout], *, block_size: int, **others: Any) -> StepArrays:
        return step_arrays([_blind(item, block_size) for item in slices], block_size=block_size, **others)

    untyped.step_arrays = blind


def _blind(item: SliceLayout, block_size: int) -> SliceLayout:
    """Hide everything before the slice if it starts at a block boundary."""
    if not item.first_position or item.first_position % block_size:
        return item

    class Blind(SliceLayout):
        def first_visible(self, window: int | None) -> int:
            return self.first_position

    return Blind(**{name: getattr(item, name) for name in SliceLayout.__slots__})


FAULTS: list[Plant] = [
    decode_attention_is_zero,
    keys_and_values_are_not_written,
    decoded_tokens_are_not_written,
    slots_are_off_by_one,
    positions_are_off_by_one_in_decodes,
    pages_of_another_sequence_are_read,
    prefix_hits_are_ignored,
    second_chunks_do_not_see_the_first,
]
