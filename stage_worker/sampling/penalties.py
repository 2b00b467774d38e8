"""What a sequence's own tokens, and its logit_bias, do to its logits.

Everything here costs in proportion to the distinct tokens of the histories, not to the vocabulary, and
nothing for a sequence without penalties. Arithmetic is float32, one operation per step, so it is the same in
any batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage_worker.sampling.row_entries import RowEntries
from wire.steps import StepSampling

_FIRST_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Bias:
    """logit_bias of one sequence: token ids [m], each once, and what is added to their logits [m]."""

    ids: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, sampling: StepSampling) -> "Bias | None":
        """None where nothing is added."""
        if not sampling.logit_bias:
            return None
        ids, values = zip(*sampling.logit_bias, strict=True)
        return cls(np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32))


class TokenCounts:
    """The distinct tokens of a sequence and how often each was generated (0: in the prompt only)."""

    def __init__(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        tokens = np.fromiter((*prompt, *generated), dtype=np.int64)
        ids, inverse = np.unique(tokens, return_inverse=True)
        counts = np.bincount(inverse[len(prompt) :], minlength=len(ids))
        self._size = len(ids)
        self._ids = _grown(ids, self._size + _FIRST_CAPACITY)
        self._counts = _grown(counts.astype(np.int64), self._size + _FIRST_CAPACITY)
        self._slots = {token: slot for slot, token in enumerate(ids.tolist())}

    def add(self, token: int) -> None:
        """Counts one more generated token."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._size
            if slot == len(self._ids):
                self._ids, self._counts = _grown(self._ids, 2 * slot), _grown(self._counts, 2 * slot)
            self._ids[slot] = token
            self._size += 1
        self._counts[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """[m], each token once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        """[m]: how often each of `ids` was generated."""
        return self._counts[: self._size]


def counts_for(sampling: StepSampling, tokens: Sequence[int], num_prompt_tokens: int) -> TokenCounts | None:
    """What the penalties of `sampling` need to know of `tokens`; None where they do nothing."""
    penalises_generated = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    if sampling.repetition_penalty == 1.0 and not penalises_generated:
        return None
    prompt = tokens[:num_prompt_tokens] if sampling.repetition_penalty != 1.0 else ()
    return TokenCounts(prompt, tokens[num_prompt_tokens:])


def add_bias(scores: Tensor, rows: Sequence[int], biases: Sequence[Bias]) -> None:
    """Adds logit_bias to `rows` of `scores` (contiguous float32 [n, vocab_size]), in place."""
    if not rows:
        return
    entries = RowEntries.of(scores, rows, [each.ids for each in biases])
    entries.write(entries.read() + entries.tensor(np.concatenate([each.values for each in biases])))


def penalise(
    scores: Tensor, rows: Sequence[int], counts: Sequence[TokenCounts], samplings: Sequence[StepSampling]
) -> None:
    """repetition_penalty on all tokens of `counts`, then frequency_penalty and presence_penalty on those that
    were generated; in place on `rows` of `scores` (contiguous float32 [n, vocab_size]).
    """
    if not rows:
        return
    entries = RowEntries.of(scores, rows, [each.ids for each in counts])
    values = entries.read()
    if any(each.repetition_penalty != 1.0 for each in samplings):
        values = _repetition_penalised(
            values, entries.spread([each.repetition_penalty for each in samplings])
        )
    if any(each.frequency_penalty != 0.0 or each.presence_penalty != 0.0 for each in samplings):
        subtracted = [_subtracted(each.counts, s) for each, s in zip(counts, samplings, strict=True)]
        values = values - entries.tensor(np.concatenate(subtracted))
    entries.write(values)


def _repetition_penalised(values: Tensor, penalties: Tensor) -> Tensor:
    """As transformers' RepetitionPenaltyLogitsProcessor; large values stay finite under a small penalty."""
    limit = torch.finfo(values.dtype).max
    return torch.where(values < 0, values * penalties, values / penalties).clamp_(-limit, limit)


def _subtracted(counts: NDArray[np.int64], sampling: StepSampling) -> NDArray[np.float32]:
    """https://platform.openai.com/docs/api-reference/completions: mu[j] - c[j] * frequency - (c[j] > 0) *
    presence.
    """
    penalty = counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
    return penalty.astype(np.float32)


def _grown(values: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    grown = np.zeros(capacity, dtype=np.int64)
    grown[: len(values)] = values
    return grown
