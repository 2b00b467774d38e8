"""What a client gets from a generation."""

from dataclasses import dataclass
from enum import StrEnum

from stageline.errors import ServerError
from stageline_rpc.v1 import inference_pb2


class FinishReason(StrEnum):
    """Why a generation ended; equal to its text, so `output.finish_reason == "stop"` holds.

    The server does not send CANCELLED at present: a cancelled request ends with the error `Cancelled`.
    """

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a request took. `seed` is the one in use, also where the server drew it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seed: int
    restarts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOutput:
    """What is new since the output before. Only the last output of a request has `finish_reason` and `usage`.

    `first_token_index` counts generated tokens, `text_offset` Unicode code points of the generated text.
    """

    request_id: str
    token_ids: list[int]
    text: str
    first_token_index: int
    text_offset: int
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


def output_from(response: inference_pb2.GenerateResponse) -> GenerateOutput:
    """Decodes one message. Raises ServerError when it breaks the contract."""
    if response.finish_reason not in _FINISH_REASONS:
        raise ServerError(f"the server sent the unknown finish reason {response.finish_reason}")
    finish_reason = _FINISH_REASONS[response.finish_reason]
    if response.HasField("usage") != (finish_reason is not None):
        raise ServerError("the server sent a finish reason without usage, or usage without a finish reason")
    return GenerateOutput(
        request_id=response.request_id,
        token_ids=list(response.token_ids),
        text=response.text,
        first_token_index=response.first_token_index,
        text_offset=response.text_offset,
        finish_reason=finish_reason,
        usage=None if finish_reason is None else _usage_from(response.usage),
    )


def _usage_from(usage: inference_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        seed=usage.seed,
        restarts=usage.restarts,
    )


class Continuity:
    """Holds a server to its promise that tokens and text arrive exactly once and in order."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_characters = 0
        self._is_finished = False

    def check(self, output: GenerateOutput) -> GenerateOutput:
        """Returns the output. Raises ServerError when something is missing before it, or comes twice."""
        if self._is_finished:
            raise ServerError(f"the server sent more after the last message of request {output.request_id}")
        if (output.first_token_index, output.text_offset) != (self._num_tokens, self._num_characters):
            raise ServerError(
                f"request {output.request_id} continues at token {output.first_token_index} and character "
                f"{output.text_offset}, after {self._num_tokens} tokens and {self._num_characters} characters"
            )
        self._num_tokens += len(output.token_ids)
        self._num_characters += len(output.text)
        self._is_finished = output.finish_reason is not None
        return output

    def check_finished(self) -> None:
        """Raises ServerError when the stream has ended without a finish reason."""
        if not self._is_finished:
            raise ServerError(f"the stream ended without a finish reason, after {self._num_tokens} tokens")
