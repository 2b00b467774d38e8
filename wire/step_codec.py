"""Encodes steps and step results as protobuf messages; decoding validates them.

Stage times are little-endian: 8 bytes for the time when the sender had the message ready (microseconds of the
coordinator's clock since 1970, or 0), then per stage, from FIRST on, 4 bytes each for hop (signed), receive,
wait and compute (microseconds).
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvcache import (
    Block,
    CopyState,
    Deref,
    Destroy,
    FreeState,
    FullBlock,
    LiveState,
    PartialBlock,
    Promote,
    SavedState,
    Signal,
    State,
    StateSignal,
    TakeState,
    Use,
)
from stageline_rpc.internal.v1 import join_pb2, step_pb2
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.sampling import SAMPLING_NUMBERS, GrammarSpec, StepSampling
from wire.steps import (
    GROW_BYTES,
    IDENTITY_BYTES,
    NO_DECODES,
    NO_GROWS,
    Decodes,
    EndRecord,
    FaultReport,
    Grows,
    Prefill,
    RowDetail,
    SequenceSignal,
    SliceError,
    SliceResult,
    StageTime,
    StartRecord,
    Step,
    StepResult,
    StepSlice,
    TokenLogprobs,
    keys_of,
    split_identities,
)

_ID_BYTES = 16
_STATE_KINDS: Mapping[str, Callable[[int], State]] = {"live": LiveState, "snapshot": SavedState}
_BLOCK_KINDS: Mapping[str, Callable[[int], Block]] = {"full": FullBlock, "partial": PartialBlock}
T = TypeVar("T")


def encode_signal(signal: Signal | StateSignal, message: step_pb2.SequenceSignal) -> None:
    match signal:
        case Use():
            message.use.blocks.extend(_encode_block(block) for block in signal.blocks)
            message.use.block_hashes.extend(signal.block_hashes)
            if signal.parent is not None:
                message.use.parent = signal.parent
            message.use.first_block = signal.first_block
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
        case TakeState():
            message.take_state.CopyFrom(_encode_state(signal.state))
        case CopyState():
            message.copy_state.source.CopyFrom(_encode_state(signal.source))
            message.copy_state.target.CopyFrom(_encode_state(signal.target))
            message.copy_state.position = signal.position
        case FreeState():
            message.free_state.CopyFrom(_encode_state(signal.state))


def decode_signal(message: step_pb2.SequenceSignal) -> Signal | StateSignal:
    """Decode a signal. Raises StepFault UNDECODABLE for an empty oneof."""
    match message.WhichOneof("signal"):
        case "use":
            use = message.use
            return Use(
                blocks=tuple(_decode_block(block) for block in use.blocks),
                block_hashes=tuple(use.block_hashes),
                parent=use.parent if use.HasField("parent") else None,
                first_block=use.first_block,
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
            return _decode_state_signal(message)


def _decode_state_signal(message: step_pb2.SequenceSignal) -> StateSignal:
    match message.WhichOneof("signal"):
        case "take_state":
            if isinstance(state := _decode_state(message.take_state), LiveState):
                return TakeState(state)
            raise StepFault(StepFaultKind.UNDECODABLE, "a sequence takes a snapshot for its state")
        case "copy_state":
            copy = message.copy_state
            return CopyState(_decode_state(copy.source), _decode_state(copy.target), copy.position)
        case "free_state":
            return FreeState(_decode_state(message.free_state))
        case _:
            raise StepFault(StepFaultKind.UNDECODABLE, "KV signal has no content")


def _encode_state(state: State) -> step_pb2.RecurrentState:
    if isinstance(state, LiveState):
        return step_pb2.RecurrentState(live=state.id)
    return step_pb2.RecurrentState(snapshot=state.sequence_hash)


def _decode_state(message: step_pb2.RecurrentState) -> State:
    return _decode_kind(message, "state", _STATE_KINDS)


def _encode_block(block: Block) -> step_pb2.Block:
    if isinstance(block, FullBlock):
        return step_pb2.Block(full=block.sequence_hash)
    return step_pb2.Block(partial=block.id)


def _decode_block(message: step_pb2.Block) -> Block:
    return _decode_kind(message, "block", _BLOCK_KINDS)


def _decode_kind(message: Message, group: str, kinds: Mapping[str, Callable[[int], T]]) -> T:
    """What the field that is set in a oneof stands for, by its number."""
    if (name := message.WhichOneof(group)) is None:
        raise StepFault(StepFaultKind.UNDECODABLE, f"{group} of a KV signal has no content")
    return kinds[name](getattr(message, name))


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
    if step.decodes:
        message.decodes.identities = step.decodes.identities
        message.decodes.tokens = step.decodes.tokens
        message.decodes.positions = step.decodes.positions
    for chunk in step.chunks:
        _add_chunk(message, chunk)
    for start in step.starts:
        _add_start(message, start)
    for end in step.ends:
        ended = message.ends.add(restart_count=end.restart_count)
        _set_key(ended.sequence, end.sequence)
    for entry in step.signals:
        signal = message.signals.add(group=entry.group)
        _set_key(signal.sequence, entry.sequence)
        encode_signal(entry.signal, signal)
    if step.grows:
        message.grows.rows, message.grows.position = step.grows.rows, step.grows.position
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
    ids = [identity[:_ID_BYTES] for identity in split_identities(message.decodes.identities)]
    ids += [chunk.sequence.request_id for chunk in message.chunks]
    return tuple(dict.fromkeys(RequestId(request_id) for request_id in ids if len(request_id) == _ID_BYTES))


def _decode_step(message: step_pb2.Step) -> Step:
    return Step(
        epoch=message.epoch,
        step_id=message.step_id,
        decodes=_decode_decodes(message.decodes) if message.HasField("decodes") else NO_DECODES,
        chunks=tuple([_decode_chunk(chunk) for chunk in message.chunks]),
        starts=tuple([_decode_start(start) for start in message.starts]),
        ends=tuple([EndRecord(_decode_key(end.sequence), end.restart_count) for end in message.ends]),
        signals=tuple(
            [
                SequenceSignal(_decode_key(entry.sequence), decode_signal(entry), entry.group)
                for entry in message.signals
            ]
        ),
        grows=_decode_grows(message) if message.HasField("grows") else NO_GROWS,
        digest=message.digest,
    )


def _decode_grows(message: step_pb2.Step) -> Grows:
    rows, position = message.grows.rows, message.grows.position
    if len(rows) % GROW_BYTES or position > len(message.signals):
        raise StepFault(
            StepFaultKind.UNDECODABLE,
            f"grows have {len(rows)} bytes in rows of {GROW_BYTES}, "
            f"after {position} of {len(message.signals)} signals",
        )
    return Grows(rows, position)


def _decode_decodes(columns: step_pb2.DecodeColumns) -> Decodes:
    decodes = Decodes(columns.identities, columns.tokens, columns.positions)
    _check_columns(decodes.identities, decodes.tokens, decodes.positions)
    return decodes


def _check_columns(identities: bytes, *columns: bytes) -> None:
    """Raises StepFault UNDECODABLE for different numbers of entries."""
    num_rows = len(identities) // IDENTITY_BYTES
    if len(identities) != num_rows * IDENTITY_BYTES or any(len(column) != 4 * num_rows for column in columns):
        sizes = [len(column) for column in columns]
        raise StepFault(
            StepFaultKind.UNDECODABLE,
            f"columns have {sizes} bytes of 4 per entry, identities have {len(identities)} bytes of "
            f"{IDENTITY_BYTES}",
        )


def encode_result(result: StepResult) -> step_pb2.StepResult:
    message = step_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        stage_times=encode_stage_times(result.stage_times, ready_at_us=result.ready_at_us),
    )
    message.identities, message.tokens = result.identities, result.tokens
    for detail in result.details:
        _encode_detail(detail, message.details.add(row=detail.row))
    for late in result.late_rows:
        _encode_detail(late.detail(), message.late_rows.add(identity=late.identity).detail)
    return message


def _encode_detail(detail: RowDetail, encoded: step_pb2.RowDetail) -> None:
    outcome = detail.outcome
    if isinstance(outcome, SliceError):
        encoded.error.kind = step_pb2.SliceError.Kind.ValueType(outcome.kind)
        encoded.error.stage = outcome.stage
        encoded.error.message = outcome.message
    elif outcome is not None:
        encoded.token = outcome
    if detail.logprobs is not None:
        encode_logprobs(detail.logprobs, encoded.logprobs)
    for logprobs in detail.prompt_logprobs:
        encode_logprobs(logprobs, encoded.prompt_logprobs.add())
    if detail.is_late:
        encoded.is_late = True


def decode_result(message: step_pb2.StepResult) -> StepResult:
    """Decode a result. Raises StepFault UNDECODABLE for missing content and inconsistent columns."""
    _check_columns(message.identities, message.tokens)
    details = tuple([_decode_detail(detail) for detail in message.details])
    rows = [detail.row for detail in details]
    num_rows = len(message.tokens) // 4
    if rows != sorted(set(rows)) or (rows and rows[-1] >= num_rows):
        raise StepFault(StepFaultKind.UNDECODABLE, f"details of rows {rows} in a result of {num_rows} rows")
    times, ready_at_us = decode_stage_times(message.stage_times)
    return StepResult(
        message.epoch,
        message.step_id,
        message.identities,
        message.tokens,
        details,
        times,
        ready_at_us,
        tuple([_decode_late_row(late) for late in message.late_rows]),
    )


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


def _add_chunk(message: step_pb2.Step, chunk: StepSlice) -> None:
    prefill = chunk.inference_step
    assert isinstance(prefill, Prefill)
    encoded = message.chunks.add(
        restart_count=chunk.restart_count,
        tokens=chunk.tokens,
        start=prefill.start,
        num_prefill_tokens=prefill.num_prefill_tokens,
        is_scored=prefill.is_scored,
    )
    _set_key(encoded.sequence, chunk.sequence)


def _decode_chunk(message: step_pb2.PrefillChunk) -> StepSlice:
    key, tokens = _decode_key(message.sequence), tuple(message.tokens)
    end = message.start + len(tokens)
    if not tokens or end > message.num_prefill_tokens:
        raise StepFault(
            StepFaultKind.SLICE_SET,
            f"chunk [{message.start}, {end}) of {key} with {message.num_prefill_tokens} prefill tokens",
        )
    prefill = Prefill(message.start, len(tokens), message.num_prefill_tokens, message.is_scored)
    return StepSlice(key, message.restart_count, tokens, prefill)


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
    if start.client:
        record.client = start.client


def _decode_start(message: step_pb2.StartRecord) -> StartRecord:
    return StartRecord(
        _decode_key(message.sequence),
        message.restart_count,
        message.num_prompt_tokens,
        tuple(message.tokens),
        decode_sampling(message.sampling),
        message.traceparent,
        message.client,
    )


def _decode_detail(message: step_pb2.RowDetail) -> RowDetail:
    return RowDetail(
        message.row,
        _decode_outcome(message),
        decode_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        tuple([decode_logprobs(score) for score in message.prompt_logprobs]),
        message.is_late,
    )


def _decode_late_row(message: step_pb2.LateRow) -> SliceResult:
    detail = _decode_detail(message.detail)
    if len(message.identity) != IDENTITY_BYTES or detail.outcome is None or detail.prompt_logprobs:
        raise StepFault(
            StepFaultKind.UNDECODABLE,
            f"late row with {len(message.identity)} bytes of identity, expected {IDENTITY_BYTES}, outcome "
            f"{detail.outcome} and {len(detail.prompt_logprobs)} log-probabilities of the prompt",
        )
    [(sequence, restart_count)] = keys_of(message.identity)
    return SliceResult.of(sequence, restart_count, detail)


def _decode_outcome(message: step_pb2.RowDetail) -> int | SliceError | None:
    match message.WhichOneof("outcome"):
        case outcome if outcome is not None and message.is_late:
            raise StepFault(
                StepFaultKind.UNDECODABLE, f"result of row {message.row} is late, and has its {outcome}"
            )
        case "token":
            return message.token
        case "error":
            return SliceError(message.error.kind, message.error.stage, message.error.message)
        case _ if message.prompt_logprobs or message.is_late:
            return None
        case _:
            raise StepFault(
                StepFaultKind.UNDECODABLE,
                f"result of row {message.row} has no token, error or log-probabilities",
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
