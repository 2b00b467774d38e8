"""Encodes output, and decodes what Attach and Cancel name."""

from coordinator.engine.output_stream import Output, Positions
from coordinator.engine.request import Choice
from coordinator.scheduler.sequence import FinishReason
from stageline_rpc.v1 import inference_pb2
from wire.errors import InvalidRequest, InvariantBroken
from wire.ids import RequestId, parse_request_id
from wire.status_codec import duration
from wire.steps import TokenLogprobs

FINISH_REASON_TO_MESSAGE: dict[FinishReason, inference_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def encode_output(output: Output, request_id: str) -> inference_pb2.GenerateResponse:
    """Encode one message of one choice of a request; the last one has finish reason and usage."""
    choice, piece = output.choice, output.piece
    response = inference_pb2.GenerateResponse(
        request_id=request_id,
        choice=choice.index,
        first_token_index=piece.first_token_index,
        token_ids=piece.tokens,
        text=piece.text,
        text_offset=piece.text_offset,
    )
    for token, logprobs in zip(piece.tokens, piece.logprobs, strict=bool(piece.logprobs)):
        encode_logprobs(token, logprobs, response.logprobs.add())
    if output.prompt_logprobs:
        response.first_prompt_token_index = start = output.first_prompt_token_index
        prompt = choice.sequence.all_tokens[start : start + len(output.prompt_logprobs)]
        for token, logprobs in zip(prompt, output.prompt_logprobs, strict=True):
            encode_logprobs(token, logprobs, response.prompt_logprobs.add())
    if piece.is_last:
        response.finish_reason = finish_reason_of(choice)
        response.usage.CopyFrom(usage_of(choice))
    return response


def encode_logprobs(token: int, logprobs: TokenLogprobs | None, message: inference_pb2.TokenLogprobs) -> None:
    """Fill `message`; the first token of a prompt has no log-probability."""
    message.token_id = token
    if logprobs is None:
        return
    message.logprob, message.rank = logprobs.logprob, logprobs.rank
    for token_id, logprob in logprobs.top:
        message.top.add(token_id=token_id, logprob=logprob)


def finish_reason_of(choice: Choice) -> inference_pb2.FinishReason.ValueType:
    """Finish reason of an ended choice."""
    if (reason := choice.buffer.finish_reason) is None:
        raise InvariantBroken("the end of a choice without a reason")
    return FINISH_REASON_TO_MESSAGE[reason]


def usage_of(choice: Choice) -> inference_pb2.Usage:
    """Usage of an ended choice."""
    sequence, times = choice.sequence, choice.times
    first_s, last_s = times.first_token_s, times.last_token_s
    return inference_pb2.Usage(
        prompt_tokens=sequence.num_prompt_tokens,
        completion_tokens=sequence.num_generated_tokens,
        cached_tokens=sequence.num_cached_tokens,
        seed=sequence.sampling.seed,
        restarts=sequence.num_restarts,
        queue_time=None if times.started_s is None else duration(times.started_s - times.accepted_s),
        first_token_time=None if first_s is None else duration(first_s - times.accepted_s),
        decode_time=duration(last_s - first_s) if first_s is not None and last_s is not None else None,
    )


def decode_request_id(text: str) -> RequestId:
    """Raises InvalidRequest."""
    try:
        return parse_request_id(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def decode_positions(request: inference_pb2.AttachRequest) -> Positions:
    """Read positions of a client that attaches. Raises InvalidRequest."""
    by_choice = {position.choice: position.from_token for position in request.positions}
    if len(by_choice) < len(request.positions):
        raise InvalidRequest("positions has a choice twice")
    prompt_token = request.from_prompt_token if request.HasField("from_prompt_token") else None
    return Positions(request.from_token, by_choice, prompt_token)
