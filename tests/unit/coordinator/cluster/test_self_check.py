"""The verdict on an answer, and where the reference comes from."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from builtin_model import SELF_CHECK_FILE
from checkpoint import DType
from coordinator.cluster import self_check_references
from coordinator.cluster.self_check import SelfCheck, judge
from coordinator.cluster.self_check_references import (
    KnownReference,
    NoReference,
    References,
    ReferenceSource,
    read_recorded,
)
from coordinator.cluster.self_check_step import check_step, prompt_for
from coordinator.cluster.self_check_tolerance import LEAST_TOLERANCE, deviation, tolerance
from coordinator.config import CoordinatorConfig
from coordinator.model import ServedModel, open_model
from coordinator.planning.plan import Plan, StepLimits, WorkerCapacity
from stageline_rpc.v1 import stage_pb2
from tests.unit.coordinator.cluster.cluster_driver import plan_of
from wire.reference import NUM_TOP, Reference, check_prompt, encode_reference
from wire.steps import SliceError, SliceResult, Step, StepResult, TokenLogprobs

ROWS = (
    TokenLogprobs(7, -3.0, 9, ((1, -0.5), (2, -1.5))),
    TokenLogprobs(1, -0.25, 1, ((1, -0.25), (5, -2.0))),
)
REFERENCE = Reference((3, 7), ROWS, 2.0, 0.01)
KNOWN = KnownReference(REFERENCE, "the reference of worker w")
SOURCES = (ReferenceSource("small", "small:1", 10), ReferenceSource("large", "large:1", 20))


def plan(*, max_step_tokens: int = 8, num_blocks: int = 4) -> Plan:
    """One stage of four blocks of four tokens."""
    made = plan_of([WorkerCapacity(name="a", memory_bytes=1)], needed_bytes=0)
    limits = StepLimits(max_step_tokens=max_step_tokens, max_step_sequences=4, max_sequence_tokens=32)
    return replace(made, limits=limits, num_blocks=num_blocks)


def answer(step: Step, rows: tuple[TokenLogprobs, ...] = ROWS) -> StepResult:
    (part,) = step.slices
    sampled = SliceResult(part.sequence, 0, rows[-1].token, rows[-1], rows[:-1])
    return StepResult(step.epoch, step.step_id, (sampled,))


def step_of_two() -> Step:
    return check_step(plan(), 1, (3, 7))


# The measure


def test_equal_log_probabilities_do_not_deviate() -> None:
    assert deviation(ROWS, REFERENCE) == 0.0


def test_differences_count_as_a_fraction_of_the_spread() -> None:
    moved = tuple(
        replace(row, logprob=row.logprob + 0.5, top=tuple((token, value + 0.5) for token, value in row.top))
        for row in ROWS
    )
    assert deviation(moved, REFERENCE) == pytest.approx(0.25)


def test_a_token_that_only_one_side_lists_counts_with_what_it_is_above_the_others_last() -> None:
    (first, second) = ROWS
    # 4 in the place of 2: 0.5 above the last that the reference lists, which 2 is itself above the last here.
    changed = (replace(first, top=((1, -0.5), (4, -1.0))), second)
    expected = math.sqrt((0.5**2 + 0.0) / 6) / 2.0
    assert deviation(changed, REFERENCE) == pytest.approx(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_no_deviation_that_can_be_allowed(value: float) -> None:
    rows = (replace(ROWS[0], logprob=value), ROWS[1])
    assert not deviation(rows, REFERENCE) <= tolerance(REFERENCE)


def test_logits_without_spread_are_compared_all_the_same() -> None:
    flat = replace(REFERENCE, logit_spread=0.0, rounding=0.0)
    assert deviation(ROWS, flat) == 0.0
    assert deviation((ROWS[0], replace(ROWS[1], logprob=-2.0)), flat) > tolerance(flat)


def test_twice_what_rounding_does_is_allowed_and_a_little_at_least() -> None:
    assert tolerance(REFERENCE) == pytest.approx(2 * 0.01 / 2.0)
    assert tolerance(replace(REFERENCE, rounding=0.0)) == LEAST_TOLERANCE


# The verdict


def test_an_answer_like_the_reference_passes_and_one_unlike_it_fails_with_the_numbers() -> None:
    step = step_of_two()
    assert judge(answer(step), 2, KNOWN).is_good
    verdict = judge(answer(step, (ROWS[0], replace(ROWS[1], logprob=-1.0))), 2, KNOWN)
    assert not verdict.is_good
    # The last row's token is in its list, too: one difference of 0.75 in five.
    assert verdict.text == (
        "failed: the log-probabilities of 2 tokens differ from the reference of worker w by 0.17 of the "
        "spread of the logits, and 0.01 is allowed"
    )


def test_without_a_reference_an_answer_has_to_be_finite() -> None:
    nothing = NoReference("worker w: too large")
    verdict = judge(answer(step_of_two()), 2, nothing)
    assert (verdict.is_good, verdict.text) == (
        True,
        "finite only, because there is no reference: worker w: too large",
    )
    rows = (ROWS[0], replace(ROWS[1], top=((1, math.nan),)))
    assert not judge(answer(step_of_two(), rows), 2, nothing).is_good


def test_the_error_of_a_slice_is_the_problem() -> None:
    result = answer(step_of_two())
    (part,) = result.results
    failed = replace(
        part, outcome=SliceError(1, 2, f"logits for position 1 of {part.sequence} are not finite")
    )
    verdict = judge(replace(result, results=(failed,)), 2, KNOWN)
    assert (verdict.is_good, verdict.text) == (False, "failed: logits for position 1 are not finite")


def spoil_step(result: StepResult) -> StepResult:
    return replace(result, step_id=1)


def spoil_results(result: StepResult) -> StepResult:
    return replace(result, results=())


def spoil_rows(result: StepResult) -> StepResult:
    return replace(result, results=(replace(result.results[0], prompt_logprobs=()),))


def spoil_sampled(result: StepResult) -> StepResult:
    return replace(result, results=(replace(result.results[0], logprobs=None),))


@pytest.mark.parametrize("spoil", [spoil_step, spoil_results, spoil_rows, spoil_sampled])
@pytest.mark.parametrize("known", [KNOWN, NoReference("none")])
def test_an_answer_to_something_else_fails(
    spoil: Callable[[StepResult], StepResult], known: KnownReference | NoReference
) -> None:
    assert not judge(spoil(answer(step_of_two())), 2, known).is_good


# The step


def test_the_prompt_is_spread_over_the_vocabulary_and_fits_into_the_step() -> None:
    assert len(set(check_prompt(100))) == 8
    assert max(check_prompt(10**6)) > 900_000 and min(check_prompt(10**6)) < 100_000
    assert set(check_prompt(1)) == {0}
    assert prompt_for(plan(), 100) == check_prompt(100)
    assert prompt_for(plan(max_step_tokens=5), 100) == check_prompt(100)[:5]
    assert prompt_for(plan(num_blocks=1), 100) == check_prompt(100)[:4]


def test_a_prompt_of_one_token_is_not_scored() -> None:
    step = check_step(plan(), 1, (3,))
    assert not step.slices[0].is_scored
    sampled = ROWS[-1]
    assert judge(
        answer(step, (sampled,)), 1, KnownReference(replace(REFERENCE, rows=(sampled,)), "it")
    ).is_good


# Asking


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    return replace(open_model(config()), is_builtin=False, directory=tmp_path)


def config(**settings: Any) -> CoordinatorConfig:
    values: dict[str, Any] = {
        "model_directory": None,
        "listen": "127.0.0.1:0",
        "num_stages": 1,
        "layers": None,
        "dtype": None,
        "block_size": 4,
        "max_step_tokens": 8,
        "max_step_sequences": 4,
        "max_sequence_tokens": None,
        "max_kv_tokens": None,
        "queue_size": 4,
    }
    return CoordinatorConfig(**{**values, **settings})


class Workers:
    """Answers for every worker but `refusing`; `silent` ones never do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refusing: str = "", silent: str = "") -> None:
        self.asked: list[str] = []
        self._refusing, self._silent = refusing, silent
        monkeypatch.setattr(self_check_references, "compute_reference", self._compute)

    async def _compute(
        self, address: str, request: stage_pb2.ReferenceRequest, *, timeout_s: float
    ) -> stage_pb2.ReferenceResponse:
        name = address.partition(":")[0]
        self.asked.append(name)
        assert request.num_top == NUM_TOP and request.secret == b""
        if name == self._silent:
            await asyncio.Event().wait()
        if name == self._refusing:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "too large"
            )
        return encode_reference(REFERENCE)


