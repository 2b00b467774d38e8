"""Summary of a reference's logits: the most likely tokens and the following ones, block by block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stage_worker.loading.reference_copies import EXACT, NUM_COPIES, ROUNDED, roundings_of
from stage_worker.sampling.logits_processors import non_finite_rows
from wire.reference import TextReference
from wire.steps import TokenLogprobs


class NonFiniteReference(ValueError):
    def __init__(self, text: int, position: int) -> None:
        super().__init__(f"logits for position {position} of text {text} are not finite")
        self.text, self.position = text, position


class HeadSummary:
    """Log-probabilities of the most likely tokens and of the following tokens, from blocks of logits.

    Each block is [copies, n, m], logits of m tokens, for the n tokens of all texts; see `reference_copies`.
    Sums are float64.
    """

    def __init__(self, texts: Sequence[Sequence[int]], *, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        # No token follows a text's last one.
        following = [token for text in texts for token in (*text[1:], -1)]
        self._following = torch.tensor(following)
        size = len(following)
        self._of_following = torch.zeros((NUM_COPIES, size), dtype=torch.float64)
        self._highest = torch.full((NUM_COPIES, size), -math.inf, dtype=torch.float64)
        self._mass = torch.zeros((NUM_COPIES, size), dtype=torch.float64)
        self._sum = torch.zeros(size, dtype=torch.float64)
        self._sum_of_squares = torch.zeros(size, dtype=torch.float64)
        self._vocab_size = 0
        self._top = torch.empty((NUM_COPIES, size, 0), dtype=torch.float64)
        self._top_ids = torch.empty((size, 0), dtype=torch.int64)

    def add(self, first: int, logits: Tensor) -> None:
        """Add `logits` float32 [copies, n, m] of the tokens from `first` on. Raises NonFiniteReference."""
        for row in non_finite_rows(logits[EXACT]):
            raise NonFiniteReference(*self._place(row))
        wide = logits.double()
        highest = torch.maximum(self._highest, wide.amax(dim=2))
        self._mass = self._mass * (self._highest - highest).exp() + (wide - highest[..., None]).exp().sum(2)
        self._highest = highest
        self._sum += wide[EXACT].sum(dim=1)
        self._sum_of_squares += wide[EXACT].square().sum(dim=1)
        self._vocab_size += wide.shape[2]
        self._add_following(first, wide)
        self._add_top(first, wide)

    @property
    def logit_spread(self) -> float:
        """Standard deviation over the vocabulary, as the root mean square over the rows."""
        mean = self._sum / self._vocab_size
        variances = (self._sum_of_squares / self._vocab_size - mean.square()).clamp_min(0.0)
        return math.sqrt(float(variances.mean()))

    def texts(self) -> Iterator[TextReference]:
        """Each text with one row per token: the following token, or the most likely one after its last."""
        rows, changes, first = self._rows(), self._changes(), 0
        for text in self._texts:
            end = first + len(text)
            own = tuple(itertools.islice(rows, len(text)))
            yield TextReference(tuple(text), own, roundings_of(changes[:, first:end]))
            first = end

    def _rows(self) -> Iterator[TokenLogprobs]:
        top, following = (copies[EXACT].tolist() for copies in self._logprobs())
        for token, logprob, ids, values in zip(
            self._following.tolist(), following, self._top_ids.tolist(), top, strict=True
        ):
            pairs = tuple(zip(ids, values, strict=True))
            yield TokenLogprobs(*(pairs[0] if token < 0 else (token, logprob)), 0, pairs)

    def _changes(self) -> Tensor:
        """Root mean square change by rounding of each row, [NUM_COPIES - 1, n]."""
        top, following = self._logprobs()
        listed = torch.cat((top, following[..., None]), dim=-1)
        return (listed[ROUNDED:] - listed[EXACT]).square().mean(dim=-1).sqrt()

    def _logprobs(self) -> tuple[Tensor, Tensor]:
        """Of the most likely tokens [copies, n, num_top], and of the following or else most likely ones
        [copies, n].
        """
        mass = self._highest + self._mass.log()
        following = torch.where(self._following < 0, self._top[..., 0], self._of_following)
        return self._top - mass[..., None], following - mass

    def _add_following(self, first: int, wide: Tensor) -> None:
        rows = torch.nonzero((self._following >= first) & (self._following < first + wide.shape[2]))[:, 0]
        self._of_following[:, rows] = wide[:, rows, self._following[rows] - first]

    def _add_top(self, first: int, wide: Tensor) -> None:
        chosen = wide[EXACT].topk(min(self._num_top, wide.shape[2]), dim=1).indices
        values = torch.cat((self._top, wide.gather(2, chosen.expand(NUM_COPIES, -1, -1))), dim=2)
        ids = torch.cat((self._top_ids, chosen + first), dim=1)
        kept = values[EXACT].topk(min(self._num_top, ids.shape[1]), dim=1).indices
        self._top = values.gather(2, kept.expand(NUM_COPIES, -1, -1))
        self._top_ids = ids.gather(1, kept)

    def _place(self, row: int) -> tuple[int, int]:
        """Text and position of the token that follows row `row`."""
        for number, text in enumerate(self._texts):
            if row < len(text):
                return number, row + 1
            row -= len(text)
        raise AssertionError("more rows than tokens")
