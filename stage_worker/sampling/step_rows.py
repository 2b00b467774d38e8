"""The rows of a step that are sampled: a device samples them without a look at them.

What a row needs is made before its logits, and uploaded with the step. A token is settled when it certainly
is the one that a CPU samples; the others need a look, once the step has ended.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from stage_worker.sampling.logits_processors import LogitEdits, Place, SequenceEdits
from stage_worker.sampling.random_choice import Draw, RandomRows, argmax_rows

MAX_BLOCK_ELEMENTS = 1 << 20
"""Logits per block on a CPU: fits the processor's caches, and takes 8 MiB in float64."""
OPEN = -1
"""In the place of a token: the row needs a look."""


def rows_per_block(vocab_size: int, device: torch.device) -> int:
    """Rows that are sampled together; a device takes all at once."""
    if device.type != "cpu":
        return 1 << 30
    return max(MAX_BLOCK_ELEMENTS // vocab_size, torch.get_num_threads())


class _Block:
    """Rows [first, end) of a step that are sampled together."""

    def __init__(
        self,
        rows: slice,
        draws: Mapping[int, Draw],
        edits: Mapping[int, SequenceEdits],
        vocab_size: int,
    ) -> None:
        self.rows = rows
        drawn = {row - rows.start: draw for row, draw in draws.items() if rows.start <= row < rows.stop}
        edited = {row - rows.start: edit for row, edit in edits.items() if rows.start <= row < rows.stop}
        self.drawn = RandomRows(drawn, vocab_size) if drawn else None
        self._edits = LogitEdits(edited, vocab_size) if edited else None

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        if self._edits is not None:
            yield from self._edits.arrays
        if self.drawn is not None:
            yield from self.drawn.arrays

    def choose(self, logits: Tensor, place: Place) -> Tensor:
        """Tokens int64 [n] of `logits` [n, vocab_size]."""
        are_settled = torch.isfinite(logits.sum(dim=-1))
        if self._edits is not None:
            logits = logits.clone(memory_format=torch.contiguous_format)
            self._edits.apply(logits, place)
        maxima, tokens = argmax_rows(logits)
        if self._edits is not None:
            are_settled &= ~torch.isneginf(maxima)
        if self.drawn is not None:
            are_settled &= self.drawn.sample(logits, maxima, tokens, place)
        return torch.where(are_settled, tokens, OPEN)


class StepRows:
    """Parameters of the rows; `arrays` must be on the device before `choose`."""

    def __init__(
        self,
        num_rows: int,
        draws: Mapping[int, Draw],
        edits: Mapping[int, SequenceEdits],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`draws` and `edits` by row; `draws` with temperatures above 0, the other rows are greedy."""
        size = rows_per_block(vocab_size, device)
        self._blocks = [
            _Block(slice(first, min(first + size, num_rows)), draws, edits, vocab_size)
            for first in range(0, num_rows, size)
        ]

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        for block in self._blocks:
            yield from block.arrays

    def choose(self, logits: Tensor, place: Place) -> Tensor:
        """Tokens int64 [n] of `logits` float32 [n, vocab_size], or OPEN; nothing waits for a device."""
        chosen = [block.choose(logits[block.rows], place) for block in self._blocks]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def look_again(self, row: int, logits: Tensor) -> int | None:
        """The token of an OPEN `row` without edits, from its `logits` [1, vocab_size] on the host.

        None if they are not finite. Few rows are open: their logits overflow as a sum, or many tokens pass
        their filters.
        """
        if not bool(torch.isfinite(logits).all()):
            return None
        block = next(block for block in self._blocks if block.rows.start <= row < block.rows.stop)
        maxima, likeliest = argmax_rows(logits)
        row -= block.rows.start
        if block.drawn is None or row not in block.drawn:
            return int(likeliest)
        return block.drawn.sample_again(row, logits, maxima)