async def test_the_worker_with_the_most_free_memory_is_asked_once(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = Workers(monkeypatch), References(served)
    for _ in range(2):
        known = await references.get(DType.F32, (3, 7), SOURCES)
    assert known.origin == "the reference of worker large"
    assert [row.token for row in known.reference.rows] == [7, 1]
    assert workers.asked == ["large"]
    await references.get(DType.BF16, (3, 7), SOURCES)
    assert workers.asked == ["large", "large"]


async def test_another_worker_is_asked_when_one_refuses(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(monkeypatch, refusing="large")
    known = await References(served).get(DType.F32, (3, 7), SOURCES)
    assert known.origin == "the reference of worker small"
    assert workers.asked == ["large", "small"]


async def test_a_refusal_by_all_says_what_each_said_and_is_not_kept(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = References(served)
    Workers(monkeypatch, refusing="large")
    with pytest.raises(NoReference, match=r"^worker large: too large$"):
        await references.get(DType.F32, (3, 7), SOURCES[1:])
    with pytest.raises(NoReference, match=r"^no worker can be asked$"):
        await references.get(DType.F32, (3, 7), ())
    Workers(monkeypatch)
    assert (await references.get(DType.F32, (3, 7), SOURCES)).origin == "the reference of worker large"


async def test_an_answer_for_other_tokens_is_a_refusal(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Workers(monkeypatch)
    with pytest.raises(NoReference, match="worker large: a reference of 2 rows for 3 tokens"):
        await References(served).get(DType.F32, (3, 7, 1), SOURCES[1:])


async def test_waiting_for_a_reference_has_an_end(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Workers(monkeypatch, refusing="large", silent="small")
    with pytest.raises(NoReference, match=r"^worker large: too large; no reference within 0\.01 s$"):
        await References(served, timeout_s=0.01).get(DType.F32, (3, 7), SOURCES)


async def test_what_is_recorded_is_for_the_built_in_model_and_its_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(monkeypatch)
    model = open_model(config())
    prompt = check_prompt(model.config.vocab_size)
    for dtype in DType:
        assert (await References(model).get(dtype, prompt, ())).origin == "the recorded reference"
    assert workers.asked == []
    assert read_recorded(SELF_CHECK_FILE, "another") == {}
    with pytest.raises(NoReference):
        await References(replace(model, is_builtin=False)).get(DType.F32, prompt, ())


async def test_an_answer_that_does_not_come_ends_the_check(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Workers(monkeypatch)
    sent: list[Step] = []
    check = SelfCheck(References(served), vocab_size=9, answer_timeout_s=0.01)
    with pytest.raises(TimeoutError):
        await check.run(plan(max_step_tokens=2), 5, sent.append, SOURCES)
    assert [(step.epoch, step.step_id, step.num_tokens) for step in sent] == [(5, 0, 2)]
    assert check.text == "under way"


async def test_the_last_verdict_is_told(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    Workers(monkeypatch)
    check = SelfCheck(References(served), vocab_size=9)
    assert check.text == "not run yet"
    verdict = await check.run(plan(max_step_tokens=2), 5, lambda step: check.take(answer(step)), SOURCES)
    assert verdict.is_good
    assert check.text == verdict.text
    check.take(answer(step_of_two()))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"self_check": False}, False),
        ({"model_directory": Path("/nowhere")}, False),
        ({"model_directory": Path("/nowhere"), "self_check": True}, True),
        ({"mock_model": "layers=4"}, False),
    ],
)
def test_the_built_in_model_is_checked_unless_told(settings: dict[str, Any], expected: bool) -> None:
    assert config(**settings).wants_self_check is expected


def test_a_mock_model_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="--self-check needs weights"):
        config(mock_model="layers=4", self_check=True)


# Workers that disagree


WRONG = replace(REFERENCE, rows=(ROWS[0], replace(ROWS[1], logprob=-9.0)))


class Opinions:
    """Workers that answer, some of them wrongly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *wrong: str) -> None:
        self.wrong = wrong
        self.asked: list[str] = []
        monkeypatch.setattr(self_check_references, "compute_reference", self._compute)

    async def _compute(
        self, address: str, request: stage_pb2.ReferenceRequest, *, timeout_s: float
    ) -> stage_pb2.ReferenceResponse:
        name = address.partition(":")[0]
        self.asked.append(name)
        return encode_reference(WRONG if name in self.wrong else REFERENCE)


def sources(*names: str) -> tuple[ReferenceSource, ...]:
    """The first one has the most memory."""
    return tuple(ReferenceSource(name, f"{name}:1", 100 - place) for place, name in enumerate(names))


async def run_check(
    check: SelfCheck, names: tuple[ReferenceSource, ...], rows: tuple[TokenLogprobs, ...] = ROWS
) -> tuple[bool, str]:
    verdict = await check.run(plan(max_step_tokens=2), 5, lambda step: check.take(answer(step, rows)), names)
    return verdict.is_good, verdict.text


async def test_one_worker_with_a_wrong_reference_does_not_refuse_a_good_plan(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    opinions = Opinions(monkeypatch, "a")
    check = SelfCheck(References(served), vocab_size=9)
    is_good, text = await run_check(check, sources("a", "b", "c", "d"))
    assert is_good, text
    assert opinions.asked == ["a", "b", "c"]
    assert text.endswith("; not so from the reference of worker a")
    assert (await run_check(check, sources("a", "b", "c", "d")))[0]
    assert opinions.asked == ["a", "b", "c"], "the right one is kept"


async def test_a_bad_plan_is_refused_by_all(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    Opinions(monkeypatch)
    check = SelfCheck(References(served), vocab_size=9)
    is_good, text = await run_check(check, sources("a", "b", "c"), WRONG.rows)
    assert not is_good
    assert "but not from" not in text


async def test_where_one_stands_against_one_nothing_passes(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell which of the two workers is wrong, whichever of them runs the plan."""
    Opinions(monkeypatch, "a")
    check = SelfCheck(References(served), vocab_size=9)
    is_good, text = await run_check(check, sources("a", "b"))
    assert not is_good
    assert text.endswith("but not from the reference of worker b")
    assert not (await run_check(check, sources("a", "b"), WRONG.rows))[0]
    assert (await run_check(check, sources("a", "b", "c")))[0]


async def test_what_was_recorded_is_not_disputed(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    opinions = Opinions(monkeypatch)
    references = References(served)
    recorded = replace(WRONG, tokens=check_prompt(9)[:2])
    references.settle(DType.F32, KnownReference(recorded, "the recorded reference"))
    check = SelfCheck(references, vocab_size=9)
    assert not (await run_check(check, sources("a", "b", "c")))[0]
    assert opinions.asked == []
