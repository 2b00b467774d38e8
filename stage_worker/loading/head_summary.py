"""Summary of a reference's logits: the most likely tokens and the following ones, block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stage_worker.sampling.logits_processors import non_finite_rows
from wire.steps import TokenLogprobs


class NonFiniteReference(ValueError):
    def __init__(self, text: int, position: int) -> None:
        super().__init__(f"logits for position {position} of text {text} are not finite")
        self.text, self.position = text, position


class HeadSummary:
    """Log-probabilities of the most likely tokens and of the following tokens, from blocks of logits.

    Each block is [2, n, m], exact and rounded logits of m tokens, for the n tokens of all texts. Sums are
    float64.
    """

    def __init__(self, texts: Sequence[Sequence[int]], *, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        # No token follows a text's last one.
        following = [token for text in texts for token in (*text[1:], -1)]
        self._following = torch.tensor(following)
        size = len(following)
        self._of_following = torch.zeros((2, size), dtype=torch.float64)
        self._highest = torch.full((2, size), -math.inf, dtype=torch.float64)
        self._mass = torch.zeros((2, size), dtype=torch.float64)
        self._sum = torch.zeros(size, dtype=torch.float64)
        self._sum_of_squares = torch.zeros(size, dtype=torch.float64)
        self._vocab_size = 0
        self._top = torch.empty((2, size, 0), dtype=torch.float64)
        self._top_ids = torch.empty((size, 0), dtype=torch.int64)

    def add(self, first: int, logits: Tensor) -> None:
        """Add `logits` float32 [2, n, m] of the tokens from `first` on. Raises NonFiniteReference."""
        for row in non_finite_rows(logits[0]):
            raise NonFiniteReference(*self._place(row))
        wide = logits.double()
        highest = torch.maximum(self._highest, wide.amax(dim=2))
        self._mass = self._mass * (self._highest - highest).exp() + (wide - highest[..., None]).exp().sum(2)
        self._highest = highest
        self._sum += wide[0].sum(dim=1)
        self._sum_of_squares += wide[0].square().sum(dim=1)
        self._vocab_size += wide.shape[2]
        self._add_following(first, wide)
        self._add_top(first, wide)

    @property
    def logit_spread(self) -> float:
        """Standard deviation over the vocabulary, as the root mean square over the rows."""
        mean = self._sum / self._vocab_size
        variances = (self._sum_of_squares / self._vocab_size - mean.square()).clamp_min(0.0)
        return math.sqrt(float(variances.mean()))

    @property
    def rounding(self) -> float:
        """Root mean square difference between exact and rounded log-probabilities of all listed tokens."""
        top, following = self._logprobs()
        differences = torch.cat(((top[1] - top[0]).flatten(), (following[1] - following[0]).flatten()))
        return math.sqrt(float(differences.square().mean()))

    def rows(self) -> list[TokenLogprobs]:
        """One row per token: the following token, or the most likely one after a text's last token."""
        top, following = (exact_and_rounded[0].tolist() for exact_and_rounded in self._logprobs())
        return [
            TokenLogprobs(
                ids[0] if token < 0 else token,
                values[0] if token < 0 else logprob,
                0,
                tuple(zip(ids, values, strict=True)),
            )
            for token, logprob, ids, values in zip(
                self._following.tolist(), following, self._top_ids.tolist(), top, strict=True
            )
        ]

    def _logprobs(self) -> tuple[Tensor, Tensor]:
        """Of the most likely tokens [2, n, num_top], and of the following or else most likely ones [2, n]."""
        mass = self._highest + self._mass.log()
        following = torch.where(self._following < 0, self._top[..., 0], self._of_following)
        return self._top - mass[..., None], following - mass

    def _add_following(self, first: int, wide: Tensor) -> None:
        rows = torch.nonzero((self._following >= first) & (self._following < first + wide.shape[2]))[:, 0]
        self._of_following[:, rows] = wide[:, rows, self._following[rows] - first]

    def _add_top(self, first: int, wide: Tensor) -> None:
        chosen = wide[0].topk(min(self._num_top, wide.shape[2]), dim=1).indices
        values = torch.cat((self._top, wide.gather(2, chosen.expand(2, -1, -1))), dim=2)
        ids = torch.cat((self._top_ids, chosen + first), dim=1)
        kept = values[0].topk(min(self._num_top, ids.shape[1]), dim=1).indices
        self._top = values.gather(2, kept.expand(2, -1, -1))
        self._top_ids = ids.gather(1, kept)

    def _place(self, row: int) -> tuple[int, int]:
        """Text and position of the token that follows row `row`."""
        for number, text in enumerate(self._texts):
            if row < len(text):
                return number, row + 1
            row -= len(text)
        raise AssertionError("more rows than tokens")


def relative_rounding(hidden: Tensor) -> float:
    """Norm of the rounding difference of hidden states [2, n, width], relative to their norms."""
    exact, rounded = hidden.double()
    norms = exact.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((rounded - exact).norm(dim=1) / norms).square().mean().sqrt())
