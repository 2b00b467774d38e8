"""Sampling parameters encoded ahead of a step."""

from stageline_rpc.internal.v1 import step_pb2
from wire.sampling_codec import decode_sampling, encode_sampling, encoded_ahead
from wire.steps import StepSampling


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
