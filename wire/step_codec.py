"""Encodes steps and step results as protobuf messages; decoding validates them.

Leading slices that are decodes of one token are encoded as columns, likewise leading results that are plain
tokens.

Stage times are little-endian: 8 bytes for the time when the sender had the message ready (microseconds of the
coordinator's clock since 1970, or 0), then per stage, from FIRST on, 4 bytes each for hop (signed), receive,
wait and compute (microseconds).
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from google.protobuf.message import DecodeError

from kvcache import Block, Deref, Destroy, FullBlock, PartialBlock, Promote, Signal, Use
from stageline_rpc.internal.v1 import join_pb2, step_pb2
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.sampling import SAMPLING_NUMBERS, GrammarSpec, StepSampling
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
    TokenLogprobs,
)

_ID_BYTES = 16
_MIN_COLUMN_LENGTH = 4
"""Columns for fewer sequences are larger than their messages."""

Columns = step_pb2.DecodeColumns | step_pb2.TokenColumns


def encode_decodes(slices: Sequence[StepSlice], columns: step_pb2.DecodeColumns) -> int:
    """Encode the leading decode slices into the empty `columns`; return their number."""
    decodes = list(takewhile(_is_decode, slices))
    if len(decodes) < _MIN_COLUMN_LENGTH:
        return 0
    _encode_keys([decode.sequence for decode in decodes], columns)
    columns.restart_counts.extend([decode.restart_count for decode in decodes])
    columns.tokens.extend([decode.tokens[0] for decode in decodes])
    columns.positions.extend([decode.first_position for decode in decodes])
    return len(decodes)


def decode_decodes(columns: step_pb2.DecodeColumns) -> list[StepSlice]:
    _check_lengths(columns, columns.positions)
    return [
        StepSlice(key, restart_count, (token,), Decode(position))
        for key, restart_count, token, position in zip(
            _decode_keys(columns), columns.restart_counts, columns.tokens, columns.positions, strict=True
        )
    ]


def encode_tokens(results: Sequence[SliceResult], columns: step_pb2.TokenColumns) -> int:
    """Encode the leading token results into the empty `columns`; return their number."""
    sampled = list(takewhile(_is_token, results))
    if len(sampled) < _MIN_COLUMN_LENGTH:
        return 0
    _encode_keys([result.sequence for result in sampled], columns)
    columns.restart_counts.extend([result.restart_count for result in sampled])
    columns.tokens.extend([result.outcome for result in sampled if isinstance(result.outcome, int)])
    return len(sampled)


def decode_tokens(columns: step_pb2.TokenColumns) -> list[SliceResult]:
    _check_lengths(columns)
    return [
        SliceResult(key, restart_count, token)
        for key, restart_count, token in zip(
            _decode_keys(columns), columns.restart_counts, columns.tokens, strict=True
        )
    ]


def _is_decode(step_slice: StepSlice) -> bool:
    return isinstance(step_slice.inference_step, Decode) and len(step_slice.tokens) == 1


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
    lengths = [len(column) for column in (columns.choices, columns.restart_counts, columns.tokens, *others)]
    if any(length * _ID_BYTES != len(columns.request_ids) for length in lengths):
        raise StepFault(
            StepFaultKind.UNDECODABLE,
            f"columns have {lengths} entries, request ids have {len(columns.request_ids)} bytes, "
            f"expected {_ID_BYTES} per entry",
        )


def encode_signal(signal: Signal, message: step_pb2.SequenceSignal) -> None:
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


def decode_signal(message: step_pb2.SequenceSignal) -> Signal:
    """Decode a signal. Raises StepFault UNDECODABLE for an empty oneof."""
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
            raise StepFault(StepFaultKind.UNDECODABLE, "KV signal has no content")


def _encode_block(block: Block) -> step_pb2.Block:
    if isinstance(block, FullBlock):
        return step_pb2.Block(full=block.sequence_hash)
    return step_pb2.Block(partial=block.id)


def _decode_block(message: step_pb2.Block) -> Block:
    match message.WhichOneof("block"):
        case "full":
            return FullBlock(message.full)
        case "partial":
            return PartialBlock(message.partial)
        case _:
            raise StepFault(StepFaultKind.UNDECODABLE, "block of a KV signal has no content")


_MAX_US = 0xFFFFFFFF
_MAX_SIGNED_US = 0x7FFFFFFF
_READY_AT = struct.Struct("<Q")
_STAGE_TIME = struct.Struct("<iIII")


def encode_stage_times(times: Sequence[StageTime], *, ready_at_us: int = 0) -> bytes:
    """Encode stage times; empty if there are none. Times are capped at 71 minutes (hops: 35)."""
    if not times and not ready_at_us:
        return b""
    return _READY_AT.pack(ready_at_us) + b"".join(
        [
            _STAGE_TIME.pack(
                max(-_MAX_SIGNED_US, min(time.hop_us, _MAX_SIGNED_US)),
                min(time.receive_us, _MAX_US),
                min(time.wait_us, _MAX_US),
                min(time.compute_us, _MAX_US),
            )
            for time in times
        ]
    )


def decode_stage_times(data: bytes, *, num_stages: int | None = None) -> tuple[tuple[StageTime, ...], int]:
    """Return stage times and when the sender had the message ready (0 if unknown).

    Raises StepFault UNDECODABLE for a size other than `num_stages` stages (None: any number).
    """
    if not data:
        return (), 0
    size_bytes = len(data) - _READY_AT.size
    expected = (
        size_bytes // _STAGE_TIME.size * _STAGE_TIME.size
        if num_stages is None
        else num_stages * _STAGE_TIME.size
    )
    if size_bytes < 0 or size_bytes != expected:
        raise StepFault(
            StepFaultKind.UNDECODABLE,
            f"stage times have {len(data)} bytes, expected {_READY_AT.size + max(0, expected)}: "
            f"{_READY_AT.size}, and {_STAGE_TIME.size} per stage",
        )
    (ready_at_us,) = _READY_AT.unpack_from(data)
    times = tuple(
        [
            StageTime(wait_us, compute_us, hop_us, receive_us)
            for hop_us, receive_us, wait_us, compute_us in _STAGE_TIME.iter_unpack(data[_READY_AT.size :])
        ]
    )
    return times, ready_at_us


def encode_step(step: Step) -> bytes:
    """Return the serialised form, which passes through all stages unchanged."""
    message = step_pb2.Step(epoch=step.epoch, step_id=step.step_id, digest=step.digest)
    num_decodes = encode_decodes(step.slices, message.decodes)
    for step_slice in step.slices[num_decodes:]:
        _add_slice(message, step_slice)
    for start in step.starts:
        _add_start(message, start)
    for end in step.ends:
        ended = message.ends.add(restart_count=end.restart_count)
        _set_key(ended.sequence, end.sequence)
    for entry in step.signals:
        signal = message.signals.add()
        _set_key(signal.sequence, entry.sequence)
        encode_signal(entry.signal, signal)
    return message.SerializeToString()


def decode_step(data: bytes) -> Step:
    """Decode a step. Raises StepFault UNDECODABLE or SLICE_SET."""
    try:
        message = step_pb2.Step.FromString(data)
    except DecodeError as error:
        raise StepFault(StepFaultKind.UNDECODABLE, f"step of {len(data)} bytes: {error}") from error
    try:
        return _decode_step(message)
    except StepFault as fault:
        fault.step_id = message.step_id
        fault.request_ids = _request_ids(message)
        raise


def _request_ids(message: step_pb2.Step) -> tuple[RequestId, ...]:
    """Return the well-formed request ids of an invalid step."""
    column = message.decodes.request_ids
    ids = [column[begin : begin + _ID_BYTES] for begin in range(0, len(column), _ID_BYTES)]
    ids += [encoded.sequence.request_id for encoded in message.slices]
    return tuple(dict.fromkeys(RequestId(request_id) for request_id in ids if len(request_id) == _ID_BYTES))


def _decode_step(message: step_pb2.Step) -> Step:
    slices = [_decode_slice(encoded) for encoded in message.slices]
    if message.HasField("decodes"):
        slices = decode_decodes(message.decodes) + slices
    return Step(
        epoch=message.epoch,
        step_id=message.step_id,
        slices=tuple(slices),
        starts=tuple([_decode_start(start) for start in message.starts]),
        ends=tuple([EndRecord(_decode_key(end.sequence), end.restart_count) for end in message.ends]),
        signals=tuple(
            [SequenceSignal(_decode_key(entry.sequence), decode_signal(entry)) for entry in message.signals]
        ),
        digest=message.digest,
    )


def encode_result(result: StepResult) -> step_pb2.StepResult:
    message = step_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        stage_times=encode_stage_times(result.stage_times, ready_at_us=result.ready_at_us),
    )
    num_tokens = encode_tokens(result.results, message.tokens)
    for entry in result.results[num_tokens:]:
        encoded = message.results.add()
        _set_key(encoded.sequence, entry.sequence)
        encoded.restart_count = entry.restart_count
        outcome = entry.outcome
        if isinstance(outcome, SliceError):
            encoded.error.kind = step_pb2.SliceError.Kind.ValueType(outcome.kind)
            encoded.error.stage = outcome.stage
            encoded.error.message = outcome.message
        elif outcome is not None:
            encoded.token = outcome
        if entry.logprobs is not None:
            encode_logprobs(entry.logprobs, encoded.logprobs)
        for logprobs in entry.prompt_logprobs:
            encode_logprobs(logprobs, encoded.prompt_logprobs.add())
    return message


def decode_result(message: step_pb2.StepResult) -> StepResult:
    """Decode a result. Raises StepFault UNDECODABLE for missing content and inconsistent lengths."""
    results = [_decode_slice_result(entry) for entry in message.results]
    if message.HasField("tokens"):
        results = decode_tokens(message.tokens) + results
    times, ready_at_us = decode_stage_times(message.stage_times)
    return StepResult(message.epoch, message.step_id, tuple(results), times, ready_at_us)


def encode_fault(report: FaultReport) -> join_pb2.StepFault:
    return join_pb2.StepFault(
        epoch=report.epoch,
        step_id=report.step_id,
        stage=report.stage,
        kind=report.kind.value,
        message=report.message,
        request_ids=report.request_ids,
    )


def decode_fault(message: join_pb2.StepFault) -> FaultReport:
    """Decode a fault report. Raises ValueError for an unknown kind."""
    return FaultReport(
        epoch=message.epoch,
        step_id=message.step_id,
        stage=message.stage,
        kind=StepFaultKind(message.kind),
        message=message.message,
        request_ids=tuple(RequestId(request_id) for request_id in message.request_ids),
    )


def _set_key(message: step_pb2.SequenceKey, key: SequenceKey) -> None:
    """Set the key in place: assigning a separate message would copy it."""
    message.request_id = key.request_id
    message.choice = key.choice


def _decode_key(message: step_pb2.SequenceKey) -> SequenceKey:
    request_id = message.request_id
    if len(request_id) != _ID_BYTES:
        raise StepFault(
            StepFaultKind.UNDECODABLE, f"request id has {len(request_id)} bytes, expected {_ID_BYTES}"
        )
    return SequenceKey(RequestId(request_id), message.choice)


def _add_slice(message: step_pb2.Step, step_slice: StepSlice) -> None:
    key, step = step_slice.sequence, step_slice.inference_step
    encoded = message.slices.add()
    sequence = encoded.sequence
    sequence.request_id = key.request_id
    if key.choice:
        sequence.choice = key.choice
    if step_slice.restart_count:
        encoded.restart_count = step_slice.restart_count
    encoded.tokens.extend(step_slice.tokens)
    if isinstance(step, Prefill):
        encoded.prefill.start = step.start
        encoded.prefill.num_tokens = step.num_tokens
        encoded.prefill.num_prefill_tokens = step.num_prefill_tokens
        encoded.prefill.is_scored = step.is_scored
    else:
        encoded.decode.position = step.position


def _decode_slice(message: step_pb2.StepSlice) -> StepSlice:
    key, tokens = _decode_key(message.sequence), tuple(message.tokens)
    if not message.HasField("decode"):
        return StepSlice(key, message.restart_count, tokens, _decode_prefill(message, key, len(tokens)))
    if len(tokens) != 1:
        raise _wrong_count(key, len(tokens), 1)
    return StepSlice(key, message.restart_count, tokens, Decode(message.decode.position))


def _decode_prefill(message: step_pb2.StepSlice, key: SequenceKey, num_tokens: int) -> Prefill:
    if not message.HasField("prefill"):
        raise StepFault(StepFaultKind.SLICE_SET, f"slice of {key} is neither prefill nor decode")
    prefill = message.prefill
    step = Prefill(prefill.start, prefill.num_tokens, prefill.num_prefill_tokens, prefill.is_scored)
    if num_tokens != step.num_tokens or num_tokens == 0:
        raise _wrong_count(key, num_tokens, step.num_tokens)
    if step.start + step.num_tokens > step.num_prefill_tokens:
        raise StepFault(
            StepFaultKind.SLICE_SET,
            f"chunk [{step.start}, {step.start + step.num_tokens}) of {key} exceeds its "
            f"{step.num_prefill_tokens} prefill tokens",
        )
    return step


def _wrong_count(key: SequenceKey, num_tokens: int, expected: int) -> StepFault:
    return StepFault(
        StepFaultKind.SLICE_SET,
        f"slice of {key} has {num_tokens} tokens, its inference step expects {expected}",
    )


def _add_start(message: step_pb2.Step, start: StartRecord) -> None:
    record = message.starts.add(
        restart_count=start.restart_count,
        num_prompt_tokens=start.num_prompt_tokens,
        tokens=start.tokens,
    )
    _set_key(record.sequence, start.sequence)
    encode_sampling(start.sampling, record.sampling)
    if start.traceparent:
        record.traceparent = start.traceparent


def _decode_start(message: step_pb2.StartRecord) -> StartRecord:
    return StartRecord(
        _decode_key(message.sequence),
        message.restart_count,
        message.num_prompt_tokens,
        tuple(message.tokens),
        decode_sampling(message.sampling),
        message.traceparent,
    )


def _decode_slice_result(message: step_pb2.SliceResult) -> SliceResult:
    key, scores = _decode_key(message.sequence), message.prompt_logprobs
    return SliceResult(
        key,
        message.restart_count,
        _decode_outcome(message, key),
        decode_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        tuple([decode_logprobs(score) for score in scores]) if scores else (),
    )


def _decode_outcome(message: step_pb2.SliceResult, key: SequenceKey) -> int | SliceError | None:
    match message.WhichOneof("outcome"):
        case "token":
            return message.token
        case "error":
            return SliceError(message.error.kind, message.error.stage, message.error.message)
        case _ if message.prompt_logprobs:
            return None
        case _:
            raise StepFault(
                StepFaultKind.UNDECODABLE, f"result of {key} has no token, error or log-probabilities"
            )


def encode_sampling(sampling: StepSampling, message: step_pb2.StepSampling) -> None:
    """Write `sampling` into the empty `message`."""
    if sampling.encoded is not None:
        message.MergeFromString(sampling.encoded)
        return
    parameters = message.parameters
    for number in SAMPLING_NUMBERS:
        setattr(parameters, number.name, getattr(sampling, number.name))
    parameters.top_k = sampling.top_k
    parameters.seed = sampling.seed
    for token, bias in sampling.logit_bias:
        parameters.logit_bias[token] = bias
    parameters.allowed_token_ids.extend(sampling.allowed_token_ids)
    for word in sampling.bad_words:
        parameters.bad_word_ids.add(ids=word)
    parameters.min_tokens = sampling.min_tokens
    if sampling.logprobs is not None:
        parameters.logprobs = sampling.logprobs
    parameters.prompt_logprobs = sampling.prompt_logprobs
    message.min_tokens_hold_back.extend(sampling.min_tokens_hold_back)
    if sampling.grammar is not None:
        message.grammar.definition = sampling.grammar.definition
        message.grammar.tokenizer_checksum = sampling.grammar.tokenizer_checksum


def encoded_ahead(sampling: StepSampling) -> StepSampling:
    """Return a copy with `encoded` set; 65,536 biases take 50 ms, too long for an event loop."""
    message = step_pb2.StepSampling()
    encode_sampling(sampling, message)
    return replace(sampling, encoded=message.SerializeToString())


def decode_sampling(message: step_pb2.StepSampling) -> StepSampling:
    """Decode the parameters without validating them; the sampler does that."""
    parameters = message.parameters
    return StepSampling(
        **{number.name: getattr(parameters, number.name) for number in SAMPLING_NUMBERS},
        top_k=parameters.top_k,
        seed=parameters.seed,
        logit_bias=tuple(sorted(parameters.logit_bias.items())),
        allowed_token_ids=tuple(parameters.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in parameters.bad_word_ids),
        min_tokens=parameters.min_tokens,
        min_tokens_hold_back=tuple(message.min_tokens_hold_back),
        logprobs=parameters.logprobs if parameters.HasField("logprobs") else None,
        prompt_logprobs=parameters.prompt_logprobs,
        grammar=_decode_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def _decode_grammar(message: step_pb2.Grammar) -> GrammarSpec:
    return GrammarSpec(definition=message.definition, tokenizer_checksum=message.tokenizer_checksum)


def encode_logprobs(logprobs: TokenLogprobs, message: step_pb2.StepLogprobs) -> None:
    """Write `logprobs` into the empty `message`."""
    message.token = logprobs.token
    message.logprob = logprobs.logprob
    message.rank = logprobs.rank
    message.top_tokens.extend(token for token, _ in logprobs.top)
    message.top_logprobs.extend(logprob for _, logprob in logprobs.top)


def decode_logprobs(message: step_pb2.StepLogprobs) -> TokenLogprobs:
    """Decode log-probabilities; lists of unequal lengths (no stage sends them) are cut."""
    top = tuple(zip(message.top_tokens, message.top_logprobs, strict=False))
    return TokenLogprobs(message.token, message.logprob, message.rank, top)
