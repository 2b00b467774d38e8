"""Sampling parameters: ranges, defaults, and their encoding."""

import math

import pytest

from stageline_rpc.internal.v1 import step_pb2
from stageline_rpc.v1 import inference_pb2
from tests.repository import REPOSITORY
from wire.sampling import SAMPLING_NUMBERS, SamplingNumber, StepSampling
from wire.step_codec import decode_sampling, encode_sampling, encoded_ahead


def test_encoding_ahead_equals_encoding_late() -> None:
    sampling = StepSampling(
        temperature=0.5,
        seed=2**64 - 1,
        logit_bias=tuple((token, token / 4) for token in range(700)),
        bad_words=((1, 2), (3,)),
        logprobs=0,
        min_tokens_hold_back=(7, 9),
    )
    late, ahead = step_pb2.StepSampling(), step_pb2.StepSampling()
    encode_sampling(sampling, late)
    encode_sampling(encoded_ahead(sampling), ahead)
    assert late == ahead
    assert decode_sampling(ahead) == sampling


@pytest.mark.parametrize("number", SAMPLING_NUMBERS, ids=lambda number: number.name)
def test_the_default_is_in_the_range(number: SamplingNumber) -> None:
    assert number.default in number.range
    assert math.nan not in number.range
    assert (number.range.low in number.range) is not number.range.excludes_low
    assert math.nextafter(number.range.high, math.inf) not in number.range


@pytest.mark.parametrize("number", SAMPLING_NUMBERS, ids=lambda number: number.name)
@pytest.mark.parametrize("path", ["proto/stageline_rpc/v1/inference.proto", "stageline/client/request.py"])
def test_documents_of_a_parameter_name_its_range(path: str, number: SamplingNumber) -> None:
    """The comment is before the field in the .proto file, and after it in the client."""
    is_proto = path.endswith(".proto")
    before, _, after = (REPOSITORY / path).read_text().partition(f" {number.name}{' =' if is_proto else ':'}")
    text = before.split(";")[-2] + before.split(";")[-1] if is_proto else after.split('"""')[1]
    assert f"in {number.range}" in text


def test_the_public_message_has_every_number() -> None:
    fields = inference_pb2.SamplingParameters.DESCRIPTOR.fields_by_name
    assert {number.name for number in SAMPLING_NUMBERS} < set(fields.keys())
    assert all(fields[number.name].has_presence for number in SAMPLING_NUMBERS)
