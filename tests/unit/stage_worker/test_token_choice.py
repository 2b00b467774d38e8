"""Each sampled slice gets a token drawn for the position after its last one, or an error of its own."""

import pytest
import torch

from stage_worker.sampling.draws import Draw, sample
from stage_worker.sequences import SequenceStates
from stage_worker.token_choice import choose_tokens
from stageline_rpc.v1 import stage_pb2
from wire.ids import RequestId, SequenceKey
from wire.steps import Decode, Prefill, Slice, SliceError, StartRecord, StepSampling

HOT = StepSampling(temperature=5.0, seed=17)
TOKENS = (1, 2, 3, 4)


def key(choice: int) -> SequenceKey:
    return SequenceKey(RequestId(bytes(16)), choice)


def states_of(*samplings: StepSampling) -> SequenceStates:
    states = SequenceStates()
    for choice, sampling in enumerate(samplings):
        states.start(StartRecord(key(choice), 0, len(TOKENS), TOKENS, sampling))
    return states


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn((rows, 5000), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("inference_step", "tokens", "position"),
    [
        (Prefill(0, 4, 4), TOKENS, 4),
        (Prefill(3, 1, 4), TOKENS[3:], 4),
        (Decode(4), (9,), 5),
        (Decode(700), (9,), 701),
    ],
    ids=["prefill", "last-token-of-prefill", "first-decode", "decode"],
)
def test_a_token_is_drawn_for_the_position_that_it_will_have(
    inference_step: Prefill | Decode, tokens: tuple[int, ...], position: int
) -> None:
    """So what follows a recomputation, where all tokens are one prefill, is what decode drew before."""
    states = states_of(HOT, HOT)
    part = Slice(key(1), 0, tokens, inference_step)
    logits = logits_of(1)
    (result,) = choose_tokens([part], [states.get(key(1))], logits, stage=2)
    assert [result.outcome] == sample(logits, [Draw(HOT, 1, position)])
    assert [result.outcome] != sample(logits, [Draw(HOT, 1, position - 1)])
    assert [result.outcome] != sample(logits, [Draw(HOT, 0, position)])


def test_errors_stay_with_their_rows() -> None:
    bad = StepSampling(temperature=1.0, top_p=0.0)
    states = states_of(HOT, HOT, bad, HOT)
    parts = [Slice(key(choice), 0, (9,), Decode(10 + choice)) for choice in range(4)]
    logits = logits_of(4)
    alone = sample(logits, [Draw(HOT, choice, 11 + choice) for choice in range(4)])
    logits[1, 77] = float("nan")
    results = choose_tokens(parts, [states.get(part.sequence) for part in parts], logits, stage=2)
    assert [result.sequence for result in results] == [part.sequence for part in parts]
    outcomes = [result.outcome for result in results]
    assert (outcomes[0], outcomes[3]) == (alone[0], alone[3])
    first, second = outcomes[1], outcomes[2]
    assert isinstance(first, SliceError)
    assert isinstance(second, SliceError)
    assert (first.kind, first.stage) == (stage_pb2.SliceError.KIND_NON_FINITE_LOGITS, 2)
    assert "position 12" in first.message
    assert (second.kind, second.stage) == (stage_pb2.SliceError.KIND_SAMPLER, 2)


def test_a_step_of_nothing_but_errors_draws_nothing() -> None:
    states = states_of(HOT)
    logits = torch.full((1, 10), float("inf"))
    (result,) = choose_tokens([Slice(key(0), 0, (9,), Decode(4))], [states.get(key(0))], logits, stage=0)
    assert isinstance(result.outcome, SliceError)
