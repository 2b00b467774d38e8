"""Columns are another form of the same slices and results, and refused when they are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.step_codec import decode_result, decode_step, encode_result, encode_step
from wire.steps import Decode, Prefill, Slice, SliceError, SliceResult, Step, StepResult, TokenLogprobs


def key(number: int) -> SequenceKey:
    return SequenceKey(RequestId(number.to_bytes(16)), number)


DECODES = tuple(Slice(key(number), number, (100 + number,), Decode(number)) for number in range(6))
CHUNK = Slice(key(20), 0, (1, 2), Prefill(0, 2, 8))
TOKENS = tuple(SliceResult(key(number), number, number) for number in range(6))
LOGPROBS = TokenLogprobs(5, -1.0, 1)
OTHER_RESULTS = (
    SliceResult(key(30), 0, SliceError(1, 2, "text")),
    SliceResult(key(31), 0, 5, LOGPROBS),
    SliceResult(key(32), 0, 5, None, (LOGPROBS,)),
    SliceResult(key(33), 0, None, None, (LOGPROBS,)),
)


def step_message(*slices: Slice) -> stage_pb2.Step:
    return stage_pb2.Step.FromString(encode_step(Step(epoch=1, step_id=7, slices=slices)))


@pytest.mark.parametrize(
    ("slices", "num_columns"),
    [
        (DECODES, 6),
        (DECODES[:4], 4),
        (DECODES[:3], 0),
        ((*DECODES, CHUNK), 6),
        ((*DECODES[:4], CHUNK, *DECODES[4:]), 4),
        ((CHUNK, *DECODES), 0),
    ],
)
def test_the_first_decodes_of_a_large_step_are_columns(slices: tuple[Slice, ...], num_columns: int) -> None:
    message = step_message(*slices)
    assert len(message.decodes.tokens) == num_columns
    assert len(message.slices) == len(slices) - num_columns
    assert decode_step(message.SerializeToString()).slices == slices


@pytest.mark.parametrize("other", OTHER_RESULTS)
@pytest.mark.parametrize(("place", "num_columns"), [(0, 0), (3, 0), (4, 4), (6, 6)])
def test_only_what_is_a_token_and_nothing_else_is_in_columns(
    other: SliceResult, place: int, num_columns: int
) -> None:
    result = StepResult(1, 7, (*TOKENS[:place], other, *TOKENS[place:]))
    message = encode_result(result)
    assert len(message.tokens.tokens) == num_columns
    assert decode_result(message) == result


def test_decodes_may_come_as_messages_too() -> None:
    """From another implementation: columns are a matter of cost."""
    message = stage_pb2.Step(epoch=1, step_id=7)
    for part in DECODES:
        sequence = stage_pb2.SequenceKey(request_id=part.sequence.request_id, choice=part.sequence.choice)
        message.slices.add(
            sequence=sequence,
            generation=part.generation,
            tokens=part.tokens,
            decode=stage_pb2.Decode(position=part.first_position),
        )
    assert decode_step(message.SerializeToString()).slices == DECODES


def _cut_ids(columns: stage_pb2.DecodeColumns | stage_pb2.TokenColumns) -> None:
    columns.request_ids = columns.request_ids[:-1]


def _more_ids(columns: stage_pb2.DecodeColumns | stage_pb2.TokenColumns) -> None:
    columns.request_ids += bytes(16)


@pytest.mark.parametrize(
    "change",
    [
        _cut_ids,
        _more_ids,
        lambda columns: columns.ClearField("request_ids"),
        lambda columns: columns.choices.append(1),
        lambda columns: columns.generations.pop(),
        lambda columns: columns.tokens.append(1),
        lambda columns: columns.ClearField("positions"),
    ],
)
def test_decode_columns_of_different_lengths_are_refused(
    change: Callable[[stage_pb2.DecodeColumns], object],
) -> None:
    message = step_message(*DECODES)
    change(message.decodes)
    with pytest.raises(StepFault, match=r"columns of .* entries for request ids of .* bytes") as caught:
        decode_step(message.SerializeToString())
    assert caught.value.kind is StepFaultKind.UNDECODABLE
    assert caught.value.step_id == 7


@pytest.mark.parametrize("name", ["choices", "generations", "tokens"])
def test_token_columns_of_different_lengths_are_refused(name: str) -> None:
    message = encode_result(StepResult(1, 7, TOKENS))
    getattr(message.tokens, name).append(1)
    with pytest.raises(StepFault, match="columns of") as caught:
        decode_result(message)
    assert caught.value.kind is StepFaultKind.UNDECODABLE


def test_a_fault_names_the_requests_of_columns_and_messages() -> None:
    message = step_message(*DECODES, CHUNK)
    message.slices[0].ClearField("tokens")
    with pytest.raises(StepFault, match="has 0 tokens") as caught:
        decode_step(message.SerializeToString())
    assert caught.value.request_ids == tuple(part.sequence.request_id for part in (*DECODES, CHUNK))
