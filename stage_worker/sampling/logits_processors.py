"""Masks, penalties, bias and log-probabilities on rows of logits.

The cost is proportional to the distinct tokens of the histories, not to the vocabulary, and zero for
sequences without penalties. Arithmetic is float32, one operation per step, so that results do not depend
on the batch.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wire.sampling import StepSampling
from wire.steps import TokenLogprobs


def non_finite_rows(logits: Tensor) -> list[int]:
    """Rows of `logits` [n, vocab_size] with a NaN or an infinity; overflowing sums are checked again."""
    suspects = torch.nonzero(~torch.isfinite(logits.sum(dim=-1))).flatten().tolist()
    return [row for row in suspects if not bool(torch.isfinite(logits[row]).all())]


@dataclass(frozen=True, slots=True)
class RowEntries:
    """Entries of `scores` (contiguous [n, vocab_size]) at flat `index`, `lengths` [len(rows)] per row."""

    scores: Tensor
    index: Tensor
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, scores: Tensor, rows: Sequence[int], ids: Sequence[NDArray[np.int64]]) -> "RowEntries":
        """Select `ids` of each row. `write` requires distinct ids per row; `fill` does not."""
        lengths = np.array([len(row_ids) for row_ids in ids], dtype=np.int64)
        offsets = np.array(rows, dtype=np.int64) * scores.shape[-1]
        index = np.concatenate(ids) + np.repeat(offsets, lengths)
        return cls(scores, torch.from_numpy(index).to(scores.device), lengths)

    def read(self) -> Tensor:
        """Copy of the entries, [number of entries]."""
        return self.scores.view(-1).index_select(0, self.index)

    def write(self, values: Tensor) -> None:
        """Set the entries to `values` [number of entries]."""
        self.scores.view(-1).index_copy_(0, self.index, values)

    def fill(self, value: float) -> None:
        self.scores.view(-1).index_fill_(0, self.index, value)

    def spread(self, values: Sequence[float]) -> Tensor:
        """One value per row, repeated for each of its entries; float32 like the scores."""
        return self.tensor(np.repeat(np.array(values, dtype=np.float32), self.lengths))

    def tensor(self, values: NDArray[np.float32]) -> Tensor:
        """One value per entry, on the scores' device."""
        return torch.from_numpy(values).to(self.scores.device)


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], num_top: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities per row of `logits` (float32 [n, vocab_size], all finite).

    A row has entries for `tokens[row]` and for the `num_top[row]` most likely tokens, equals in the order
    of their ids. The log-probability is the logarithm of the softmax in float32; rank is 1 + the number of
    more likely tokens.
    """
    logprobs = logits.log_softmax(dim=-1)
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None]
    ranks = (logits > logits.gather(-1, ids)).sum(dim=-1) + 1
    top_ids = top_tokens(logits, min(max(num_top), logits.shape[-1]))
    columns = (tokens, logprobs.gather(-1, ids)[:, 0].tolist(), ranks.tolist())
    tops = zip(top_ids.tolist(), logprobs.gather(-1, top_ids).tolist(), num_top, strict=True)
    return tuple(
        TokenLogprobs(token, logprob, rank, tuple(zip(row_ids[:count], values[:count], strict=True)))
        for (token, logprob, rank), (row_ids, values, count) in zip(
            zip(*columns, strict=True), tops, strict=True
        )
    )


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """Ids [n, count] of the largest of each row, the largest first, the lowest ids among equals."""
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    values, candidates = torch.topk(logits, min(count + 1, logits.shape[-1]))
    ids, order = candidates[:, :count].sort(dim=-1)
    ids = ids.gather(-1, values.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices)
    if count < logits.shape[-1]:
        for row in torch.nonzero(values[:, count - 1] == values[:, count])[:, 0].tolist():
            ids[row] = _top_tokens_of_row(logits[row], values[row, count - 1], count)
    return ids


def _top_tokens_of_row(logits: Tensor, smallest: Tensor, count: int) -> Tensor:
    """Replaces topk's arbitrary choice among equals by the lowest ids."""
    ids = torch.nonzero(logits >= smallest)[:, 0]
    return ids[logits[ids].sort(descending=True, stable=True).indices[:count]]


_NONE = np.empty(0, dtype=np.int64)


class SequenceMasks:
    """Tokens that one sequence may not sample next; keeps as much history as its longest bad word needs."""

    def __init__(self, sampling: StepSampling, tokens: Sequence[int], num_generated: int) -> None:
        """`tokens` are the prompt and the `num_generated` tokens after it."""
        self.allowed = _ids(sampling.allowed_token_ids) if sampling.allowed_token_ids else None
        self._min_tokens = sampling.min_tokens
        self._num_generated = num_generated
        self._hold_back = _ids(sampling.min_tokens_hold_back)
        self._always_bad = _ids({word[0] for word in sampling.bad_words if len(word) == 1})
        self._endings: dict[int, list[tuple[int, ...]]] = {}
        for word in sampling.bad_words:
            if len(word) > 1:
                self._endings.setdefault(word[-2], []).append(word)
        longest = max((len(word) for word in sampling.bad_words), default=1)
        self._tail = deque(tokens[max(0, len(tokens) - longest + 1) :], maxlen=longest - 1)

    @property
    def holds_back(self) -> bool:
        """Fewer than min_tokens are generated."""
        return self._num_generated < self._min_tokens

    def add(self, token: int) -> None:
        """Append a generated token."""
        self._num_generated += 1
        self._tail.append(token)

    def banned(self) -> NDArray[np.int64]:
        """Token ids, possibly with repetitions."""
        parts = [self._always_bad] if len(self._always_bad) else []
        if self.holds_back:
            parts.append(self._hold_back)
        if self._tail and (words := self._endings.get(self._tail[-1])):
            parts.append(_ids(word[-1] for word in words if self._ends_with(word[:-1])))
        return np.concatenate(parts) if parts else _NONE

    def names(self) -> list[str]:
        """Parameters that currently ban tokens."""
        named = {
            "allowed_token_ids": self.allowed is not None,
            "bad_words": len(self._always_bad) > 0 or bool(self._endings),
            "min_tokens": self.holds_back and len(self._hold_back) > 0,
        }
        return [name for name, is_used in named.items() if is_used]

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return len(tokens) <= len(self._tail) and tuple(self._tail)[-len(tokens) :] == tokens


