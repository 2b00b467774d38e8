"""Steps and results <-> protobuf messages. Decoding checks what a message can get wrong by itself."""

from google.protobuf.message import DecodeError

from stageline_rpc.v1 import cluster_pb2, stage_pb2
from wire.column_codec import decode_decodes, decode_tokens, encode_decodes, encode_tokens
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.sampling_codec import decode_logprobs, decode_sampling, encode_logprobs, encode_sampling
from wire.signal_codec import decode_signal, encode_signal
from wire.stage_times import decode_stage_times, encode_stage_times
from wire.steps import (
    Decode,
    EndRecord,
    FaultReport,
    Prefill,
    SequenceSignal,
    Slice,
    SliceError,
    SliceResult,
    StartRecord,
    Step,
    StepResult,
)


def encode_step(step: Step) -> bytes:
    """The serialised form that travels unchanged through all stages."""
    message = stage_pb2.Step(epoch=step.epoch, step_id=step.step_id, digest=step.digest)
    num_decodes = encode_decodes(step.slices, message.decodes)
    for part in step.slices[num_decodes:]:
        _add_slice(message, part)
    for start in step.starts:
        _add_start(message, start)
    for end in step.ends:
        ended = message.ends.add(generation=end.generation)
        _set_key(ended.sequence, end.sequence)
    for entry in step.signals:
        signal = message.signals.add()
        _set_key(signal.sequence, entry.sequence)
        encode_signal(entry.signal, signal)
    return message.SerializeToString()


def decode_step(data: bytes) -> Step:
    """The step behind `data`. Raises StepFault UNDECODABLE or SLICE_SET."""
    try:
        message = stage_pb2.Step.FromString(data)
    except DecodeError as error:
        raise StepFault(StepFaultKind.UNDECODABLE, f"step of {len(data)} bytes: {error}") from error
    try:
        return _decode_step(message)
    except StepFault as fault:
        fault.step_id = message.step_id
        fault.request_ids = _request_ids(message)
        raise


def _request_ids(message: stage_pb2.Step) -> tuple[RequestId, ...]:
    """Those of a step that is not what it should be, as far as they can be ids at all."""
    column = message.decodes.request_ids
    ids = [column[begin : begin + 16] for begin in range(0, len(column), 16)]
    ids += [part.sequence.request_id for part in message.slices]
    return tuple(dict.fromkeys(RequestId(each) for each in ids if len(each) == 16))


def _decode_step(message: stage_pb2.Step) -> Step:
    slices = [_decode_slice(part) for part in message.slices]
    if message.HasField("decodes"):
        slices = decode_decodes(message.decodes) + slices
    return Step(
        epoch=message.epoch,
        step_id=message.step_id,
        slices=tuple(slices),
        starts=tuple([_decode_start(start) for start in message.starts]),
        ends=tuple([EndRecord(_decode_key(end.sequence), end.generation) for end in message.ends]),
        signals=tuple(
            [SequenceSignal(_decode_key(entry.sequence), decode_signal(entry)) for entry in message.signals]
        ),
        digest=message.digest,
    )


def encode_result(result: StepResult) -> stage_pb2.StepResult:
    message = stage_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        stage_times=encode_stage_times(result.stage_times, ready_at_us=result.ready_at_us),
    )
    num_tokens = encode_tokens(result.results, message.tokens)
    for entry in result.results[num_tokens:]:
        encoded = message.results.add()
        _set_key(encoded.sequence, entry.sequence)
        encoded.generation = entry.generation
        outcome = entry.outcome
        if isinstance(outcome, SliceError):
            encoded.error.kind = stage_pb2.SliceError.Kind.ValueType(outcome.kind)
            encoded.error.stage = outcome.stage
            encoded.error.message = outcome.message
        elif outcome is not None:
            encoded.token = outcome
        if entry.logprobs is not None:
            encode_logprobs(entry.logprobs, encoded.logprobs)
        for logprobs in entry.prompt_logprobs:
            encode_logprobs(logprobs, encoded.prompt_logprobs.add())
    return message


def decode_result(message: stage_pb2.StepResult) -> StepResult:
    """Raises StepFault UNDECODABLE for a slice result without token, error and prompt log-probabilities, for
    columns of different lengths, and for times that are those of no number of stages.
    """
    results = [_decode_slice_result(entry) for entry in message.results]
    if message.HasField("tokens"):
        results = decode_tokens(message.tokens) + results
    times, ready_at_us = decode_stage_times(message.stage_times)
    return StepResult(message.epoch, message.step_id, tuple(results), times, ready_at_us)


def encode_fault(report: FaultReport) -> cluster_pb2.StepFault:
    return cluster_pb2.StepFault(
        epoch=report.epoch,
        step_id=report.step_id,
        stage=report.stage,
        kind=report.kind.value,
        message=report.message,
        request_ids=report.request_ids,
    )


