"""What the sampler knows of a sequence, and the check of its parameters."""

from collections.abc import Iterable
from dataclasses import dataclass

from stage_worker.sampling.logits_processors import SequenceEdits
from wire.sampling import BIAS_RANGE, MAX_TOP_LOGPROBS, SAMPLING_NUMBERS, StepSampling
from wire.steps import StartRecord


def check_sampling(sampling: StepSampling, *, vocab_size: int) -> None:
    """Raises ValueError, with name and range, for invalid parameters."""
    _check_numbers(sampling)
    _check_masks(sampling, vocab_size)
    _check_logprobs(sampling)


def _check_numbers(sampling: StepSampling) -> None:
    for number in SAMPLING_NUMBERS:
        value = getattr(sampling, number.name)
        if value not in number.range:
            raise ValueError(f"{number.name} {value} is not in {number.range}")
    if sampling.top_k < 0:
        raise ValueError(f"top_k {sampling.top_k} is negative")
    for token, bias in sampling.logit_bias:
        if bias not in BIAS_RANGE:
            raise ValueError(f"logit_bias {bias} of token {token} is not in {BIAS_RANGE}")
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


@dataclass(slots=True)
class SamplerState:
    """`problem` is why no token can be sampled; `prompt` is kept until the first decode step."""

    choice: int
    sampling: StepSampling
    prompt: tuple[int, ...]
    problem: str | None = None
    edits: SequenceEdits | None = None

    @classmethod
    def of(cls, record: StartRecord, *, vocab_size: int) -> "SamplerState":
        """State after `record.tokens`, whether of the prompt or generated before."""
        sampling, tokens = record.sampling, record.tokens
        prompt = tokens[: record.num_prompt_tokens]
        problem = _problem(record, vocab_size)
        edits = None if problem else SequenceEdits.of(sampling, tokens, record.num_prompt_tokens)
        return cls(record.sequence.choice, sampling, prompt, problem, edits)

    @property
    def edits_logits(self) -> bool:
        return self.edits is not None or self.sampling.grammar is not None

    @property
    def is_plain(self) -> bool:
        """Its tokens follow from logits and position alone, and the result has nothing beside them."""
        return self.problem is None and not self.edits_logits and self.sampling.logprobs is None

    def add(self, token: int) -> None:
        """Append a generated token."""
        self.prompt = ()
        if self.edits is not None:
            self.edits.add(token)


def _problem(record: StartRecord, vocab_size: int) -> str | None:
    largest = max(record.tokens, default=0)
    if largest >= vocab_size:
        return f"token {largest} of the start record is not in [0, {vocab_size})"
    try:
        check_sampling(record.sampling, vocab_size=vocab_size)
    except ValueError as error:
        return str(error)
    return None