def masks_for(sampling: StepSampling, tokens: Sequence[int], num_prompt_tokens: int) -> SequenceMasks | None:
    """None if no token is ever masked."""
    holds_back = sampling.min_tokens > 0 and sampling.min_tokens_hold_back
    if not (sampling.allowed_token_ids or sampling.bad_words or holds_back):
        return None
    return SequenceMasks(sampling, tokens, len(tokens) - num_prompt_tokens)


def mask(scores: Tensor, rows: Sequence[int], masks: Sequence[SequenceMasks]) -> None:
    """Set disallowed tokens to -inf, in place: `rows` of `scores` (contiguous float32 [n, vocab_size])."""
    limited = [(row, each.allowed) for row, each in zip(rows, masks, strict=True) if each.allowed is not None]
    if limited:
        entries = RowEntries.of(scores, [row for row, _ in limited], [ids for _, ids in limited])
        allowed = entries.read()
        scores.index_fill_(0, torch.tensor([row for row, _ in limited], device=scores.device), -math.inf)
        entries.write(allowed)
    banned = [(row, ids) for row, each in zip(rows, masks, strict=True) if len(ids := each.banned())]
    if banned:
        RowEntries.of(scores, [row for row, _ in banned], [ids for _, ids in banned]).fill(-math.inf)


def _ids(tokens: Iterable[int]) -> NDArray[np.int64]:
    return np.unique(np.fromiter(tokens, dtype=np.int64))


_FIRST_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Bias:
    """logit_bias of one sequence: distinct token ids [m], and their biases [m]."""

    ids: NDArray[np.int64]
    values: NDArray[np.float32]

    @classmethod
    def of(cls, sampling: StepSampling) -> "Bias | None":
        """None without biases."""
        if not sampling.logit_bias:
            return None
        ids, values = zip(*sampling.logit_bias, strict=True)
        return cls(np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32))


class TokenCounts:
    """The distinct tokens of a sequence, with the number of times each was generated (0: prompt only)."""

    def __init__(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        tokens = np.fromiter((*prompt, *generated), dtype=np.int64)
        ids, inverse = np.unique(tokens, return_inverse=True)
        counts = np.bincount(inverse[len(prompt) :], minlength=len(ids))
        self._size = len(ids)
        self._ids = _grown(ids, self._size + _FIRST_CAPACITY)
        self._counts = _grown(counts.astype(np.int64), self._size + _FIRST_CAPACITY)
        self._slots = {token: slot for slot, token in enumerate(ids.tolist())}

    def add(self, token: int) -> None:
        """Count a generated token."""
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
        """Distinct tokens [m]."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        """[m]: how often each of `ids` was generated."""
        return self._counts[: self._size]


def counts_for(sampling: StepSampling, tokens: Sequence[int], num_prompt_tokens: int) -> TokenCounts | None:
    """Token counts that the penalties of `sampling` need; None without penalties."""
    penalises_generated = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
    if sampling.repetition_penalty == 1.0 and not penalises_generated:
        return None
    prompt = tokens[:num_prompt_tokens] if sampling.repetition_penalty != 1.0 else ()
    return TokenCounts(prompt, tokens[num_prompt_tokens:])


def add_bias(scores: Tensor, rows: Sequence[int], biases: Sequence[Bias]) -> None:
    """Add logit_bias to `rows` of `scores` (contiguous float32 [n, vocab_size]), in place."""
    if not rows:
        return
    entries = RowEntries.of(scores, rows, [bias.ids for bias in biases])
    entries.write(entries.read() + entries.tensor(np.concatenate([bias.values for bias in biases])))


def penalise(
    scores: Tensor, rows: Sequence[int], counts: Sequence[TokenCounts], samplings: Sequence[StepSampling]
) -> None:
    """Apply penalties in place to `rows` of `scores` (contiguous float32 [n, vocab_size]).

    repetition_penalty applies to all tokens of `counts`, then frequency_penalty and presence_penalty to
    generated ones.
    """
    if not rows:
        return
    entries = RowEntries.of(scores, rows, [row_counts.ids for row_counts in counts])
    values = entries.read()
    if any(sampling.repetition_penalty != 1.0 for sampling in samplings):
        values = _repetition_penalised(
            values, entries.spread([sampling.repetition_penalty for sampling in samplings])
        )
    if any(sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0 for sampling in samplings):
        subtracted = [_subtracted(each.counts, s) for each, s in zip(counts, samplings, strict=True)]
        values = values - entries.tensor(np.concatenate(subtracted))
    entries.write(values)


def _repetition_penalised(values: Tensor, penalties: Tensor) -> Tensor:
    """As transformers' RepetitionPenaltyLogitsProcessor; finite for large values and small penalties."""
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