def decode_fault(message: cluster_pb2.StepFault) -> FaultReport:
    """Raises ValueError for a kind that this version does not know."""
    return FaultReport(
        epoch=message.epoch,
        step_id=message.step_id,
        stage=message.stage,
        kind=StepFaultKind(message.kind),
        message=message.message,
        request_ids=tuple(RequestId(request_id) for request_id in message.request_ids),
    )


def _set_key(message: stage_pb2.SequenceKey, key: SequenceKey) -> None:
    """In place: a message that is made apart is copied into the one it goes into."""
    message.request_id = key.request_id
    message.choice = key.choice


def _decode_key(message: stage_pb2.SequenceKey) -> SequenceKey:
    request_id = message.request_id
    if len(request_id) != 16:
        raise StepFault(StepFaultKind.UNDECODABLE, f"request id of {len(request_id)} bytes, expected 16")
    return SequenceKey(RequestId(request_id), message.choice)


def _add_slice(message: stage_pb2.Step, part: Slice) -> None:
    key, step = part.sequence, part.inference_step
    encoded = message.slices.add()
    sequence = encoded.sequence
    sequence.request_id = key.request_id
    if key.choice:
        sequence.choice = key.choice
    if part.generation:
        encoded.generation = part.generation
    encoded.tokens.extend(part.tokens)
    if isinstance(step, Prefill):
        encoded.prefill.start = step.start
        encoded.prefill.num_tokens = step.num_tokens
        encoded.prefill.num_prefill_tokens = step.num_prefill_tokens
        encoded.prefill.is_scored = step.is_scored
    else:
        encoded.decode.position = step.position


def _decode_slice(message: stage_pb2.Slice) -> Slice:
    key, tokens = _decode_key(message.sequence), tuple(message.tokens)
    if not message.HasField("decode"):
        return Slice(key, message.generation, tokens, _decode_prefill(message, key, len(tokens)))
    if len(tokens) != 1:
        raise _wrong_count(key, len(tokens), 1)
    return Slice(key, message.generation, tokens, Decode(message.decode.position))


def _decode_prefill(message: stage_pb2.Slice, key: SequenceKey, num_tokens: int) -> Prefill:
    if not message.HasField("prefill"):
        raise StepFault(StepFaultKind.SLICE_SET, "a slice without an inference step")
    prefill = message.prefill
    step = Prefill(prefill.start, prefill.num_tokens, prefill.num_prefill_tokens, prefill.is_scored)
    if num_tokens != step.num_tokens or num_tokens == 0:
        raise _wrong_count(key, num_tokens, step.num_tokens)
    if step.start + step.num_tokens > step.num_prefill_tokens:
        raise StepFault(
            StepFaultKind.SLICE_SET,
            f"chunk [{step.start}, {step.start + step.num_tokens}) of {key} passes the end of its "
            f"{step.num_prefill_tokens} prefill tokens",
        )
    return step


def _wrong_count(key: SequenceKey, num_tokens: int, expected: int) -> StepFault:
    return StepFault(
        StepFaultKind.SLICE_SET,
        f"slice of {key} has {num_tokens} tokens, its inference step says {expected}",
    )


def _add_start(message: stage_pb2.Step, start: StartRecord) -> None:
    record = message.starts.add(
        generation=start.generation,
        num_prompt_tokens=start.num_prompt_tokens,
        tokens=start.tokens,
    )
    _set_key(record.sequence, start.sequence)
    encode_sampling(start.sampling, record.sampling)
    if start.traceparent:
        record.traceparent = start.traceparent


def _decode_start(message: stage_pb2.StartRecord) -> StartRecord:
    return StartRecord(
        _decode_key(message.sequence),
        message.generation,
        message.num_prompt_tokens,
        tuple(message.tokens),
        decode_sampling(message.sampling),
        message.traceparent,
    )


def _decode_slice_result(message: stage_pb2.SliceResult) -> SliceResult:
    key, scores = _decode_key(message.sequence), message.prompt_logprobs
    return SliceResult(
        key,
        message.generation,
        _decode_outcome(message, key),
        decode_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        tuple([decode_logprobs(each) for each in scores]) if scores else (),
    )


def _decode_outcome(message: stage_pb2.SliceResult, key: SequenceKey) -> int | SliceError | None:
    match message.WhichOneof("outcome"):
        case "token":
            return message.token
        case "error":
            return SliceError(message.error.kind, message.error.stage, message.error.message)
        case _ if message.prompt_logprobs:
            return None
        case _:
            raise StepFault(StepFaultKind.UNDECODABLE, f"result of {key} without token and error")
