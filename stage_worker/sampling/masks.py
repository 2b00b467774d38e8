"""Tokens that may not be sampled at all, by bad_words, min_tokens_hold_back and allowed_token_ids."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stage_worker.sampling.row_entries import RowEntries
from wire.steps import StepSampling

_NONE = np.empty(0, dtype=np.int64)


class SequenceMasks:
    """What one sequence may not sample next. Knows as much of the history as its longest bad word needs."""

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
        """One more generated token."""
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
        """Which parameters ban tokens now."""
        named = {
            "allowed_token_ids": self.allowed is not None,
            "bad_words": len(self._always_bad) > 0 or bool(self._endings),
            "min_tokens": self.holds_back and len(self._hold_back) > 0,
        }
        return [name for name, is_used in named.items() if is_used]

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return len(tokens) <= len(self._tail) and tuple(self._tail)[-len(tokens) :] == tokens


def masks_for(sampling: StepSampling, tokens: Sequence[int], num_prompt_tokens: int) -> SequenceMasks | None:
    """None where no token is ever masked."""
    holds_back = sampling.min_tokens > 0 and sampling.min_tokens_hold_back
    if not (sampling.allowed_token_ids or sampling.bad_words or holds_back):
        return None
    return SequenceMasks(sampling, tokens, len(tokens) - num_prompt_tokens)


def mask(scores: Tensor, rows: Sequence[int], masks: Sequence[SequenceMasks]) -> None:
    """Makes what is not allowed -inf, in place: `rows` of `scores` (contiguous float32 [n, vocab_size])."""
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
