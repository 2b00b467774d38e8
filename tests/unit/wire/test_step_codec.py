"""Round trips of steps, results and fault reports; invalid steps are rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    Decodes,
    FaultReport,
    Prefill,
    RowDetail,
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


def test_a_one_token_prompt_is_a_prefill_and_not_a_decode() -> None:
    prefill = StepSlice(KEY, 0, (5,), Prefill(0, 1, 1))
    decode = StepSlice(KEY, 0, (5,), Decode(0))
    decoded = decode_step(encode_step(Step.of((decode, prefill), epoch=1, step_id=0)))
    assert decoded.slices == (decode, prefill)
    assert (len(decoded.decodes), len(decoded.chunks)) == (1, 1)


def test_a_decode_after_a_chunk_is_rejected() -> None:
    chunk, decode = StepSlice(KEY, 0, (5,), Prefill(0, 1, 1)), StepSlice(KEY, 0, (5,), Decode(0))
    with pytest.raises(ValueError, match="a decode follows a chunk"):
        Step.of((chunk, decode), epoch=1, step_id=0)


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


def change_chunk(change: Callable[[step_pb2.PrefillChunk], object]) -> bytes:
    message = step_pb2.Step.FromString(encode_step(example_step()))
    change(message.chunks[0])
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda chunk: chunk.tokens.append(9), r"chunk \[16, 19\) of .* with 18 prefill"),
        (lambda chunk: chunk.ClearField("tokens"), r"chunk \[16, 16\) of .* with 18 prefill"),
        (lambda chunk: setattr(chunk, "num_prefill_tokens", 17), r"chunk \[16, 18\) of .* with 17 prefill"),
        (lambda chunk: setattr(chunk, "start", 17), r"chunk \[17, 19\) of .* with 18 prefill"),
    ],
    ids=["too many tokens", "no tokens", "past the end", "starts too late"],
)
def test_a_chunk_that_contradicts_itself_is_a_wrong_slice_set(
    change: Callable[[step_pb2.PrefillChunk], object], text: str
) -> None:
    with pytest.raises(StepFault, match=text) as caught:
        decode_step(change_chunk(change))
    assert caught.value.kind is StepFaultKind.SLICE_SET


def test_a_wrong_chunk_names_its_step_and_requests() -> None:
    with pytest.raises(StepFault) as caught:
        decode_step(change_chunk(lambda chunk: chunk.tokens.append(9)))
    assert caught.value.step_id == 7
    assert caught.value.request_ids == example_step().request_ids
    described = caught.value.describe(stage=2)
    assert described.startswith(f"stage 2, step 7, requests {id_text(bytes([2]) * 16)}, ")
    assert ": SLICE_SET: chunk" in described


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_request_id_that_is_not_16_bytes_is_undecodable(size: int) -> None:
    with pytest.raises(StepFault, match=f"request id has {size} bytes") as caught:
        decode_step(change_chunk(lambda chunk: setattr(chunk.sequence, "request_id", bytes(size))))
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


def one_row(**detail: Any) -> step_pb2.StepResult:
    message = encode_result(StepResult.of(1, 2, (SliceResult(KEY, 0, 9),)))
    message.details.add(**detail)
    return message


def test_a_detail_without_outcome_is_undecodable() -> None:
    with pytest.raises(StepFault, match="row 0 has no token, error or log-probabilities") as caught:
        decode_result(one_row(row=0))
    assert caught.value.kind is StepFaultKind.UNDECODABLE


def test_token_zero_is_an_outcome() -> None:
    assert decode_result(one_row(row=0, token=0)).results[0].outcome == 0


def test_a_late_row_has_no_outcome_yet() -> None:
    assert decode_result(one_row(row=0, is_late=True)).details == (RowDetail(0, None, is_late=True),)
    for outcome in ({"token": 3}, {"error": step_pb2.SliceError(stage=1)}):
        with pytest.raises(StepFault, match=f"row 0 is late, and has its {next(iter(outcome))}") as caught:
            decode_result(one_row(row=0, is_late=True, **outcome))
        assert caught.value.kind is StepFaultKind.UNDECODABLE


@pytest.mark.parametrize(
    ("identity", "detail", "text"),
    [
        (23, {"token": 3}, "23 bytes of identity, expected 24, outcome 3 and 0 log-probabilities"),
        (24, {"is_late": True}, "24 bytes of identity, expected 24, outcome None"),
        (24, {"token": 3, "prompt_logprobs": [step_pb2.StepLogprobs()]}, "and 1 log-probabilities"),
    ],
)
def test_an_incomplete_late_row_is_undecodable(identity: int, detail: dict[str, Any], text: str) -> None:
    message = encode_result(StepResult.of(1, 2))
    message.late_rows.add(identity=bytes(identity), detail=step_pb2.RowDetail(**detail))
    with pytest.raises(StepFault, match=text) as caught:
        decode_result(message)
    assert caught.value.kind is StepFaultKind.UNDECODABLE


@pytest.mark.parametrize("rows", [[1], [0, 0], [2**32 - 1]])
def test_details_of_other_rows_are_undecodable(rows: list[int]) -> None:
    message = encode_result(StepResult.of(1, 2, (SliceResult(KEY, 0, 9),)))
    for row in rows:
        message.details.add(row=row, token=1)
    with pytest.raises(StepFault, match="in a result of 1 rows") as caught:
        decode_result(message)
    assert caught.value.kind is StepFaultKind.UNDECODABLE


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
        StepSlice(KEY._replace(choice=2), 0, (1,), Decode(3)),
        StepSlice(other, 0, (1,), Decode(3)),
        StepSlice(KEY, 0, (1, 2), Prefill(0, 2, 4)),
    )
    step = Step.of(parts, epoch=1, step_id=0)
    assert (step.num_tokens, step.num_slices) == (4, 3)
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
    return step_pb2.Step.FromString(encode_step(Step.of(slices, epoch=1, step_id=7)))


def test_the_rows_of_a_result_are_the_answered_slices() -> None:
    last, scored = (
        StepSlice(key(21), 0, (1, 2), Prefill(6, 2, 8)),
        StepSlice(key(22), 3, (1, 2), Prefill(0, 2, 8, is_scored=True)),
    )
    step = Step.of((*DECODES, CHUNK, last, scored), epoch=1, step_id=7)
    results = [SliceResult(part.sequence, part.restart_count, 1) for part in (*DECODES, last, scored)]
    assert StepResult.of(1, 7, results).identities == step.answered_identities


@pytest.mark.parametrize("other", OTHER_RESULTS)
@pytest.mark.parametrize("place", [0, 3, 6])
def test_only_rows_that_are_not_plain_tokens_have_details(other: SliceResult, place: int) -> None:
    results = (*TOKENS[:place], other, *TOKENS[place:])
    message = encode_result(StepResult.of(1, 7, results))
    assert [detail.row for detail in message.details] == [place]
    assert decode_result(message).results == results


@pytest.mark.parametrize("column", ["identities", "tokens", "positions"])
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + bytes(4), lambda data: b""])
def test_decode_columns_of_different_lengths_are_rejected(
    column: str, change: Callable[[bytes], bytes]
) -> None:
    message = step_message(*DECODES)
    setattr(message.decodes, column, change(getattr(message.decodes, column)))
    with pytest.raises(StepFault, match=r"columns have .* bytes of 4 per entry") as caught:
        decode_step(message.SerializeToString())
    assert caught.value.kind is StepFaultKind.UNDECODABLE
    assert caught.value.step_id == 7


@pytest.mark.parametrize("column", ["identities", "tokens"])
def test_result_columns_of_different_lengths_are_rejected(column: str) -> None:
    message = encode_result(StepResult.of(1, 7, TOKENS))
    setattr(message, column, getattr(message, column) + bytes(4))
    with pytest.raises(StepFault, match="columns have") as caught:
        decode_result(message)
    assert caught.value.kind is StepFaultKind.UNDECODABLE


def test_a_fault_names_the_requests_of_decodes_and_chunks() -> None:
    message = step_message(*DECODES, CHUNK)
    message.chunks[0].ClearField("tokens")
    with pytest.raises(StepFault, match="prefill tokens") as caught:
        decode_step(message.SerializeToString())
    assert caught.value.request_ids == tuple(part.sequence.request_id for part in (*DECODES, CHUNK))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda grows: setattr(grows, "rows", grows.rows[:-1]), "63 bytes in rows of 64, after 3 of 5"),
        (lambda grows: setattr(grows, "rows", grows.rows + bytes(8)), "72 bytes in rows of 64"),
        (lambda grows: setattr(grows, "position", 6), "after 6 of 5 signals"),
    ],
)
def test_grows_that_do_not_fit_are_undecodable(
    change: Callable[[step_pb2.GrowRows], object], text: str
) -> None:
    message = step_pb2.Step.FromString(encode_step(example_step()))
    change(message.grows)
    with pytest.raises(StepFault, match=text) as caught:
        decode_step(message.SerializeToString())
    assert caught.value.kind is StepFaultKind.UNDECODABLE
    assert caught.value.step_id == 7


@pytest.mark.parametrize("rest", [(), TOKENS, (SliceResult(KEY, 0, SliceError(2, 1, "no token")), *TOKENS)])
def test_rows_before_a_result_shift_its_details(rest: tuple[SliceResult, ...]) -> None:
    tokens = range(40, 40 + len(DECODES))
    plain = [
        SliceResult(part.sequence, part.restart_count, token)
        for part, token in zip(DECODES, tokens, strict=True)
    ]
    result = StepResult.of(1, 7, rest).after(Decodes.of(DECODES).identities, tokens)
    assert result == StepResult.of(1, 7, (*plain, *rest))
