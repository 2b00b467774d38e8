"""Steps and step results as protobuf messages; validated when decoded.

The slices of a step begin with its columns, as far as they are decodes of one token; likewise its results.

8 bytes: when the sender had this ready to send, in microseconds of the coordinator's clock since 1970, or 0;
then 16 bytes for each stage, from FIRST on: hop (signed), receive, wait, compute. All of it little-endian.
"""

import struct
from collections.abc import Sequence
from itertools import takewhile

from google.protobuf.message import DecodeError

from kvcache import Block, Deref, Destroy, FullBlock, PartialBlock, Promote, Signal, Use
from stageline_rpc.v1 import cluster_pb2, stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.sampling_codec import decode_logprobs, decode_sampling, encode_logprobs, encode_sampling
from wire.steps import (
    Decode,
    EndRecord,
    FaultReport,
    Prefill,
    SequenceSignal,
    SliceError,
    SliceResult,
    StageTime,
    StartRecord,
    Step,
    StepResult,
    StepSlice,
)

_ID_BYTES = 16
_FEWEST = 4
"""Columns for fewer sequences cost more than their messages."""

Columns = stage_pb2.DecodeColumns | stage_pb2.TokenColumns


def encode_decodes(slices: Sequence[StepSlice], columns: stage_pb2.DecodeColumns) -> int:
    """Fills the empty `columns` with the first slices; returns how many."""
    decodes = list(takewhile(_is_decode, slices))
    if len(decodes) < _FEWEST:
        return 0
    _encode_keys([part.sequence for part in decodes], columns)
    columns.generations.extend([part.generation for part in decodes])
    columns.tokens.extend([part.tokens[0] for part in decodes])
    columns.positions.extend([part.first_position for part in decodes])
    return len(decodes)


def decode_decodes(columns: stage_pb2.DecodeColumns) -> list[StepSlice]:
    """Raises StepFault UNDECODABLE for columns of different lengths."""
    _check_lengths(columns, columns.positions)
    return [
        StepSlice(key, generation, (token,), Decode(position))
        for key, generation, token, position in zip(
            _decode_keys(columns), columns.generations, columns.tokens, columns.positions, strict=True
        )
    ]


def encode_tokens(results: Sequence[SliceResult], columns: stage_pb2.TokenColumns) -> int:
    """Fills the empty `columns` with the first results; returns how many."""
    sampled = list(takewhile(_is_token, results))
    if len(sampled) < _FEWEST:
        return 0
    _encode_keys([result.sequence for result in sampled], columns)
    columns.generations.extend([result.generation for result in sampled])
    columns.tokens.extend([result.outcome for result in sampled if isinstance(result.outcome, int)])
    return len(sampled)


def decode_tokens(columns: stage_pb2.TokenColumns) -> list[SliceResult]:
    """Raises StepFault UNDECODABLE for columns of different lengths."""
    _check_lengths(columns)
    return [
        SliceResult(key, generation, token)
        for key, generation, token in zip(
            _decode_keys(columns), columns.generations, columns.tokens, strict=True
        )
    ]


def _is_decode(part: StepSlice) -> bool:
    return isinstance(part.inference_step, Decode) and len(part.tokens) == 1


def _is_token(result: SliceResult) -> bool:
    return isinstance(result.outcome, int) and result.logprobs is None and not result.prompt_logprobs


def _encode_keys(keys: Sequence[SequenceKey], columns: Columns) -> None:
    columns.request_ids = b"".join([key.request_id for key in keys])
    columns.choices.extend([key.choice for key in keys])


def _decode_keys(columns: Columns) -> list[SequenceKey]:
    ids = columns.request_ids
    return [
        SequenceKey(RequestId(ids[begin : begin + _ID_BYTES]), choice)
        for begin, choice in zip(range(0, len(ids), _ID_BYTES), columns.choices, strict=True)
    ]


def _check_lengths(columns: Columns, *others: Sequence[int]) -> None:
    lengths = [len(each) for each in (columns.choices, columns.generations, columns.tokens, *others)]
    if any(length * _ID_BYTES != len(columns.request_ids) for length in lengths):
        raise StepFault(
            StepFaultKind.UNDECODABLE,
            f"columns of {lengths} entries for request ids of {len(columns.request_ids)} bytes, "
            f"{_ID_BYTES} for each",
        )


