"""Checks what a client asks of sampling, and resolves it. Every refusal names the field and its range."""

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stageline_rpc.v1 import inference_pb2
from wire.errors import InvalidRequest
from wire.sampling_codec import encoded_ahead
from wire.steps import GrammarSpec, StepSampling

MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_CHOICES = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_BAD_WORD_CHARACTERS = 1024
MAX_ENTRIES = 65_536
MAX_ENTRIES_ENCODED_LATE = 512
"""Of biases and words; more are encoded here, beside the event loop, for all choices and restarts."""
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What the checkpoint makes of tokens. `has_text`: it has a tokenizer."""

    size: int
    eos_token_ids: frozenset[int]
    has_text: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """How to generate, resolved: `sampling` for the stages, the rest for the coordinator.

    `stop_token_ids` end a sequence, end-of-sequence ids included where they do.
    """

    sampling: StepSampling
    stop_token_ids: frozenset[int]
    stops: tuple[str, ...]
    num_choices: int
    echo: bool
    skip_special_tokens: bool
    num_top_prompt_logprobs: int | None

    @property
    def num_top_echoed(self) -> int | None:
        """With echo and logprobs, those of the prompt's tokens come with them."""
        return self.sampling.logprobs if self.echo else None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.num_top_prompt_logprobs is not None or self.num_top_echoed is not None


def resolve_generation(
    message: inference_pb2.SamplingParameters,
    vocabulary: Vocabulary,
    *,
    max_tokens: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: GrammarSpec | None = None,
) -> Generation:
    """`bad_words` and `grammar` are what the tokenizer made of the message's. Raises InvalidRequest."""
    stop_token_ids = _stop_token_ids(message, vocabulary)
    sampling = StepSampling(
        temperature=_within("temperature", message.temperature, 0, MAX_TEMPERATURE),
        top_k=_count("top_k", message.top_k, vocabulary.size),
        top_p=_share("top_p", message.top_p) if message.HasField("top_p") else 1.0,
        seed=message.seed if message.HasField("seed") else secrets.randbelow(MAX_SEED + 1),
        min_p=_within("min_p", message.min_p, 0, 1),
        typical_p=_share("typical_p", message.typical_p) if message.HasField("typical_p") else 1.0,
        repetition_penalty=_repetition_penalty(message),
        frequency_penalty=_within("frequency_penalty", message.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        presence_penalty=_within("presence_penalty", message.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_logit_bias(message, vocabulary),
        allowed_token_ids=_allowed_token_ids(message, vocabulary),
        bad_words=_bad_words(message, bad_words, vocabulary),
        min_tokens=_count("min_tokens", message.min_tokens, max_tokens),
        min_tokens_hold_back=tuple(sorted(stop_token_ids)) if message.min_tokens else (),
        logprobs=_num_logprobs(message, "logprobs"),
        prompt_logprobs=_most_prompt_logprobs(message),
        grammar=grammar,
    )
    _check_weight(message, sampling)
    if len(sampling.logit_bias) + len(sampling.bad_words) > MAX_ENTRIES_ENCODED_LATE:
        sampling = encoded_ahead(sampling)
    return Generation(
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        stops=_stops(message, vocabulary),
        num_choices=_num_choices(message),
        echo=message.echo,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        num_top_prompt_logprobs=_num_logprobs(message, "prompt_logprobs"),
    )


def check_bad_words(message: inference_pb2.SamplingParameters) -> None:
    """Raises InvalidRequest for words that no tokenizer makes tokens of, and for more than it should."""
    num_words = len(message.bad_words) + len(message.bad_word_ids)
    if num_words > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words and bad_word_ids have {num_words} entries, at most {MAX_BAD_WORDS}")
    for word in message.bad_words:
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words has a word of {len(word)} characters, must be in [1, {MAX_BAD_WORD_CHARACTERS}]"
            )
        if not word.strip():
            raise InvalidRequest("bad_words has an empty word; each needs at least one visible character")


def refuse_unmockable(message: inference_pb2.SamplingParameters) -> None:
    """Raises InvalidRequest for a parameter that needs logits, which mock stages do not compute."""
    needs_logits = {
        "logprobs": message.HasField("logprobs"),
        "prompt_logprobs": message.HasField("prompt_logprobs"),
        "repetition_penalty": message.HasField("repetition_penalty") and message.repetition_penalty != 1.0,
        "frequency_penalty": message.frequency_penalty != 0.0,
        "presence_penalty": message.presence_penalty != 0.0,
        message.WhichOneof("structured_output") or "": message.WhichOneof("structured_output") is not None,
    }
    if given := [name for name, is_given in needs_logits.items() if is_given]:
        raise InvalidRequest(
            f"{' and '.join(given)}: mock stages compute no logits, so they cannot honour this"
        )


def _within(name: str, value: float, low: float, high: float) -> float:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} is {value:g}, must be in [{low:g}, {high:g}]")
    return value


