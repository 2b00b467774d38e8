"""Which sampling parameters a token can be drawn with; the same ranges as when a request is accepted."""

import math
from collections.abc import Iterable

from wire.steps import StepSampling

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_TOP_LOGPROBS = 20


def check_sampling(sampling: StepSampling, *, vocab_size: int) -> None:
    """Raises ValueError, by name and with the range, for parameters that no token can be drawn with."""
    _check_filters(sampling)
    _check_penalties(sampling)
    _check_masks(sampling, vocab_size)
    _check_logprobs(sampling)


def _check_filters(sampling: StepSampling) -> None:
    if not 0.0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise ValueError(f"temperature {sampling.temperature} is not in [0, {MAX_TEMPERATURE:g}]")
    if sampling.top_k < 0:
        raise ValueError(f"top_k {sampling.top_k} is negative")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p {sampling.top_p} is not in (0, 1]")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise ValueError(f"min_p {sampling.min_p} is not in [0, 1]")
    if not 0.0 < sampling.typical_p <= 1.0:
        raise ValueError(f"typical_p {sampling.typical_p} is not in (0, 1]")


def _check_penalties(sampling: StepSampling) -> None:
    if not 0.0 < sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise ValueError(
            f"repetition_penalty {sampling.repetition_penalty} is not in (0, {MAX_REPETITION_PENALTY:g}]"
        )
    for name in ("frequency_penalty", "presence_penalty"):
        penalty = getattr(sampling, name)
        if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
            raise ValueError(f"{name} {penalty} is not in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}]")
    for token, bias in sampling.logit_bias:
        if math.isnan(bias) or abs(bias) > MAX_BIAS:
            raise ValueError(f"logit_bias {bias} of token {token} is not in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")
    if len({token for token, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        raise ValueError("logit_bias names a token twice")


def _check_masks(sampling: StepSampling, vocab_size: int) -> None:
    _check_tokens("logit_bias", (token for token, _ in sampling.logit_bias), vocab_size)
    _check_tokens("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    _check_tokens("min_tokens_hold_back", sampling.min_tokens_hold_back, vocab_size)
    for word in sampling.bad_words:
        if not word:
            raise ValueError("bad_words has an empty word")
        _check_tokens("bad_words", word, vocab_size)
    if sampling.min_tokens < 0:
        raise ValueError(f"min_tokens {sampling.min_tokens} is negative")


def _check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} has token {token}, which is not in [0, {vocab_size})")


def _check_logprobs(sampling: StepSampling) -> None:
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
            raise ValueError(f"{name} {count} is not in [0, {MAX_TOP_LOGPROBS}]")