def encode_signal(signal: Signal, message: stage_pb2.SequenceSignal) -> None:
    """Writes `signal` into the oneof of `message`."""
    match signal:
        case Use():
            message.use.blocks.extend(_encode_block(block) for block in signal.blocks)
            message.use.block_hashes.extend(signal.block_hashes)
            if signal.parent is not None:
                message.use.parent = signal.parent
        case Promote():
            message.promote.partial = signal.partial.id
            message.promote.sequence_hash = signal.sequence_hash
            message.promote.block_hash = signal.block_hash
            if signal.parent is not None:
                message.promote.parent = signal.parent
        case Deref():
            message.deref.CopyFrom(_encode_block(signal.block))
        case Destroy():
            message.destroy.CopyFrom(_encode_block(signal.block))


def decode_signal(message: stage_pb2.SequenceSignal) -> Signal:
    """Raises StepFault UNDECODABLE for a signal without content."""
    match message.WhichOneof("signal"):
        case "use":
            use = message.use
            return Use(
                blocks=tuple(_decode_block(block) for block in use.blocks),
                block_hashes=tuple(use.block_hashes),
                parent=use.parent if use.HasField("parent") else None,
            )
        case "promote":
            promote = message.promote
            return Promote(
                partial=PartialBlock(promote.partial),
                sequence_hash=promote.sequence_hash,
                parent=promote.parent if promote.HasField("parent") else None,
                block_hash=promote.block_hash,
            )
        case "deref":
            return Deref(_decode_block(message.deref))
        case "destroy":
            return Destroy(_decode_block(message.destroy))
        case _:
            raise StepFault(StepFaultKind.UNDECODABLE, "a KV signal without content")


def _encode_block(block: Block) -> stage_pb2.Block:
    if isinstance(block, FullBlock):
        return stage_pb2.Block(full=block.sequence_hash)
    return stage_pb2.Block(partial=block.id)


def _decode_block(message: stage_pb2.Block) -> Block:
    match message.WhichOneof("block"):
        case "full":
            return FullBlock(message.full)
        case "partial":
            return PartialBlock(message.partial)
        case _:
            raise StepFault(StepFaultKind.UNDECODABLE, "a KV signal names a block without content")


_MOST_US = 0xFFFFFFFF
_MOST_SIGNED_US = 0x7FFFFFFF
_READY_AT = struct.Struct("<Q")
_ONE = struct.Struct("<iIII")


def encode_stage_times(times: Sequence[StageTime], *, ready_at_us: int = 0) -> bytes:
    """Nothing where nothing is known; what is longer than 71 minutes (hops: 35) is cut there."""
    if not times and not ready_at_us:
        return b""
    return _READY_AT.pack(ready_at_us) + b"".join(
        [
            _ONE.pack(
                max(-_MOST_SIGNED_US, min(each.hop_us, _MOST_SIGNED_US)),
                min(each.receive_us, _MOST_US),
                min(each.wait_us, _MOST_US),
                min(each.compute_us, _MOST_US),
            )
            for each in times
        ]
    )


def decode_stage_times(data: bytes, *, num_stages: int | None = None) -> tuple[tuple[StageTime, ...], int]:
    """Those of `num_stages` stages (None: of any number), and when the sender had this ready; nothing and 0
    where it does not tell.

    Raises StepFault UNDECODABLE for another number, and for half a stage.
    """
    if not data:
        return (), 0
    size_bytes = len(data) - _READY_AT.size
    expected = size_bytes // _ONE.size * _ONE.size if num_stages is None else num_stages * _ONE.size
    if size_bytes < 0 or size_bytes != expected:
        raise StepFault(
            StepFaultKind.UNDECODABLE,
            f"times of stages in {len(data)} bytes, expected {_READY_AT.size + max(0, expected)}: "
            f"{_READY_AT.size}, and {_ONE.size} for each stage",
        )
    (ready_at_us,) = _READY_AT.unpack_from(data)
    times = tuple(
        [
            StageTime(wait_us, compute_us, hop_us, receive_us)
            for hop_us, receive_us, wait_us, compute_us in _ONE.iter_unpack(data[_READY_AT.size :])
        ]
    )
    return times, ready_at_us


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


def _add_slice(message: stage_pb2.Step, part: StepSlice) -> None:
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


def _decode_slice(message: stage_pb2.Slice) -> StepSlice:
    key, tokens = _decode_key(message.sequence), tuple(message.tokens)
    if not message.HasField("decode"):
        return StepSlice(key, message.generation, tokens, _decode_prefill(message, key, len(tokens)))
    if len(tokens) != 1:
        raise _wrong_count(key, len(tokens), 1)
    return StepSlice(key, message.generation, tokens, Decode(message.decode.position))


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
