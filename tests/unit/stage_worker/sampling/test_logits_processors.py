"""Log-probabilities, ranks and top tokens are computed from unmodified logits."""

import pytest
import torch
from torch import Tensor

from stage_worker.sampling import Sampler, logits_processors
from stage_worker.sampling.logits_processors import top_tokens
from stage_worker.sampling.sampler import ScoredPrompt
from stageline_rpc.internal.v1 import step_pb2
from tests.sampled import GENERATED, STAGE, Row, error_of, key, results_of, start_record
from tests.unit.stage_worker.sampling.test_random_choice import FILTERS, some_logits
from wire.sampling import StepSampling
from wire.steps import Decode, Prefill, SliceResult, Step, StepSlice, TokenLogprobs

VOCAB = 40
HIDDEN = 8
PROMPT = tuple(index * 11 % VOCAB for index in range(30))


def assert_logprobs(found: TokenLogprobs, logits: Tensor, num_top: int) -> None:
    """Compares with log_softmax in float64 and a stable sort of one row of logits [vocab_size]."""
    logprobs = logits.double().log_softmax(dim=-1)
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    assert found.logprob == pytest.approx(float(logprobs[found.token]), abs=1e-5)
    assert found.rank == 1 + sum(float(value) > float(logits[found.token]) for value in logits)
    assert [token for token, _ in found.top] == order[:num_top]
    expected = [float(logprobs[token]) for token in order[:num_top]]
    assert [logprob for _, logprob in found.top] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("name", ["temperature-1", "everything", "bias", "cold"])
def test_logprobs_of_sampled_tokens_precede_penalties_and_filters(name: str, num_top: int) -> None:
    logits = some_logits(6, vocab_size=500)
    sampling = FILTERS[name]
    for temperature in (0.0, sampling.temperature):
        asked = StepSampling(
            temperature=temperature,
            top_k=sampling.top_k,
            logit_bias=sampling.logit_bias,
            repetition_penalty=sampling.repetition_penalty,
            logprobs=num_top,
        )
        rows = [Row(sampling=asked, generated=GENERATED, choice=choice) for choice in range(6)]
        for result, row in zip(results_of(logits, rows), logits, strict=True):
            assert result.logprobs is not None
            assert result.logprobs.token == result.outcome
            assert_logprobs(result.logprobs, row, num_top)


def test_logprobs_are_returned_only_as_requested() -> None:
    asked = (None, 0, 3, None, 20)
    rows = [Row(sampling=StepSampling(logprobs=count)) for count in asked]
    results = results_of(some_logits(5), rows)
    tops = [None if result.logprobs is None else len(result.logprobs.top) for result in results]
    assert tops == [None, 0, 3, None, 20]


def test_a_vocabulary_may_be_smaller_than_the_top_that_is_asked_for() -> None:
    logits = some_logits(1, vocab_size=4)
    (result,) = results_of(logits, [Row(sampling=StepSampling(logprobs=20), prompt=(1,))])
    assert result.logprobs is not None
    assert_logprobs(result.logprobs, logits[0], 20)


@pytest.mark.parametrize("count", [1, 2, 7, 20, 40])
def test_ties_are_ordered_by_token_id(count: int) -> None:
    logits = (some_logits(50) * 0.5).round()
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(top_tokens(logits, count), expected)


