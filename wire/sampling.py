"""Sampling parameters: ranges and defaults, one table for client, coordinator and stages."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, get_type_hints

MAX_CHOICES = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Range:
    """Valid numbers: [low, high], or (low, high] without `low` itself; never NaN.

    `help` and `metavar` describe the command-line flag.
    """

    low: float
    high: float
    help: str = ""
    metavar: str = "X"
    excludes_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value or (value == self.low and not self.excludes_low)) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.excludes_low else '['}{self.low:g}, {self.high:g}]"


def _share(help: str) -> Range:
    return Range(0, 1, help, "P", excludes_low=True)


BIAS_RANGE = Range(-100, 100)
KEEP_RANGE_S = Range(0, 3600, excludes_low=True)
"""Time to keep the output of a detached request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """Grammar that the generated text must match, in llguidance's serialised form.

    `tokenizer_checksum` is the XXH3-64 of the tokenizer.json with which the coordinator checked it.
    """

    definition: str
    tokenizer_checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSampling:
    """Resolved sampling parameters; the defaults have no effect.

    `min_tokens_hold_back` are tokens not sampled before `min_tokens` generated tokens. `logprobs` is the
    number of most likely tokens reported beside the sampled one (None: report neither), `prompt_logprobs` the
    number per position of scored chunks. `encoded` is the encoded message where it was encoded ahead.
    """

    temperature: Annotated[
        float, Range(0, 100, "Sampling temperature; 0, the default, takes the likeliest token.", "T")
    ] = 0.0
    top_p: Annotated[float, _share("Sample from the likeliest tokens with total probability P.")] = 1.0
    min_p: Annotated[
        float, Range(0, 1, "Minimum probability of a token, relative to the likeliest.", "P")
    ] = 0.0
    typical_p: Annotated[float, _share("Sample from the most typical tokens with total probability P.")] = 1.0
    repetition_penalty: Annotated[
        float, Range(0, 100, "Penalty on tokens of prompt and output; 1 disables it.", excludes_low=True)
    ] = 1.0
    frequency_penalty: Annotated[
        float, Range(-2, 2, "Penalty on a token's logit per occurrence in the output.")
    ] = 0.0
    presence_penalty: Annotated[
        float, Range(-2, 2, "Penalty on a token's logit once it is in the output.")
    ] = 0.0
    top_k: int = 0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    min_tokens_hold_back: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int = 0
    grammar: GrammarSpec | None = None
    encoded: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SamplingNumber:
    """One row: `name` is the field of `StepSampling` and of the public `SamplingParameters`."""

    name: str
    range: Range
    default: float


def _numbers() -> Iterator[SamplingNumber]:
    hints = get_type_hints(StepSampling, include_extras=True)
    for row in fields(StepSampling):
        if hasattr(hints[row.name], "__metadata__"):
            (valid,) = hints[row.name].__metadata__
            yield SamplingNumber(row.name, valid, getattr(StepSampling(), row.name))


SAMPLING_NUMBERS = tuple(_numbers())
