"""Round trips of steps, results and fault reports; invalid steps are rejected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from kvcache import FullBlock, PartialBlock, Promote, Use
from stageline_rpc.internal.v1 import join_pb2, step_pb2
from tests.unit.wire.wire_strategies import example_step, fault_reports, start_records, step_results, steps
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId, SequenceKey, id_text
from wire.step_codec import decode_fault, decode_result, decode_step, encode_fault, encode_result, encode_step
from wire.steps import (
    Decode,
    FaultReport,
    Prefill,
    SequenceSignal,
    SliceError,
    SliceResult,
    StartRecord,
    Step,
    StepResult,
    StepSlice,
    TokenLogprobs,
)

KEY = SequenceKey(RequestId(bytes(range(16))), 1)


@given(steps())
def test_a_step_round_trips(step: Step) -> None:
    assert decode_step(encode_step(step)) == step


@given(start_records)
def test_a_start_record_is_within_its_declared_size(start: StartRecord) -> None:
    empty = len(encode_step(Step(epoch=1, step_id=1)))
    assert len(encode_step(Step(epoch=1, step_id=1, starts=(start,)))) - empty <= start.most_bytes + 200


@given(step_results)
def test_a_result_round_trips(result: StepResult) -> None:
    data = encode_result(result).SerializeToString()
    assert decode_result(step_pb2.StepResult.FromString(data)) == result


@given(fault_reports)
def test_a_fault_report_round_trips(report: FaultReport) -> None:
    data = encode_fault(report).SerializeToString()
    assert decode_fault(join_pb2.StepFault.FromString(data)) == report


def test_the_example_step_has_one_of_everything() -> None:
    message = step_pb2.Step.FromString(encode_step(example_step()))
    for field in step_pb2.Step.DESCRIPTOR.fields:
        assert getattr(message, field.name), field.name
    assert {entry.WhichOneof("signal") for entry in message.signals} == {"use", "promote", "deref", "destroy"}
    assert {part.WhichOneof("inference_step") for part in message.slices} == {"prefill", "decode"}


def test_a_one_token_prompt_is_a_prefill_and_not_a_decode() -> None:
    prefill = StepSlice(KEY, 0, (5,), Prefill(0, 1, 1))
    decode = StepSlice(KEY, 0, (5,), Decode(0))
    decoded = decode_step(encode_step(Step(epoch=1, step_id=0, slices=(prefill, decode))))
    assert decoded.slices == (prefill, decode)
    assert isinstance(decoded.slices[0].inference_step, Prefill)


@pytest.mark.parametrize("parent", [None, 0])
def test_a_parent_of_zero_is_not_the_same_as_no_parent(parent: int | None) -> None:
    sent = (Use((FullBlock(1),), (1,), parent), Promote(PartialBlock(1), 2, parent, 3))
    step = Step(epoch=1, step_id=0, signals=tuple(SequenceSignal(KEY, signal) for signal in sent))
    assert tuple(entry.signal for entry in decode_step(encode_step(step)).signals) == sent


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_truncated_step_is_undecodable(cut: int) -> None:
    with pytest.raises(StepFault) as caught:
        decode_step(encode_step(example_step())[:-cut])
    assert caught.value.kind is StepFaultKind.UNDECODABLE
    assert caught.value.step_id is None


def change_slice(change: Callable[[step_pb2.StepSlice], object]) -> bytes:
    message = step_pb2.Step.FromString(encode_step(example_step()))
    change(message.slices[0])
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda part: part.tokens.append(9), "3 tokens, its inference step expects 2"),
        (lambda part: part.tokens.pop(), "1 tokens, its inference step expects 2"),
        (lambda part: part.decode.SetInParent(), "2 tokens, its inference step expects 1"),
        (lambda part: (part.ClearField("tokens"), part.prefill.ClearField("num_tokens")), "0 tokens"),
        (lambda part: setattr(part.prefill, "num_prefill_tokens", 17), r"chunk \[16, 18\) .* 17 prefill"),
        (lambda part: part.ClearField("prefill"), "is neither prefill nor decode"),
    ],
    ids=["too many tokens", "too few", "a decode of two", "no tokens", "past the end", "no inference step"],
)
def test_a_slice_that_contradicts_itself_is_a_wrong_slice_set(
    change: Callable[[step_pb2.StepSlice], object], text: str
) -> None:
    with pytest.raises(StepFault, match=text) as caught:
        decode_step(change_slice(change))
    assert caught.value.kind is StepFaultKind.SLICE_SET


def test_a_wrong_slice_names_its_step_and_requests() -> None:
    with pytest.raises(StepFault) as caught:
        decode_step(change_slice(lambda part: part.tokens.append(9)))
    assert caught.value.step_id == 7
    assert caught.value.request_ids == example_step().request_ids
    described = caught.value.describe(stage=2)
    assert described.startswith(f"stage 2, step 7, requests {id_text(bytes([1]) * 16)}, ")
    assert ": SLICE_SET: slice of" in described


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_request_id_that_is_not_16_bytes_is_undecodable(size: int) -> None:
    with pytest.raises(StepFault, match=f"request id has {size} bytes") as caught:
        decode_step(change_slice(lambda part: setattr(part.sequence, "request_id", bytes(size))))
    assert caught.value.kind is StepFaultKind.UNDECODABLE


@pytest.mark.parametrize("field", ["use", "deref", "destroy"])
def test_a_signal_or_block_without_content_is_undecodable(field: str) -> None:
    message = step_pb2.Step.FromString(encode_step(example_step()))
    getattr(message.signals[0], field).SetInParent()
    if field == "use":
        message.signals[0].use.blocks.add()
    with pytest.raises(StepFault, match="block of a KV signal has no content") as caught:
        decode_step(message.SerializeToString())
    assert caught.value.kind is StepFaultKind.UNDECODABLE

    message.signals[0].ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(StepFault, match="signal has no content") as caught:
        decode_step(message.SerializeToString())
    assert caught.value.kind is StepFaultKind.UNDECODABLE


def test_a_slice_result_without_outcome_is_undecodable() -> None:
    message = step_pb2.StepResult(epoch=1, step_id=2)
    message.results.add(sequence=step_pb2.SequenceKey(request_id=KEY.request_id, choice=1))
    with pytest.raises(StepFault, match="has no token, error or log-probabilities") as caught:
        decode_result(message)
    assert caught.value.kind is StepFaultKind.UNDECODABLE


def test_token_zero_is_an_outcome() -> None:
    message = step_pb2.StepResult()
    message.results.add(sequence=step_pb2.SequenceKey(request_id=KEY.request_id), token=0)
    assert decode_result(message).results[0].outcome == 0


@pytest.mark.parametrize("number", [0, 999])
def test_a_fault_of_unknown_kind_is_rejected(number: int) -> None:
    with pytest.raises(ValueError, match=str(number)):
        decode_fault(join_pb2.StepFault(kind=number))  # type: ignore[arg-type]


def test_fault_kinds_and_wire_enum_values_match_one_to_one() -> None:
    wire = {f"STEP_FAULT_KIND_{kind.name}": kind.value for kind in StepFaultKind}
    assert wire | {"STEP_FAULT_KIND_UNSPECIFIED": 0} == dict(step_pb2.StepFaultKind.items())


def test_sampled_slices_follow_from_the_inference_step() -> None:
    assert StepSlice(KEY, 0, (1,), Decode(3)).is_sampled
    assert StepSlice(KEY, 0, (1, 2), Prefill(2, 2, 4)).is_sampled
    assert not StepSlice(KEY, 0, (1, 2), Prefill(0, 2, 4)).is_sampled
    assert not StepSlice(KEY, 0, (1,), Prefill(0, 1, 4)).is_sampled
    assert StepSlice(KEY, 0, (1,), Decode(3)).first_position == 3
    assert StepSlice(KEY, 0, (1, 2), Prefill(2, 2, 4)).first_position == 2


def test_a_step_counts_tokens_and_names_each_request_once() -> None:
    other = SequenceKey(RequestId(bytes(16)), 0)
    parts = (
        StepSlice(KEY, 0, (1, 2), Prefill(0, 2, 4)),
        StepSlice(other, 0, (1,), Decode(3)),
        StepSlice(KEY._replace(choice=2), 0, (1,), Decode(3)),
    )
    step = Step(epoch=1, step_id=0, slices=parts)
    assert step.num_tokens == 4
    assert step.request_ids == (KEY.request_id, other.request_id)


def key(number: int) -> SequenceKey:
    return SequenceKey(RequestId(number.to_bytes(16)), number)


DECODES = tuple(StepSlice(key(number), number, (100 + number,), Decode(number)) for number in range(6))
CHUNK = StepSlice(key(20), 0, (1, 2), Prefill(0, 2, 8))
TOKENS = tuple(SliceResult(key(number), number, number) for number in range(6))
LOGPROBS = TokenLogprobs(5, -1.0, 1)
OTHER_RESULTS = (
    SliceResult(key(30), 0, SliceError(1, 2, "text")),
    SliceResult(key(31), 0, 5, LOGPROBS),
    SliceResult(key(32), 0, 5, None, (LOGPROBS,)),
    SliceResult(key(33), 0, None, None, (LOGPROBS,)),
)


def step_message(*slices: StepSlice) -> step_pb2.Step:
    return step_pb2.Step.FromString(encode_step(Step(epoch=1, step_id=7, slices=slices)))


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
def test_the_first_decodes_of_a_large_step_are_columns(
    slices: tuple[StepSlice, ...], num_columns: int
) -> None:
    message = step_message(*slices)
    assert len(message.decodes.tokens) == num_columns
    assert len(message.slices) == len(slices) - num_columns
    assert decode_step(message.SerializeToString()).slices == slices


@pytest.mark.parametrize("other", OTHER_RESULTS)
@pytest.mark.parametrize(("place", "num_columns"), [(0, 0), (3, 0), (4, 4), (6, 6)])
def test_only_plain_tokens_are_in_columns(other: SliceResult, place: int, num_columns: int) -> None:
    result = StepResult(1, 7, (*TOKENS[:place], other, *TOKENS[place:]))
    message = encode_result(result)
    assert len(message.tokens.tokens) == num_columns
    assert decode_result(message) == result


def test_decodes_are_accepted_as_messages() -> None:
    """Another implementation may skip columns; they only save bytes."""
    message = step_pb2.Step(epoch=1, step_id=7)
    for part in DECODES:
        sequence = step_pb2.SequenceKey(request_id=part.sequence.request_id, choice=part.sequence.choice)
        message.slices.add(
            sequence=sequence,
            restart_count=part.restart_count,
            tokens=part.tokens,
            decode=step_pb2.Decode(position=part.first_position),
        )
    assert decode_step(message.SerializeToString()).slices == DECODES


def _cut_ids(columns: step_pb2.DecodeColumns | step_pb2.TokenColumns) -> None:
    columns.request_ids = columns.request_ids[:-1]


def _more_ids(columns: step_pb2.DecodeColumns | step_pb2.TokenColumns) -> None:
    columns.request_ids += bytes(16)


@pytest.mark.parametrize(
    "change",
    [
        _cut_ids,
        _more_ids,
        lambda columns: columns.ClearField("request_ids"),
        lambda columns: columns.choices.append(1),
        lambda columns: columns.restart_counts.pop(),
        lambda columns: columns.tokens.append(1),
        lambda columns: columns.ClearField("positions"),
    ],
)
def test_decode_columns_of_different_lengths_are_rejected(
    change: Callable[[step_pb2.DecodeColumns], object],
) -> None:
    message = step_message(*DECODES)
    change(message.decodes)
    with pytest.raises(StepFault, match=r"columns have .* entries, request ids have .* bytes") as caught:
        decode_step(message.SerializeToString())
    assert caught.value.kind is StepFaultKind.UNDECODABLE
    assert caught.value.step_id == 7


@pytest.mark.parametrize("name", ["choices", "restart_counts", "tokens"])
def test_token_columns_of_different_lengths_are_rejected(name: str) -> None:
    message = encode_result(StepResult(1, 7, TOKENS))
    getattr(message.tokens, name).append(1)
    with pytest.raises(StepFault, match="columns have") as caught:
        decode_result(message)
    assert caught.value.kind is StepFaultKind.UNDECODABLE


def test_a_fault_names_the_requests_of_columns_and_messages() -> None:
    message = step_message(*DECODES, CHUNK)
    message.slices[0].ClearField("tokens")
    with pytest.raises(StepFault, match="has 0 tokens") as caught:
        decode_step(message.SerializeToString())
    assert caught.value.request_ids == tuple(part.sequence.request_id for part in (*DECODES, CHUNK))
