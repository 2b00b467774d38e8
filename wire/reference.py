"""What a model answers to a short prompt: what the logits of a pipeline are compared with."""

from dataclasses import dataclass

from stageline_rpc.v1 import stage_pb2
from wire.sampling_codec import decode_logprobs, encode_logprobs
from wire.steps import TokenLogprobs

NUM_PROMPT_TOKENS = 8
NUM_TOP = 20

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Reference:
    """`rows[i]` are log-probabilities after tokens[0] to tokens[i]: of the token that follows, or for the
    last row of the most likely one, and of the most likely ones.

    `logit_spread` is the standard deviation of the logits over the vocabulary; `rounding` is what rounding to
    the run dtype on the way changes these log-probabilities by. Both are root mean squares over the rows.
    """

    tokens: tuple[int, ...]
    rows: tuple[TokenLogprobs, ...]
    logit_spread: float
    rounding: float


def check_prompt(vocab_size: int) -> tuple[int, ...]:
    """Eight token ids that are spread over the vocabulary; no two alike unless it has less than eight."""
    return tuple(int((index + 0.5) * _GOLDEN % 1 * vocab_size) for index in range(NUM_PROMPT_TOKENS))


def encode_reference(reference: Reference) -> stage_pb2.ReferenceResponse:
    message = stage_pb2.ReferenceResponse(logit_spread=reference.logit_spread, rounding=reference.rounding)
    for row in reference.rows:
        encode_logprobs(row, message.rows.add())
    return message


def decode_reference(message: stage_pb2.ReferenceResponse, tokens: tuple[int, ...]) -> Reference:
    """Raises ValueError when it is no answer to `tokens`."""
    rows = tuple(decode_logprobs(row) for row in message.rows)
    if len(rows) != len(tokens):
        raise ValueError(f"a reference of {len(rows)} rows for {len(tokens)} tokens")
    return Reference(tokens, rows, message.logit_spread, message.rounding)
