"""Scenarios for tests of distributions: each filter alone, and combinations."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.unit.stage_worker.sampling.reference_distribution import Array, Context, distribution
from wire.sampling import StepSampling

VOCAB = 120
LARGE_VOCAB = 3000
PLAIN = StepSampling(temperature=1.0)


def spread_logits(vocab_size: int = VOCAB) -> Tensor:
    """float32 [vocab_size], from about -6 to 6, positive and negative ones, no two alike."""
    return 2.2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))


def tied_logits() -> Tensor:
    """The 6th, 7th and 8th are equal."""
    logits = spread_logits()
    order = logits.argsort(descending=True)
    logits[order[6:8]] = logits[order[5]].clone()
    return logits


LIKELY: list[int] = spread_logits().argsort(descending=True).tolist()
"""Tokens, most likely first: a penalty of LIKELY[0] shows."""

PROMPT = tuple(LIKELY[index] for index in (0, 1, 4, 1, 60, 4, 7, 90))
GENERATED = tuple(LIKELY[index] for index in (2, 1, 5, 2, 8, 2, 70, 5, 2, 3))
"""Tokens once, twice and four times, one of them of the prompt too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Logits, sampling parameters and the tokens so far."""

    sampling: StepSampling
    prompt: tuple[int, ...] = PROMPT
    generated: tuple[int, ...] = ()
    logits: Tensor

    @property
    def context(self) -> Context:
        return Context(sampling=self.sampling, prompt=self.prompt, generated=self.generated)

    @property
    def shares(self) -> Array:
        """The exact probabilities."""
        return distribution(self.logits.numpy(), self.context)


def _at_start(logits: Tensor | None = None, **parameters: object) -> Scenario:
    sampling = replace(PLAIN, **parameters)  # type: ignore[arg-type]
    return Scenario(sampling=sampling, logits=spread_logits() if logits is None else logits)


def _later(logits: Tensor | None = None, **parameters: object) -> Scenario:
    return replace(_at_start(logits, **parameters), generated=GENERATED)


def _large(**parameters: object) -> Scenario:
    return _at_start(spread_logits(LARGE_VOCAB), **parameters)


WITHOUT_HISTORY: dict[str, Scenario] = {
    "plain": _at_start(),
    "cold": _at_start(temperature=0.5),
    "hot": _at_start(temperature=3.0),
    "greedy": _at_start(temperature=0.0),
    "top-k": _at_start(top_k=7),
    "top-k-1": _at_start(top_k=1),
    "top-k-ties": _at_start(tied_logits(), top_k=6),
    "top-p": _at_start(top_p=0.8),
    "low-top-p": _at_start(top_p=0.3),
    "min-p": _at_start(min_p=0.08),
    "typical-p": _at_start(typical_p=0.6),
    "high-typical-p": _at_start(typical_p=0.95),
    "bias": _at_start(
        logit_bias=((LIKELY[0], -1.5), (LIKELY[1], -100.0), (LIKELY[40], 5.0), (LIKELY[100], 6.5))
    ),
    "allowed": _at_start(allowed_token_ids=tuple(LIKELY[index] for index in (1, 3, 3, 20, 21, 50))),
    "top-k-top-p": _at_start(temperature=2.0, top_k=12, top_p=0.8),
    "top-p-min-p": _at_start(temperature=3.0, top_p=0.9, min_p=0.1),
    "top-k-typical-p": _at_start(temperature=2.0, top_k=8, typical_p=0.8),
    "min-p-typical-p": _at_start(temperature=1.5, min_p=0.02, typical_p=0.7),
    "warpers": _at_start(temperature=2.7, top_k=60, top_p=0.93, min_p=0.06, typical_p=0.75),
    "warpers-min-p": _at_start(temperature=2.4, top_k=60, top_p=0.93, min_p=0.14, typical_p=0.87),
    "large-plain": _large(),
    "large-top-k": _large(temperature=1.5, top_k=40),
    "large-top-p": _large(temperature=0.7, top_p=0.6),
    "large-min-p": _large(min_p=0.15),
    "large-typical-p": _large(temperature=0.6, typical_p=0.5),
    "large-warpers": _large(temperature=2.0, top_k=200, top_p=0.7, min_p=0.1, typical_p=0.6),
}

_EVERYTHING = _later(
    temperature=2.4,
    top_k=60,
    top_p=0.9,
    min_p=0.2,
    typical_p=0.65,
    repetition_penalty=1.3,
    frequency_penalty=0.9,
    presence_penalty=-0.8,
    logit_bias=((LIKELY[1], -1.0), (LIKELY[50], 4.0), (LIKELY[52], 4.0)),
    allowed_token_ids=tuple(LIKELY[index] for index in range(VOCAB) if index not in (10, 13, 52)),
    bad_words=((LIKELY[6],), (LIKELY[3], LIKELY[4]), (LIKELY[5], LIKELY[0])),
    min_tokens=11,
    min_tokens_hold_back=(LIKELY[9], LIKELY[119]),
)
"""min_p cuts the same end as top_p, so only one of them can show."""

WITH_HISTORY: dict[str, Scenario] = {
    "repetition": _later(repetition_penalty=1.5),
    "anti-repetition": _later(repetition_penalty=0.7),
    "repetition-of-unlikely": replace(
        _at_start(temperature=4.0, repetition_penalty=3.0), prompt=tuple(LIKELY[60:100])
    ),
    "repetition-of-the-prompt": _at_start(repetition_penalty=1.8),
    "frequency": _later(frequency_penalty=0.5),
    "anti-frequency": _later(frequency_penalty=-0.4),
    "presence": _later(presence_penalty=1.2),
    "anti-presence": _later(presence_penalty=-0.9),
    "presence-at-start": _at_start(presence_penalty=2.0, frequency_penalty=1.0),
    "penalties": _later(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.8),
    "penalties-bias": _later(
        repetition_penalty=1.6, frequency_penalty=0.4, logit_bias=((LIKELY[2], 2.0), (LIKELY[90], 7.0))
    ),
    "penalties-cold": _later(temperature=0.4, repetition_penalty=1.5, presence_penalty=1.5),
    "penalties-hot": _later(temperature=2.5, frequency_penalty=0.8, presence_penalty=-1.5),
    "bad-words": _later(
        bad_words=(
            (LIKELY[0],),
            (LIKELY[3], LIKELY[1]),  # its beginning is there
            (LIKELY[2], LIKELY[3], LIKELY[4]),
            (LIKELY[5], LIKELY[3], LIKELY[6]),  # its beginning is not there
            (*PROMPT[1:], *GENERATED, LIKELY[5]),  # begins in the prompt
            (*PROMPT, *GENERATED, LIKELY[7]),  # all tokens so far
            (LIKELY[9], *PROMPT, *GENERATED, LIKELY[8]),  # longer than that
        )
    ),
    "bad-words-of-the-prompt": _at_start(bad_words=((PROMPT[-1], LIKELY[0]), (PROMPT[-2], LIKELY[1]))),
    "min-tokens-one-missing": _later(min_tokens=11, min_tokens_hold_back=(LIKELY[0], LIKELY[3])),
    "min-tokens-reached": _later(min_tokens=10, min_tokens_hold_back=(LIKELY[0], LIKELY[3])),
    "min-tokens-at-start": _at_start(min_tokens=1, min_tokens_hold_back=(LIKELY[0], LIKELY[3])),
    "masks": _later(
        allowed_token_ids=tuple(LIKELY[:60]),
        bad_words=((LIKELY[1],), (LIKELY[3], LIKELY[4])),
        min_tokens=20,
        min_tokens_hold_back=(LIKELY[0],),
    ),
    "masked-bias": _later(
        logit_bias=((LIKELY[0], 100.0), (LIKELY[80], 5.0)), bad_words=((LIKELY[0],),), top_k=10
    ),
    "penalised-top-k": _later(repetition_penalty=1.5, frequency_penalty=0.7, top_k=6),
    "greedy-penalties": _later(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.7),
    "everything": replace(_EVERYTHING, sampling=replace(_EVERYTHING.sampling, temperature=3.6, top_p=0.77)),
    "everything-min-p": replace(_EVERYTHING, sampling=replace(_EVERYTHING.sampling, typical_p=0.82)),
}

SCENARIOS = WITHOUT_HISTORY | WITH_HISTORY
