"""Rows whose tokens follow from logits and position alone; a device samples them without a look at them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from stage_worker.sampling.random_choice import Draw, Place, RandomRows, argmax_rows

MAX_BLOCK_ELEMENTS = 1 << 20
"""Logits per block on a CPU: fits the processor's caches, and takes 8 MiB in float64."""
_OPEN = -1
"""In the place of a token: the row needs a second look."""


def rows_per_block(vocab_size: int, device: torch.device) -> int:
    """Rows that are sampled together; a device takes all at once."""
    if device.type != "cpu":
        return 1 << 30
    return max(MAX_BLOCK_ELEMENTS // vocab_size, torch.get_num_threads())


class PlainRows:
    """Parameters of the rows, made before their logits; `arrays` must be on the device before `choose`."""

    def __init__(
        self, draws: Mapping[int, Draw], num_rows: int, *, vocab_size: int, device: torch.device
    ) -> None:
        """`draws` by row, with temperatures above 0; the other rows are greedy."""
        self._num_rows = num_rows
        size = rows_per_block(vocab_size, device)
        self._blocks: list[tuple[slice, RandomRows | None]] = []
        for first in range(0, num_rows, size):
            end = min(first + size, num_rows)
            drawn = {row - first: draws[row] for row in range(first, end) if row in draws}
            rows = RandomRows(drawn, vocab_size) if drawn else None
            self._blocks.append((slice(first, end), rows))

    def __len__(self) -> int:
        return self._num_rows

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        for _, drawn in self._blocks:
            if drawn is not None:
                yield from drawn.arrays

    def choose(self, logits: Tensor, place: Place) -> Tensor:
        """Tokens int64 [n] of `logits` float32 [n, vocab_size], for `settle`; nothing waits for a device."""
        chosen = [_choose(logits[rows], drawn, place) for rows, drawn in self._blocks]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def settle(self, logits: Tensor, tokens: Sequence[int]) -> list[int | None]:
        """The result of `choose` with every token, None for a row that is not finite.

        Few rows need a second look: their logits overflow as a sum, or many tokens pass their filters.
        """
        settled: list[int | None] = list(tokens)
        for rows, drawn in self._blocks:
            for row in range(rows.start, rows.stop):
                if tokens[row] == _OPEN:
                    settled[row] = _look_again(logits[row : row + 1], drawn, row - rows.start)
        return settled


def _choose(logits: Tensor, drawn: RandomRows | None, place: Place) -> Tensor:
    maxima, tokens = argmax_rows(logits)
    are_settled = torch.isfinite(logits.sum(dim=-1))
    if drawn is not None:
        are_settled &= drawn.sample(logits, maxima, tokens, place)
    return torch.where(are_settled, tokens, _OPEN)


def _look_again(logits: Tensor, drawn: RandomRows | None, row: int) -> int | None:
    """Sample `logits` [1, vocab_size], which are those of `row` of its block."""
    if not bool(torch.isfinite(logits).all()):
        return None
    maxima, likeliest = argmax_rows(logits)
    if drawn is None or row not in drawn:
        return int(likeliest)
    return drawn.sample_again(row, logits, maxima)