class Scored:
    """A sampler with one sequence, and the chunks of its prompt with a linear head."""

    def __init__(
        self,
        *,
        tokens: tuple[int, ...] = PROMPT,
        num_prompt_tokens: int = len(PROMPT),
        sampling: StepSampling | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(4)
        self.weights = torch.randn((VOCAB, HIDDEN), generator=generator)
        self.hidden = torch.randn((len(tokens), HIDDEN), generator=generator)
        self.tokens = tokens
        self.rows_at_once: list[int] = []
        self.sampler = Sampler(vocab_size=VOCAB, stage=STAGE)
        row = Row(
            sampling=sampling or StepSampling(prompt_logprobs=2),
            prompt=tokens[:num_prompt_tokens],
            generated=tokens[num_prompt_tokens:],
        )
        self.sampler.start(start_record(key(0), row))

    def head(self, hidden: Tensor) -> Tensor:
        self.rows_at_once.append(len(hidden))
        return hidden @ self.weights.T

    def chunk(self, start: int, end: int, *, outcome: int | None = None) -> SliceResult:
        step = Prefill(start, end - start, len(self.tokens), is_scored=True)
        part = StepSlice(key(0), 0, self.tokens[start:end], step)
        result = SliceResult(part.sequence, 0, outcome)
        prompt = ScoredPrompt.of(part, self.sampler._live[part.sequence])
        return self.sampler.score(part, prompt, self.hidden[start:end], self.head, result)


def test_a_chunk_is_scored_with_the_tokens_that_follow_each_of_its_own() -> None:
    scored = Scored()
    result = scored.chunk(4, 12)
    assert result.outcome is None
    assert [logprob.token for logprob in result.prompt_logprobs] == list(PROMPT[5:13])
    logits = scored.head(scored.hidden)
    for position, logprob in enumerate(result.prompt_logprobs, start=5):
        assert_logprobs(logprob, logits[position - 1], 2)


def test_the_last_chunk_ends_with_the_prompt_and_keeps_its_token() -> None:
    result = Scored().chunk(20, 30, outcome=7)
    assert result.outcome == 7
    assert [logprob.token for logprob in result.prompt_logprobs] == list(PROMPT[21:])


def test_generated_tokens_are_not_scored() -> None:
    """A restarted sequence prefills them."""
    scored = Scored(num_prompt_tokens=22)
    tokens = [logprob.token for logprob in scored.chunk(16, 24).prompt_logprobs]
    assert tokens == list(PROMPT[17:22])
    assert scored.chunk(24, 30).prompt_logprobs == ()


@pytest.mark.parametrize("size", [1, 3, 7, 29])
def test_chunks_are_scored_as_the_whole(size: int) -> None:
    whole = Scored().chunk(0, 30).prompt_logprobs
    assert len(whole) == 29
    scored = Scored()
    parts = [scored.chunk(start, min(start + size, 30)).prompt_logprobs for start in range(0, 30, size)]
    for one, other in zip(whole, [logprob for part in parts for logprob in part], strict=True):
        assert (one.token, one.rank) == (other.token, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_few_rows_of_logits_exist_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Scored().chunk(0, 30).prompt_logprobs
    monkeypatch.setattr(logits_processors, "MAX_SCORED_ELEMENTS", 4 * VOCAB)
    scored = Scored()
    tokens = [logprob.token for logprob in scored.chunk(0, 30).prompt_logprobs]
    assert tokens == [logprob.token for logprob in whole]
    assert scored.rows_at_once == [4] * 7 + [1]


def test_no_top_is_the_tokens_own_alone() -> None:
    scored = Scored(sampling=StepSampling())
    assert all(logprob.top == () for logprob in scored.chunk(0, 30).prompt_logprobs)


def test_non_finite_logits_fail_the_chunk_with_the_position() -> None:
    scored = Scored()
    scored.hidden[13, 2] = float("nan")
    error = error_of(scored.chunk(8, 16))
    assert (error.kind, error.stage) == (step_pb2.SliceError.KIND_NON_FINITE_LOGITS, STAGE)
    assert "position 14" in error.message
    assert scored.chunk(0, 8).prompt_logprobs


def test_unusable_parameters_fail_the_chunk() -> None:
    scored = Scored(sampling=StepSampling(top_p=2.0))
    error = error_of(scored.chunk(0, 8))
    assert error.kind == step_pb2.SliceError.KIND_SAMPLER
    assert "top_p 2.0" in error.message


def test_an_error_of_the_sampled_token_stays() -> None:
    scored = Scored(sampling=StepSampling(top_p=2.0))
    part = StepSlice(key(0), 0, PROMPT[20:], Prefill(20, 10, 30, is_scored=True))
    failed = scored.sampler.choose([part], torch.zeros((1, VOCAB)))[0]
    (state,) = scored.sampler._live.values()
    prompt = ScoredPrompt.of(part, state)
    assert scored.sampler.score(part, prompt, scored.hidden[20:], scored.head, failed) == failed


def test_a_decode_that_begins_before_a_chunk_is_scored_leaves_its_prompt() -> None:
    """A device begins steps ahead, and the self-check knows the tokens to decode."""
    scored = Scored()
    chunk = StepSlice(key(0), 0, PROMPT[20:], Prefill(20, 10, 30, is_scored=True))
    first = Step.of((chunk,), epoch=1, step_id=0, digest=0)
    decode = StepSlice(key(0), 0, (7,), Decode(30))
    then = Step.of((decode,), epoch=1, step_id=1, digest=0)
    sampled = scored.sampler.prepare(first, device=torch.device("cpu"))
    scored.sampler.prepare(then, device=torch.device("cpu"))
    result = scored.sampler.score(
        chunk, sampled.scored[key(0)], scored.hidden[20:], scored.head, SliceResult(key(0), 0, None)
    )
    assert [logprob.token for logprob in result.prompt_logprobs] == list(PROMPT[21:])
