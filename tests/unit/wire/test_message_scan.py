"""Counts, nesting and field numbers of encoded messages."""

from contextlib import suppress

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from stageline_rpc.v1 import inference_pb2
from tests.hostile_messages import END_GROUP, GROUP, inside, varint
from wire.errors import InvalidRequest, MessageTooLarge
from wire.message_scan import MAX_DEPTH, MessageScan, UnknownFields

SCAN = MessageScan(
    inference_pb2.GenerateRequest.DESCRIPTOR,
    max_fields=60,
    max_counts={"stageline.v1.TokenIds.ids": 5, "stageline.v1.Conversation.messages": 3},
)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5)


@given(
    IDS, st.text(max_size=300), st.dictionaries(st.integers(0, 2**32 - 1), st.floats(width=32), max_size=8)
)
def test_messages_within_the_limits_pass(ids: list[int], text: str, biases: dict[int, float]) -> None:
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), cache_salt=text)
    request.sampling.logit_bias.update(biases)
    request.sampling.temperature, request.sampling.seed = 0.5, 2**64 - 1
    SCAN.check(request.SerializeToString())


@given(st.binary(max_size=200))
def test_accepted_messages_parse_without_unknown_fields(data: bytes) -> None:
    with suppress(DecodeError, InvalidRequest):
        SCAN.check(data)
        with suppress(DecodeError):  # such as invalid UTF-8
            inference_pb2.GenerateRequest.FromString(data)


@pytest.mark.parametrize("cut", [1, 2, 9])
def test_a_cut_message_is_undecodable(cut: int) -> None:
    data = inference_pb2.GenerateRequest(text="x" * 200, max_tokens=300).SerializeToString()
    with pytest.raises(DecodeError):
        SCAN.check(data[:-cut])


@pytest.mark.parametrize(
    "ids",
    [
        inside(1, b"\x80\x01" * 6),  # packed
        b"\x08\x07" * 6,  # one by one
        inside(1, b"\x01" * 3) + inside(1, b"\x01" * 3),
    ],
)
def test_elements_count_in_every_encoding(ids: bytes) -> None:
    with pytest.raises(MessageTooLarge, match=r"TokenIds.ids has at least 6 entries, the limit is 5"):
        SCAN.check(inside(3, ids))


def test_entries_count_across_all_messages() -> None:
    SCAN.check(inside(4, inside(1, b"") * 3))
    with pytest.raises(MessageTooLarge, match=r"Conversation.messages has at least 4 entries"):
        SCAN.check(inside(4, inside(1, b"") * 2) * 2)


def test_fields_count_across_the_message() -> None:
    with pytest.raises(MessageTooLarge, match="too many fields, the limit is 60"):
        SCAN.check(inside(6, b"") * 61)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (varint(99 << 3) + b"\x01", "GenerateRequest has field 99, unknown"),
        (inside(6, varint(99 << 3) + b"\x01"), "SamplingParameters has field 99, unknown"),
        (GROUP * 5000 + END_GROUP * 5000, "GenerateRequest has field 99, unknown"),
        (varint(2 << 3) + b"\x01", "GenerateRequest has field 2, unknown"),  # text as a number
    ],
)
def test_unknown_fields_are_rejected(data: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        SCAN.check(data)


def test_skippable_fields_are_skipped_and_nesting_is_bounded() -> None:
    scan = MessageScan(
        trace_service_pb2.ExportTraceServiceRequest.DESCRIPTOR, max_fields=500, unknown=UnknownFields.SKIP
    )
    scan.check(inside(77, b"abc") + varint(78 << 3) + b"\x01")
    value = b""
    for _ in range(MAX_DEPTH):  # AnyValue -> ArrayValue -> AnyValue ...
        value = inside(5, inside(1, value))
    attribute = inside(9, inside(1, b"key") + inside(2, value))
    with pytest.raises(MessageTooLarge, match=f"nested too deeply, the limit is {MAX_DEPTH}"):
        scan.check(inside(1, inside(2, inside(2, attribute))))


def test_a_limit_of_an_unknown_field_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"stageline.v1.GenerateRequest has no field stageline.v1.Nothing.x"):
        MessageScan(
            inference_pb2.GenerateRequest.DESCRIPTOR, max_fields=1, max_counts={"stageline.v1.Nothing.x": 1}
        )
