"""What a client gets, as messages."""

from coordinator.requests.attachment import Output
from coordinator.requests.request import Choice
from coordinator.scheduling.sequence import FinishReason
from stageline_rpc.v1 import inference_pb2
from wire.errors import InvariantBroken
from wire.ids import id_text
from wire.steps import TokenLogprobs

FINISH_REASON_TO_MESSAGE: dict[FinishReason, inference_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def encode_output(output: Output) -> inference_pb2.GenerateResponse:
    """One message of one choice; its last one has finish reason and usage."""
    choice, piece = output.choice, output.piece
    response = inference_pb2.GenerateResponse(
        request_id=id_text(choice.sequence.key.request_id),
        choice=choice.index,
        first_token_index=piece.first_token_index,
        token_ids=piece.tokens,
        text=piece.text,
        text_offset=piece.text_offset,
    )
    for token, logprobs in zip(piece.tokens, piece.logprobs, strict=bool(piece.logprobs)):
        _encode_logprobs(token, logprobs, response.logprobs.add())
    if output.prompt_logprobs:
        response.first_prompt_token_index = start = output.first_prompt_token_index
        prompt = choice.sequence.all_tokens[start : start + len(output.prompt_logprobs)]
        for token, logprobs in zip(prompt, output.prompt_logprobs, strict=True):
            _encode_logprobs(token, logprobs, response.prompt_logprobs.add())
    if piece.is_last:
        _end(choice, response)
    return response


def _encode_logprobs(
    token: int, logprobs: TokenLogprobs | None, message: inference_pb2.TokenLogprobs
) -> None:
    message.token_id = token
    if logprobs is None:
        return
    message.logprob, message.rank = logprobs.logprob, logprobs.rank
    for each, logprob in logprobs.top:
        message.top.add(token_id=each, logprob=logprob)


def _end(choice: Choice, response: inference_pb2.GenerateResponse) -> None:
    reason, sequence = choice.transcript.finish_reason, choice.sequence
    if reason is None:
        raise InvariantBroken("the end of a choice without a reason")
    response.finish_reason = FINISH_REASON_TO_MESSAGE[reason]
    response.usage.prompt_tokens = sequence.num_prompt_tokens
    response.usage.completion_tokens = sequence.num_generated_tokens
    response.usage.cached_tokens = sequence.num_cached_tokens
    response.usage.seed = sequence.sampling.seed
    response.usage.restarts = sequence.num_restarts
