"""Outputs, log-probabilities and completions."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from stageline.client.errors import ServerError
from stageline_rpc.v1 import inference_pb2


class FinishReason(StrEnum):
    """Why a generation ended; equals its text, so `output.finish_reason == "stop"` holds.

    A cancelled request raises `Cancelled`.
    """

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts and times of one choice; `seed` is the effective one, given or random.

    `queue_time_s` is from acceptance to the first step with this choice, `first_token_time_s` from acceptance
    to its first token, `decode_time_s` from its first to its last token. A time is None if its end was not
    reached, as without a generated token. Times of a request that a coordinator restored count from then on.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    restarts: int
    queue_time_s: float | None = None
    first_token_time_s: float | None = None
    decode_time_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TopLogprob:
    """One of the most likely tokens at a position; `logprob` is a natural logarithm."""

    token_id: int
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Likelihood of a token before penalties and filters; rank 1 is the most likely.

    `logprob` is None for the first token of a prompt. `top` is sorted, most likely first.
    """

    token_id: int
    logprob: float | None
    rank: int
    top: list[TopLogprob]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOutput:
    """New output of one choice since its previous output.

    The last output of a choice has `finish_reason` and `usage`. `first_token_index` counts the choice's
    tokens, `text_offset` the Unicode code points of its text; both include the prompt with `echo`.
    `logprobs` has one entry per token id. `prompt_logprobs` are sent for choice 0, in one or more outputs
    up to its first generated token, starting at `first_prompt_token_index`. Both are None if empty.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    text: str
    first_token_index: int
    text_offset: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    first_prompt_token_index: int = 0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def output_from(response: inference_pb2.GenerateResponse) -> GenerateOutput:
    """Decode one message. Raises ServerError when it violates the protocol."""
    finish_reason = _finish_reason_of(response)
    _check_logprobs(response)
    return GenerateOutput(
        request_id=response.request_id,
        choice=response.choice,
        token_ids=list(response.token_ids),
        text=response.text,
        first_token_index=response.first_token_index,
        text_offset=response.text_offset,
        logprobs=_logprobs_from(response.logprobs),
        prompt_logprobs=_logprobs_from(response.prompt_logprobs),
        first_prompt_token_index=response.first_prompt_token_index,
        finish_reason=finish_reason,
        usage=None if finish_reason is None else _usage_from(response.usage),
    )


def _finish_reason_of(response: inference_pb2.GenerateResponse) -> FinishReason | None:
    if response.finish_reason not in _FINISH_REASONS:
        raise ServerError(f"the server sent the unknown finish reason {response.finish_reason}")
    finish_reason = _FINISH_REASONS[response.finish_reason]
    if response.HasField("usage") != (finish_reason is not None):
        raise ServerError("the server sent a finish reason without usage, or usage without a finish reason")
    return finish_reason


def _check_logprobs(response: inference_pb2.GenerateResponse) -> None:
    num_logprobs, num_tokens = len(response.logprobs), len(response.token_ids)
    if num_logprobs not in (0, num_tokens):
        raise ServerError(
            f"the server sent log-probabilities of {num_logprobs} tokens, expected {num_tokens}"
        )


_Time = Literal["queue_time", "first_token_time", "decode_time"]


def _usage_from(usage: inference_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        seed=usage.seed,
        restarts=usage.restarts,
        queue_time_s=_seconds(usage, "queue_time"),
        first_token_time_s=_seconds(usage, "first_token_time"),
        decode_time_s=_seconds(usage, "decode_time"),
    )


def _seconds(usage: inference_pb2.Usage, time: _Time) -> float | None:
    return getattr(usage, time).ToNanoseconds() / 1e9 if usage.HasField(time) else None


def _logprobs_from(entries: Iterable[inference_pb2.TokenLogprobs]) -> list[TokenLogprobs] | None:
    return [_token_logprobs_from(entry) for entry in entries] or None


def _token_logprobs_from(entry: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=entry.token_id,
        logprob=entry.logprob if entry.HasField("logprob") else None,
        rank=entry.rank,
        top=[TopLogprob(token_id=top.token_id, logprob=top.logprob) for top in entry.top],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Complete output of one choice; `prompt_logprobs` are only on choice 0."""

    request_id: str
    choice: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class _Parts:
    """Collected outputs of one choice."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, output: GenerateOutput) -> None:
        self.text.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        self.prompt_logprobs.extend(output.prompt_logprobs or ())


class Completions:
    """Collects the outputs of one request, in order."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}
        self._finished: dict[int, Completion] = {}

    def add(self, output: GenerateOutput) -> Completion | None:
        """Add an output; returns the whole choice if it was the last one."""
        parts = self._parts.setdefault(output.choice, _Parts())
        parts.add(output)
        if output.finish_reason is None:
            return None
        assert output.usage is not None, "usage comes with the finish reason"
        completion = Completion(
            request_id=output.request_id,
            choice=output.choice,
            text="".join(parts.text),
            token_ids=parts.token_ids,
            finish_reason=output.finish_reason,
            usage=output.usage,
            logprobs=parts.logprobs or None,
            prompt_logprobs=parts.prompt_logprobs or None,
        )
        self._finished[output.choice] = completion
        return completion

    def in_order(self) -> list[Completion]:
        """Finished choices, in order."""
        return [self._finished[choice] for choice in sorted(self._finished)]
