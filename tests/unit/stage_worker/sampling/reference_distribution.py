"""The exact distribution of the next token in float64, written from the definitions of the parameters.

Shares nothing with the sampler. A filter takes the scores of the whole vocabulary, natural logarithms up to a
constant, and returns new ones; a token that it takes out has the score -inf. `FILTERS` is their order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wire.sampling import StepSampling

Array = NDArray[np.float64]
Filter = Callable[[Array, "Context"], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Tokens before the sampled one."""

    sampling: StepSampling
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.generated


def probabilities(scores: Array) -> Array:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def only(scores: Array, tokens: Sequence[int] | NDArray[np.intp]) -> Array:
    """Removes all other tokens."""
    left = np.full_like(scores, -np.inf)
    left[list(tokens)] = scores[list(tokens)]
    return left


def without(scores: Array, tokens: Sequence[int]) -> Array:
    left = scores.copy()
    left[list(tokens)] = -np.inf
    return left


def smallest_set(order: NDArray[np.intp], shares: Array, mass: float) -> NDArray[np.intp]:
    """The shortest beginning of `order` whose probability reaches `mass`; at least one token, at 1 all."""
    if mass >= 1.0:
        return order
    before = np.cumsum(shares[order]) - shares[order]
    count = max(int((before < mass).sum()), 1)
    return order[:count]


def logit_bias(scores: Array, context: Context) -> Array:
    biased = scores.copy()
    for token, bias in context.sampling.logit_bias:
        biased[token] += bias
    return biased


def repetition_penalty(scores: Array, context: Context) -> Array:
    penalised, penalty = scores.copy(), context.sampling.repetition_penalty
    for token in set(context.tokens):
        score = scores[token]
        penalised[token] = score / penalty if score > 0 else score * penalty
    return penalised


def frequency_penalty(scores: Array, context: Context) -> Array:
    penalised = scores.copy()
    for token in context.generated:
        penalised[token] -= context.sampling.frequency_penalty
    return penalised


def presence_penalty(scores: Array, context: Context) -> Array:
    penalised = scores.copy()
    for token in set(context.generated):
        penalised[token] -= context.sampling.presence_penalty
    return penalised


def bad_words(scores: Array, context: Context) -> Array:
    """Removes the last token of a word if the tokens before it match the context."""
    endings = []
    for *beginning, ending in context.sampling.bad_words:
        tail = context.tokens[-len(beginning) :] if beginning else ()
        if tuple(beginning) == tail:
            endings.append(ending)
    return without(scores, endings)


def min_tokens(scores: Array, context: Context) -> Array:
    if len(context.generated) >= context.sampling.min_tokens:
        return scores
    return without(scores, context.sampling.min_tokens_hold_back)


def allowed_token_ids(scores: Array, context: Context) -> Array:
    allowed = context.sampling.allowed_token_ids
    return only(scores, allowed) if allowed else scores


def temperature(scores: Array, context: Context) -> Array:
    """At 0, only the most likely token remains; ties go to the lowest id."""
    degree = context.sampling.temperature
    return scores / degree if degree else only(scores, [int(scores.argmax())])


def top_k(scores: Array, context: Context) -> Array:
    """Ties with the k-th token remain."""
    count = context.sampling.top_k
    if not count:
        return scores
    kth = np.sort(scores)[::-1][min(count, len(scores)) - 1]
    return np.where(scores >= kth, scores, -np.inf)


def top_p(scores: Array, context: Context) -> Array:
    shares = probabilities(scores)
    order = np.argsort(-shares, kind="stable")
    return only(scores, smallest_set(order, shares, context.sampling.top_p))


def min_p(scores: Array, context: Context) -> Array:
    shares = probabilities(scores)
    return np.where(shares >= context.sampling.min_p * shares.max(), scores, -np.inf)


def typical_p(scores: Array, context: Context) -> Array:
    """Locally typical sampling (arXiv:2202.00666): nearest to the entropy first."""
    shares = probabilities(scores)
    possible = np.flatnonzero(shares)
    surprise = -np.log(shares[possible])
    entropy = float((shares[possible] * surprise).sum())
    order = possible[np.argsort(np.abs(surprise - entropy), kind="stable")]
    return only(scores, smallest_set(order, shares, context.sampling.typical_p))


FILTERS: tuple[Filter, ...] = (
    logit_bias,
    repetition_penalty,
    frequency_penalty,
    presence_penalty,
    bad_words,
    min_tokens,
    allowed_token_ids,
    temperature,
    top_k,
    top_p,
    min_p,
    typical_p,
)


def distribution(logits: Array, context: Context, filters: Sequence[Filter] = FILTERS) -> Array:
    """Probability of each vocabulary token as the next one; `logits` [vocab_size]."""
    scores = logits.astype(np.float64)
    for step_filter in filters:
        scores = step_filter(scores, context)
    return probabilities(scores)
