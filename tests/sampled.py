"""Choosing tokens through the public sampler, and how probable each should be by transformers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from stage_worker.sampling import Sampler, random_choice
from stage_worker.sampling.random_choice import Draw
from wire.ids import RequestId, SequenceKey
from wire.sampling import StepSampling
from wire.steps import Decode, Prefill, SliceError, SliceResult, StartRecord, StepSlice

STAGE = 2
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
GENERATED = (5, 3, 5, 8, 9, 7, 9, 3, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sequence that is to get its next token; drawn for the position after its tokens."""

    sampling: StepSampling
    prompt: tuple[int, ...] = PROMPT
    generated: tuple[int, ...] = ()
    choice: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.generated


def key(request: int, choice: int = 0) -> SequenceKey:
    return SequenceKey(RequestId(request.to_bytes(16)), choice)


def start_record(sequence: SequenceKey, row: Row) -> StartRecord:
    return StartRecord(sequence, 0, len(row.prompt), row.tokens, row.sampling)


def last_token_of_prefill(sequence: SequenceKey, row: Row) -> StepSlice:
    """All of the tokens are cached but the last."""
    count = len(row.tokens)
    return StepSlice(sequence, 0, row.tokens[-1:], Prefill(count - 1, 1, count))


def decode(sequence: SequenceKey, token: int, position: int) -> StepSlice:
    return StepSlice(sequence, 0, (token,), Decode(position))


def results_of(logits: Tensor, rows: Sequence[Row]) -> tuple[SliceResult, ...]:
    """A fresh sampler's answers to one step with all of `rows`."""
    sampler = Sampler(vocab_size=logits.shape[-1], stage=STAGE)
    keys = [key(index, row.choice) for index, row in enumerate(rows)]
    for sequence, row in zip(keys, rows, strict=True):
        sampler.start(start_record(sequence, row))
    return sampler.choose([last_token_of_prefill(*pair) for pair in zip(keys, rows, strict=True)], logits)


def tokens_of(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    return [token_of(result) for result in results_of(logits, rows)]


def token_of(result: SliceResult) -> int:
    assert isinstance(result.outcome, int), result.outcome
    return result.outcome


def error_of(result: SliceResult) -> SliceError:
    assert isinstance(result.outcome, SliceError), result.outcome
    return result.outcome


def frequencies(
    monkeypatch: pytest.MonkeyPatch, logits: Tensor, row: Row, *, count: int = 1000
) -> NDArray[np.float64]:
    """How often each token is drawn at `count` uniform numbers spread evenly over (0, 1).

    What is drawn by inverting a cumulative distribution is then off by less than 1 / count.
    """

    def even(draws: Sequence[Draw]) -> NDArray[np.float64]:
        return (np.array([draw.position - 1 for draw in draws], np.float64) + 0.5) / count

    with monkeypatch.context() as patch:
        patch.setattr(random_choice, "uniform_samples", even)
        sampler = Sampler(vocab_size=logits.shape[-1], stage=STAGE)
        sampler.start(start_record(key(0), row))
        # These slices differ only by the position of the sampled token.
        parts = [
            StepSlice(key(0), 0, row.tokens[-1:], Prefill(index, 1, index + 1)) for index in range(count)
        ]
        tokens = [token_of(result) for result in sampler.choose(parts, logits.expand(count, -1))]
    return np.bincount(tokens, minlength=logits.shape[-1]) / count


def expected_probabilities(logits: Tensor, row: Row) -> NDArray[np.float64]:
    """Of each token of `logits` [1, vocab_size], by transformers in float64; penalties and allowed_token_ids,
    which it does not have, from their definitions.
    """
    history = torch.tensor([row.tokens])
    scores = _penalties(row)(history, logits.double())
    scores = _generated_penalties(scores, row)
    scores = _warpers(row.sampling)(history, _masks(row)(history, scores))
    return scores.softmax(dim=-1)[0].numpy()


def _penalties(row: Row) -> LogitsProcessorList:
    processors, sampling = LogitsProcessorList(), row.sampling
    if sampling.logit_bias:
        bias = [[[token], float(value)] for token, value in sampling.logit_bias]
        processors.append(SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    return processors


def _generated_penalties(scores: Tensor, row: Row) -> Tensor:
    scores = scores.clone()
    for token in set(row.generated):
        times = row.generated.count(token)
        scores[0, token] -= times * row.sampling.frequency_penalty + row.sampling.presence_penalty
    return scores


def _masks(row: Row) -> LogitsProcessorList:
    processors, sampling = LogitsProcessorList(), row.sampling
    if sampling.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    if sampling.min_tokens:
        hold_back = list(sampling.min_tokens_hold_back)
        processors.append(MinNewTokensLengthLogitsProcessor(len(row.prompt), sampling.min_tokens, hold_back))
    if sampling.allowed_token_ids:
        processors.append(lambda _, scores: _only(scores, sampling.allowed_token_ids))
    return processors


def _only(scores: Tensor, tokens: Sequence[int]) -> Tensor:
    allowed = torch.full_like(scores, -math.inf)
    allowed[:, list(tokens)] = scores[:, list(tokens)]
    return allowed


def _warpers(sampling: StepSampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1.0:
        warpers.append(TypicalLogitsWarper(sampling.typical_p))
    return warpers
