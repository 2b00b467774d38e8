"""Which tokens a mock stage may sample: allowed ids, bad words, `min_tokens` and bias, without logits."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain

from wire.steps import StartRecord, StepSampling


class MockConstraints:
    """Token constraints of one sequence, and as much of its history as they need.

    A mock's logits are all equal, so the highest bias wins. Among equals the order begins at the token that
    the mock would sample unasked, and tokens that end a sequence come last.
    """

    def __init__(self, record: StartRecord, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        sampling = record.sampling
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tiers = _tiers(sampling, vocab_size)
        self._hold_back = frozenset(sampling.min_tokens_hold_back)
        self._min_tokens = sampling.min_tokens
        self._num_generated = len(record.tokens) - record.num_prompt_tokens
        self._bad_words = sampling.bad_words
        longest = max((len(word) for word in sampling.bad_words), default=1)
        self._tail = deque(record.tokens[max(0, len(record.tokens) - longest + 1) :], maxlen=longest - 1)

    @staticmethod
    def are_in(sampling: StepSampling) -> bool:
        """Whether `sampling` limits which tokens may be sampled."""
        holds_back = sampling.min_tokens > 0 and sampling.min_tokens_hold_back
        return bool(sampling.allowed_token_ids or sampling.bad_words or sampling.logit_bias or holds_back)

    def add(self, token: int) -> None:
        """Appends a generated token to the history."""
        self._num_generated += 1
        self._tail.append(token)

    def choose(self, first: int) -> int | None:
        """The token to sample, where `first` begins the order of equals; None where no token is allowed."""
        banned = self._banned()
        for tier in self._tiers:
            best: int | None = None
            for token in tier(first):
                if token in banned:
                    continue
                if token not in self._eos_token_ids:
                    return token
                best = token if best is None else best
            if best is not None:
                return best
        return None

    def _banned(self) -> set[int]:
        tail = tuple(self._tail)
        banned = {
            word[-1]
            for word in self._bad_words
            if len(word) == 1 or (len(word) <= len(tail) + 1 and tail[1 - len(word) :] == word[:-1])
        }
        if self._num_generated < self._min_tokens:
            banned |= self._hold_back
        return banned


_Tier = Callable[[int], Iterator[int]]
"""The tokens of one bias, each once, in cyclic order from the given token on."""


def _tiers(sampling: StepSampling, vocab_size: int) -> list[_Tier]:
    """Highest bias first; a token without one has 0."""
    allowed = sampling.allowed_token_ids
    biases = dict(sampling.logit_bias)
    by_bias: dict[float, list[int]] = {}
    for token in sorted(allowed) if allowed else sorted(biases):
        by_bias.setdefault(biases.get(token, 0.0), []).append(token)
    tiers = {bias: _listed(tokens) for bias, tokens in by_bias.items()}
    if not allowed:
        biased = frozenset(token for token, bias in biases.items() if bias != 0.0)
        tiers[0.0] = _all_but(biased, vocab_size)
    return [tiers[bias] for bias in sorted(tiers, reverse=True)]


def _listed(tokens: Sequence[int]) -> _Tier:
    def tier(first: int) -> Iterator[int]:
        place = bisect_left(tokens, first)
        return chain(tokens[place:], tokens[:place])

    return tier


def _all_but(excluded: Collection[int], vocab_size: int) -> _Tier:
    def tier(first: int) -> Iterator[int]:
        order = chain(range(first, vocab_size), range(first))
        return (token for token in order if token not in excluded)

    return tier
