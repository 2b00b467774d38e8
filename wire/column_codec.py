"""Decodes and sampled tokens <-> columns: what is the same for many sequences, without a message for each.

The slices of a step begin with its columns, as far as they are decodes of one token; likewise its results.
"""

from collections.abc import Sequence
from itertools import takewhile

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.steps import Decode, Slice, SliceResult

_ID_BYTES = 16
_FEWEST = 4
"""Columns for fewer sequences cost more than their messages."""

Columns = stage_pb2.DecodeColumns | stage_pb2.TokenColumns


def encode_decodes(slices: Sequence[Slice], columns: stage_pb2.DecodeColumns) -> int:
    """Fills the empty `columns` with the first slices; returns how many."""
    decodes = list(takewhile(_is_decode, slices))
    if len(decodes) < _FEWEST:
        return 0
    _encode_keys([part.sequence for part in decodes], columns)
    columns.generations.extend([part.generation for part in decodes])
    columns.tokens.extend([part.tokens[0] for part in decodes])
    columns.positions.extend([part.first_position for part in decodes])
    return len(decodes)


def decode_decodes(columns: stage_pb2.DecodeColumns) -> list[Slice]:
    """Raises StepFault UNDECODABLE for columns of different lengths."""
    _check_lengths(columns, columns.positions)
    return [
        Slice(key, generation, (token,), Decode(position))
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


def _is_decode(part: Slice) -> bool:
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
