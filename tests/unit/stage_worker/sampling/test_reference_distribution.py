"""The reference distribution equals transformers' processors for all common parameters."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples
from tests.sampled import Row, expected_probabilities
from tests.unit.stage_worker.sampling.reference_distribution import Context, distribution
from tests.unit.stage_worker.sampling.scenarios import VOCAB, spread_logits
from wire.sampling import StepSampling


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    """32-bit floats, as in messages."""
    return st.floats(_float32(low), _float32(high), width=32)


def _float32(value: float) -> float:
    return float(np.float32(value))


tokens = st.integers(0, VOCAB - 1)
shares_in = floats(0.01, 1.0)


@st.composite
def samplings(draw: st.DrawFn) -> StepSampling:
    return StepSampling(
        temperature=draw(floats(0.1, 5.0)),
        top_k=draw(st.integers(0, VOCAB + 5)),
        top_p=draw(shares_in),
        min_p=draw(floats(0.0, 1.0)),
        typical_p=draw(shares_in),
        repetition_penalty=draw(floats(0.3, 3.0)),
        frequency_penalty=draw(floats(-2, 2)),
        presence_penalty=draw(floats(-2, 2)),
        logit_bias=tuple(draw(st.dictionaries(tokens, floats(-5, 5), max_size=5)).items()),
        allowed_token_ids=draw(st.sampled_from([(), tuple(range(5, VOCAB))])),
        # transformers ignores a word that is one token longer than the context.
        bad_words=tuple(tuple(word) for word in draw(st.lists(st.lists(tokens, min_size=1, max_size=2)))),
        min_tokens=draw(st.integers(0, 12)),
        min_tokens_hold_back=tuple(draw(st.sets(tokens, min_size=1, max_size=3))),
    )


@settings(max_examples=examples(0.3), derandomize=True)
@given(
    sampling=samplings(),
    prompt=st.lists(tokens, min_size=2, max_size=8),
    generated=st.lists(tokens, max_size=12),
)
def test_the_reference_equals_transformers(
    sampling: StepSampling, prompt: list[int], generated: list[int]
) -> None:
    row = Row(sampling=sampling, prompt=tuple(prompt), generated=tuple(generated))
    context = Context(sampling=sampling, prompt=row.prompt, generated=row.generated)
    logits = spread_logits()
    expected = expected_probabilities(logits[None], row)
    np.testing.assert_allclose(distribution(logits.numpy(), context), expected, rtol=1e-9, atol=1e-15)