def _share(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise InvalidRequest(f"{name} is {value:g}, must be in (0, 1]")
    return value


def _count(name: str, value: int, most: int) -> int:
    if value > most:
        raise InvalidRequest(f"{name} is {value}, must be in [0, {most}]")
    return value


def _repetition_penalty(message: inference_pb2.SamplingParameters) -> float:
    value = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    if not 0 < value <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(f"repetition_penalty is {value:g}, must be in (0, {MAX_REPETITION_PENALTY:g}]")
    return value


def _logit_bias(
    message: inference_pb2.SamplingParameters, vocabulary: Vocabulary
) -> tuple[tuple[int, float], ...]:
    _token_ids("logit_bias", message.logit_bias, vocabulary)
    for token, bias in message.logit_bias.items():
        _within(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(message.logit_bias.items()))


def _token_ids(name: str, ids: Iterable[int], vocabulary: Vocabulary) -> tuple[int, ...]:
    for token in ids:
        if token >= vocabulary.size:
            raise InvalidRequest(f"{name} has token id {token}, must be in [0, {vocabulary.size - 1}]")
    return tuple(ids)


def _allowed_token_ids(message: inference_pb2.SamplingParameters, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Each once: so many repetitions as a message holds would travel to every stage."""
    return tuple(sorted(set(_token_ids("allowed_token_ids", message.allowed_token_ids, vocabulary))))


def _bad_words(
    message: inference_pb2.SamplingParameters, spelled: tuple[tuple[int, ...], ...], vocabulary: Vocabulary
) -> tuple[tuple[int, ...], ...]:
    check_bad_words(message)
    given = tuple(_token_ids("bad_word_ids", each.ids, vocabulary) for each in message.bad_word_ids)
    for name, words in (("bad_words", spelled), ("bad_word_ids", given)):
        for word in words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"{name} has a word of {len(word)} tokens, must be in [1, {MAX_BAD_WORD_TOKENS}]"
                )
    return (*spelled, *given)


def _stop_token_ids(message: inference_pb2.SamplingParameters, vocabulary: Vocabulary) -> frozenset[int]:
    stops = frozenset(_token_ids("stop_token_ids", message.stop_token_ids, vocabulary))
    return stops if message.ignore_eos else stops | vocabulary.eos_token_ids


def _stops(message: inference_pb2.SamplingParameters, vocabulary: Vocabulary) -> tuple[str, ...]:
    stops = tuple(message.stop)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings, must be in [0, {MAX_STOPS}]")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop has a string of {len(stop)} characters, must be in [1, {MAX_STOP_CHARACTERS}]"
            )
    if stops and not vocabulary.has_text:
        raise InvalidRequest("stop needs a tokenizer, which this model has not; stop_token_ids needs none")
    return stops


def _num_logprobs(
    message: inference_pb2.SamplingParameters, name: Literal["logprobs", "prompt_logprobs"]
) -> int | None:
    if not message.HasField(name):
        return None
    return _count(name, getattr(message, name), MAX_LOGPROBS)


def _most_prompt_logprobs(message: inference_pb2.SamplingParameters) -> int:
    """Stages report for scored chunks what any reader of them wants."""
    echoed = message.logprobs if message.echo else 0
    return max(message.prompt_logprobs, echoed)


def _check_weight(message: inference_pb2.SamplingParameters, sampling: StepSampling) -> None:
    """Each choice carries these to every stage, where they are read entry by entry while others wait."""
    num_choices = _num_choices(message)
    num_entries = len(sampling.logit_bias) + sum(map(len, sampling.bad_words))
    if num_choices * num_entries > MAX_ENTRIES:
        raise InvalidRequest(
            f"logit_bias and bad_words have {num_entries} entries and tokens for each of n = {num_choices} "
            f"choices, {num_choices * num_entries} in all; at most {MAX_ENTRIES}"
        )


def _num_choices(message: inference_pb2.SamplingParameters) -> int:
    num_choices = message.n if message.HasField("n") else 1
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidRequest(f"n is {num_choices}, must be in [1, {MAX_CHOICES}]")
    return num_choices
