"""Masks, penalties, bias and log-probabilities on rows of logits.

The cost is proportional to the distinct tokens of the histories, not to the vocabulary, and zero for
sequences without penalties. Arithmetic is float32, one operation per step, so that results do not depend
on the batch.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wire.sampling import StepSampling
from wire.steps import TokenLogprobs

Place = Callable[[NDArray[Any]], Tensor]
"""Returns an array of the host on the device of the scores."""


def non_finite_rows(logits: Tensor) -> list[int]:
    """Rows of `logits` [n, vocab_size] with a NaN or an infinity; overflowing sums are checked again."""
    suspects = torch.nonzero(~torch.isfinite(logits.sum(dim=-1))).flatten().tolist()
    return [row for row in suspects if not bool(torch.isfinite(logits[row]).all())]


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

    @property
    def most_entries(self) -> int:
        """At most as many ids are allowed or banned for one token."""
        num_allowed = 0 if self.allowed is None else len(self.allowed)
        num_endings = sum(len(words) for words in self._endings.values())
        return num_allowed + len(self._always_bad) + len(self._hold_back) + num_endings

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


@dataclass(frozen=True, slots=True)
class SequenceEdits:
    """What changes the logits of one sequence before it is sampled, except for its grammar."""

    sampling: StepSampling
    bias: Bias | None
    counts: TokenCounts | None
    masks: SequenceMasks | None

    @classmethod
    def of(
        cls, sampling: StepSampling, tokens: Sequence[int], num_prompt_tokens: int
    ) -> "SequenceEdits | None":
        """The edits after `tokens`, of which `num_prompt_tokens` are the prompt; None without any."""
        bias = Bias.of(sampling)
        counts = counts_for(sampling, tokens, num_prompt_tokens)
        masks = masks_for(sampling, tokens, num_prompt_tokens)
        if bias is None and counts is None and masks is None:
            return None
        return cls(sampling, bias, counts, masks)

    @property
    def most_bytes(self) -> int:
        """Upper bound of the sequence's part of `LogitEdits.arrays`."""
        num_biased = 0 if self.bias is None else len(self.bias.ids)
        num_counted = 0 if self.counts is None else len(self.counts.ids)
        num_masked = 0 if self.masks is None else self.masks.most_entries
        return 12 * num_biased + 24 * num_counted + 8 * num_masked + 8

    def add(self, token: int) -> None:
        """Append a generated token."""
        if self.counts is not None:
            self.counts.add(token)
        if self.masks is not None:
            self.masks.add(token)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries of scores [n, vocab_size] at flat `index` int64 [m], with `columns` float32 [m] of operands."""

    index: NDArray[np.int64]
    columns: tuple[NDArray[np.float32], ...] = ()

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.index, *self.columns


class LogitEdits:
    """Bias, penalties and masks of the rows of a step, made before their logits.

    `arrays` must be on the device before `apply`. Without rows they are empty, and nothing is applied.
    """

    def __init__(self, edits: Mapping[int, SequenceEdits], vocab_size: int) -> None:
        """`edits` by row of scores [n, vocab_size]."""
        self._offsets = {row: row * vocab_size for row in edits}
        self._bias = self._entries(
            {row: (each.bias.ids, each.bias.values) for row, each in edits.items() if each.bias is not None}
        )
        counted = {
            row: (each.counts, each.sampling) for row, each in edits.items() if each.counts is not None
        }
        self._repeated = self._entries(
            {
                row: (counts.ids, np.full(len(counts.ids), sampling.repetition_penalty, np.float32))
                for row, (counts, sampling) in counted.items()
                if sampling.repetition_penalty != 1.0
            }
        )
        self._subtracted = self._entries(
            {
                row: (counts.ids, _subtracted(counts.counts, sampling))
                for row, (counts, sampling) in counted.items()
                if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
            }
        )
        masks = {row: each.masks for row, each in edits.items() if each.masks is not None}
        limited = {row: (each.allowed,) for row, each in masks.items() if each.allowed is not None}
        self._limited_rows = np.array(list(limited), np.int64)
        self._allowed = self._entries(limited)
        self._banned = self._entries({row: (each.banned(),) for row, each in masks.items()})

    @property
    def arrays(self) -> Iterator[NDArray[Any]]:
        if self._allowed is not None:
            yield self._limited_rows
        for entries in (self._bias, self._repeated, self._subtracted, self._allowed, self._banned):
            if entries is not None:
                yield from entries.arrays

    def apply(self, scores: Tensor, place: Place) -> None:
        """Edit contiguous float32 `scores` [n, vocab_size] in place; nothing waits for a device.

        Each operation is rounded to float32 by itself, so that results do not depend on the batch.
        """
        flat = scores.view(-1)
        for entries, operation in (
            (self._bias, torch.add),
            (self._repeated, _repetition_penalised),
            (self._subtracted, torch.sub),
        ):
            if entries is not None:
                index, operand = (place(array) for array in entries.arrays)
                flat.index_copy_(0, index, operation(flat.index_select(0, index), operand))
        if self._allowed is not None:
            index = place(self._allowed.index)
            allowed = flat.index_select(0, index)
            scores.index_fill_(0, place(self._limited_rows), -math.inf)
            flat.index_copy_(0, index, allowed)
        if self._banned is not None:
            flat.index_fill_(0, place(self._banned.index), -math.inf)

    def _entries(self, columns: Mapping[int, tuple[NDArray[Any], ...]]) -> _Entries | None:
        """The entries of rows with their ids, and operands of each; None for none."""
        parts = {row: arrays for row, arrays in columns.items() if len(arrays[0])}
        if not parts:
            return None
        ids = [arrays[0] + self._offsets[row] for row, arrays in parts.items()]
        operands = list(zip(*(arrays[1:] for arrays in parts.values()), strict=True))
        return _Entries(np.concatenate(ids), tuple(np.concatenate(column) for column in operands))


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


MAX_SCORED_ELEMENTS = 1 << 22
"""Logits per block: 16 MiB of float32, and about three times that for intermediate results."""


class NonFiniteLogits(Exception):
    def __init__(self, position: int) -> None:
        super().__init__(f"logits for position {position} are not finite")
        self.position = position


def score(
    hidden: Tensor,
    tokens: Sequence[int],
    head: Callable[[Tensor], Tensor],
    *,
    first_position: int,
    num_top: int,
    vocab_size: int,
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of `tokens`, which start at `first_position`.

    Args:
        hidden: [len(tokens), hidden_size], the rows that predict the tokens.
        head: Computes logits float32 [m, vocab_size] of m rows.

    Raises NonFiniteLogits.
    """
    num_rows = max(1, MAX_SCORED_ELEMENTS // vocab_size)
    scored: list[TokenLogprobs] = []
    for first in range(0, len(tokens), num_rows):
        wanted = tokens[first : first + num_rows]
        logits = head(hidden[first : first + len(wanted)])
        for row in non_finite_rows(logits):
            raise NonFiniteLogits(first_position + first + row)
        scored += token_logprobs(logits, wanted, [num_top] * len(wanted))
    return tuple(scored)
