"""The rows of a step that are sampled: a device samples them without a look at them.

What a row needs is made before its logits, and uploaded with the step. A token is settled when it certainly
is the one that a CPU samples; the others need a look, once the step has ended.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage_worker.model.kernels import load_triton
from stage_worker.sampling.grammar_masks import MaskRows
from stage_worker.sampling.logits_processors import LogitEdits, Place, SequenceEdits
from stage_worker.sampling.random_choice import (
    Draw,
    KnownParameters,
    RandomRows,
    argmax_rows,
    sample_at_full_width,
    uniform_samples,
)
from wire.sampling import StepSampling

MAX_BLOCK_ELEMENTS = 1 << 20
"""Logits per block on a CPU: fits the processor's caches, and takes 8 MiB in float64."""
OPEN, NOT_FINITE = -1, -2
"""In the place of a token: the row needs a look, or certainly has a NaN or an infinity."""


_KERNEL_PARAMETERS = KnownParameters("temperature", "seed", "top_k", "top_p", "min_p")
"""What `_columns` has for the Triton kernels."""


def rows_per_block(vocab_size: int, device: torch.device) -> int:
    """Rows that are sampled together; a device takes all at once."""
    if device.type != "cpu":
        return 1 << 30
    return max(MAX_BLOCK_ELEMENTS // vocab_size, torch.get_num_threads())


class _Edits:
    """Edits of some rows, and then masks of grammars of some."""

    def __init__(
        self, edits: Mapping[int, SequenceEdits], masks: Mapping[int, NDArray[np.uint8]], vocab_size: int
    ) -> None:
        parts = (LogitEdits(edits, vocab_size) if edits else None, MaskRows(masks) if masks else None)
        self._parts = [part for part in parts if part is not None]

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        for part in self._parts:
            yield from part.arrays

    def apply(self, scores: Tensor, place: Place) -> None:
        """See `LogitEdits.apply`."""
        for part in self._parts:
            part.apply(scores, place)


class _Block:
    """Rows that are sampled together, by torch's operators."""

    def __init__(self, draws: Mapping[int, Draw], edits: _Edits | None, vocab_size: int) -> None:
        self._drawn = RandomRows(draws, vocab_size) if draws else None
        self._edits = edits

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        if self._edits is not None:
            yield from self._edits.arrays
        if self._drawn is not None:
            yield from self._drawn.arrays

    def choose(self, logits: Tensor, flags: Tensor | None, place: Place) -> Tensor:
        assert flags is None, "flags are of kernels"
        are_settled = torch.isfinite(logits.sum(dim=-1))
        scores = _edited(logits, self._edits, place)
        maxima, tokens = argmax_rows(scores)
        if scores is not logits:
            are_settled &= ~torch.isneginf(maxima)
        if self._drawn is not None:
            are_settled &= self._drawn.sample(scores, maxima, tokens, place)
        return torch.where(are_settled, tokens, OPEN)


Columns = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Parameters of rows: temperature (0: the likeliest token), top_p, min_p and uniform number [4, n], and top_k
[n], see `triton_kernels.sampling.choose`.
"""


def _columns(num_rows: int, draws: Mapping[int, Draw], vocab_size: int) -> Columns:
    reals, top_k = np.zeros((4, num_rows)), np.full(num_rows, vocab_size, np.int64)
    if draws:
        rows, sampled = list(draws), list(draws.values())
        parameters = [
            (draw.sampling.temperature, draw.sampling.top_p, draw.sampling.min_p) for draw in sampled
        ]
        reals[:3, rows], reals[3, rows] = np.array(parameters).T, uniform_samples(sampled)
        top_k[rows] = [min(draw.sampling.top_k or vocab_size, vocab_size) for draw in sampled]
    return reals, top_k


def greedy_columns(num_rows: int, vocab_size: int) -> Columns:
    """Of rows that all take the likeliest token."""
    return _columns(num_rows, {}, vocab_size)


def choose_by_columns(logits: Tensor, reals: Tensor, top_k: Tensor, flags: Tensor | None) -> Tensor:
    """Tokens int64 [n] of rows without edits, see `StepRows.choose`; the same work for all parameters."""
    tokens: Tensor = load_triton("sampling").choose(logits, logits, reals, top_k, flags)
    return tokens


class _KernelRows:
    """All rows of a step, sampled by Triton kernels."""

    def __init__(
        self, num_rows: int, draws: Mapping[int, Draw], edits: _Edits | None, vocab_size: int
    ) -> None:
        self._edits = edits
        self._columns = _columns(num_rows, draws, vocab_size) if draws else None

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        if self._edits is not None:
            yield from self._edits.arrays
        if self._columns is not None:
            yield from self._columns

    def choose(self, logits: Tensor, flags: Tensor | None, place: Place) -> Tensor:
        reals, top_k = (None, None) if self._columns is None else map(place, self._columns)
        tokens: Tensor = load_triton("sampling").choose(
            logits, _edited(logits, self._edits, place), reals, top_k, flags
        )
        return tokens


def _edited(logits: Tensor, edits: _Edits | None, place: Place) -> Tensor:
    """`logits` with `edits`; themselves without."""
    if edits is None:
        return logits
    scores = logits.clone(memory_format=torch.contiguous_format)
    edits.apply(scores, place)
    return scores


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
        by_kernels: bool = False,
        masks: Mapping[int, NDArray[np.uint8]] | None = None,
    ) -> None:
        """`draws`, `edits` and `masks` of grammars by row; rows without draws are greedy, and draws have
        temperatures above 0.

        Triton kernels sample all rows at once; see `takes` for their draws.
        """
        self._draws = draws
        self._vocab_size = vocab_size
        masks = masks or {}
        self._are_columns = by_kernels and not edits and not masks
        size = num_rows if by_kernels else rows_per_block(vocab_size, device)
        self._blocks: list[tuple[slice, _Block | _KernelRows]] = []
        for first in range(0, num_rows, size):
            rows = range(first, min(first + size, num_rows))
            drawn = {row - first: draws[row] for row in rows if row in draws}
            edited = {row - first: edits[row] for row in rows if row in edits}
            masked = {row - first: masks[row] for row in rows if row in masks}
            block_edits = _Edits(edited, masked, vocab_size) if edited or masked else None
            self._blocks.append(
                (
                    slice(rows.start, rows.stop),
                    _KernelRows(num_rows, drawn, block_edits, vocab_size)
                    if by_kernels
                    else _Block(drawn, block_edits, vocab_size),
                )
            )

    @staticmethod
    def takes(sampling: StepSampling, *, by_kernels: bool) -> bool:
        """Whether no parameter of such a row would be ignored."""
        return not by_kernels or _KERNEL_PARAMETERS.suffice_for(sampling)

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        for _, block in self._blocks:
            yield from block.arrays

    def columns(self, num_rows: int) -> Columns | None:
        """Parameters of the rows, and of greedy ones after them; None if the rows need more than these."""
        return _columns(num_rows, self._draws, self._vocab_size) if self._are_columns else None

    def choose(self, logits: Tensor, flags: Tensor | None, place: Place) -> Tensor:
        """Tokens int64 [n] of `logits` float32 [n, vocab_size], or OPEN, or NOT_FINITE.

        `flags` come from `PipelineStage.picked_logits`. Nothing waits for a device.
        """
        chosen = [block.choose(logits[rows], flags, place) for rows, block in self._blocks]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def look_again(self, row: int, logits: Tensor) -> int:
        """The token of an OPEN `row` without edits, from its `logits` [1, vocab_size] on the host.

        NOT_FINITE if they are not. Few rows are open: their logits overflow as a sum, or many tokens pass
        their filters.
        """
        if not bool(torch.isfinite(logits).all()):
            return NOT_FINITE
        maxima, likeliest = argmax_rows(logits)
        draw = self._draws.get(row)
        return int(likeliest) if draw is None else sample_at_full_width(draw, logits, maxima)
