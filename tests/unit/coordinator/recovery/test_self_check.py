"""Self-checks: references, comparison, verdicts and schedule."""

from __future__ import annotations

import asyncio
import logging
import math
import stat
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from builtin_model import SELF_CHECK_FILE
from checkpoint import DType
from checkpoint.dtypes import ScaledDType
from coordinator.config import CoordinatorConfig
from coordinator.model import ServedModel, open_model
from coordinator.planner.plan import Plan, StepLimits, WorkerCapacity
from coordinator.recovery import self_check
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.recovery.self_check import (
    CheckedEpoch,
    ReferenceQuestion,
    References,
    ReferenceSource,
    SelfCheck,
)
from coordinator.recovery.self_check_script import Phase, Script, write_script
from coordinator.recovery.self_check_verdict import (
    ROUNDINGS,
    TYPICAL_ROUNDINGS,
    CheckOutcome,
    Deviation,
    Groups,
    KnownReference,
    NoReference,
    Token,
    Verdict,
    deviations_of,
    groups_of,
    judge,
    row_deviation,
)
from coordinator.scheduler.kv_manager import KvCacheManager
from stageline_rpc.internal.v1 import forward_pb2
from tests.unit.coordinator.cluster.cluster_driver import plan_of
from wire.ids import SequenceKey
from wire.reference import (
    NUM_TEXTS,
    NUM_TOP,
    STATE_WIDTH,
    LayerReference,
    Reference,
    Roundings,
    TextReference,
    check_text,
    encode_reference,
    read_references,
)
from wire.steps import SliceError, SliceResult, Step, StepResult, TokenLogprobs

ROW_SELF_CHECK_REFERENCES = TokenLogprobs(7, -3.0, 0, ((1, -0.5), (2, -1.5)))
SOURCES = (ReferenceSource("small", "small:1", 10), ReferenceSource("large", "large:1", 20))
NUM_LAYERS = 2
QUESTION = ReferenceQuestion(DType.F32, DType.F32, ((3, 7), (4, 5, 6)))


def reference_of(texts: tuple[tuple[int, ...], ...]) -> Reference:
    num_tokens = sum(map(len, texts))
    states = array("f", [1.0] * num_tokens * STATE_WIDTH)
    layer = LayerReference(states, roundings(0.25, num_tokens))
    found = tuple(
        TextReference(text, (ROW_SELF_CHECK_REFERENCES,) * len(text), roundings(0.5, len(text)))
        for text in texts
    )
    return Reference(found, (layer,) * NUM_LAYERS, 2.0)


def roundings(typical: float, num_tokens: int, *, highest: float | None = None) -> Roundings:
    return Roundings(*(array("f", [value] * num_tokens) for value in (typical, highest or typical)))


@pytest.fixture
def served(tmp_path: Path) -> ServedModel:
    model = with_layers(open_model(config()), NUM_LAYERS)
    return replace(model, is_builtin=False, directory=tmp_path)


def with_layers(model: ServedModel, num_layers: int) -> ServedModel:
    layers = model.config.layers[:num_layers]
    config = replace(model.config, layers=layers, legal_cuts=frozenset(range(1, num_layers)))
    return replace(model, config=config)


class Workers:
    """Responds for every worker except `refusing`; `held` ones wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refusing: str = "") -> None:
        self.asked: list[str] = []
        self.is_held = asyncio.Event()
        self.is_held.set()
        self._refusing = refusing
        monkeypatch.setattr(self_check, "compute_reference", self._compute)

    async def _compute(
        self, address: str, request: forward_pb2.ComputeReferenceRequest, **_: object
    ) -> forward_pb2.ComputeReferenceResponse:
        name = address.partition(":")[0]
        self.asked.append(name)
        assert request.num_top == NUM_TOP
        await self.is_held.wait()
        if name == self._refusing:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "too large"
            )
        return encode_reference(reference_of(tuple(tuple(text.tokens) for text in request.texts)))


async def test_the_worker_with_the_most_free_memory_is_asked_once(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = Workers(monkeypatch), References(served, policy=DEFAULT_POLICY)
    for _ in range(2):
        known = await references.get(QUESTION, SOURCES)
    assert known.origin == "the reference of worker large"
    assert known.reference == reference_of(QUESTION.texts)
    assert workers.asked == ["large"]
    await references.get(replace(QUESTION, dtype=DType.BF16, wire_dtype=ScaledDType.I8), SOURCES)
    assert workers.asked == ["large", "large"]


async def test_a_reference_of_longer_texts_holds_for_shorter_ones(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = Workers(monkeypatch), References(served, policy=DEFAULT_POLICY)
    await references.get(QUESTION, SOURCES)
    await references.get(replace(QUESTION, texts=((3,), (4, 5))), SOURCES)
    assert workers.asked == ["large"]
    await references.get(replace(QUESTION, texts=((3, 7, 9), (4, 5, 6))), SOURCES)
    assert workers.asked == ["large", "large"]


async def test_another_worker_is_asked_when_one_refuses(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers(monkeypatch, refusing="large")
    known = await References(served, policy=DEFAULT_POLICY).get(QUESTION, SOURCES)
    assert known.origin == "the reference of worker small"
    assert workers.asked == ["large", "small"]


async def test_a_rejection_by_all_workers_lists_their_reasons_and_is_not_kept(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = References(served, policy=DEFAULT_POLICY)
    Workers(monkeypatch, refusing="large")
    with pytest.raises(NoReference, match=r"^worker large: too large$"):
        await references.get(QUESTION, SOURCES[1:])
    with pytest.raises(NoReference, match=r"^no worker can compute a reference$"):
        await references.get(QUESTION, ())
    Workers(monkeypatch)
    assert (await references.get(QUESTION, SOURCES)).origin == "the reference of worker large"


async def test_a_reference_of_another_model_counts_as_a_rejection(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    Workers(monkeypatch)
    with pytest.raises(NoReference, match="worker large: a reference of 2 layers"):
        await References(with_layers(served, 1), policy=DEFAULT_POLICY).get(QUESTION, SOURCES[1:])


async def test_a_slow_reference_continues_and_is_available_later(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = (
        Workers(monkeypatch),
        References(served, policy=replace(DEFAULT_POLICY, reference_wait_s=0.01)),
    )
    workers.is_held.clear()
    for _ in range(2):
        with pytest.raises(NoReference, match=r"within 0\.01 s; the computation continues$"):
            await references.get(QUESTION, SOURCES)
    assert workers.asked == ["large"] and not references.has(QUESTION)
    workers.is_held.set()
    while not references.has(QUESTION):
        await asyncio.sleep(0)
    assert (await references.get(QUESTION, ())).worker == "large"


THIRD = ReferenceSource("third", "third:1", 15)


async def test_a_reference_stays_while_failed_plans_blame_one_other_worker(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = Workers(monkeypatch), References(served, policy=DEFAULT_POLICY)
    await references.get(QUESTION, SOURCES)
    for _ in range(3):
        assert not references.record_failure(QUESTION, "small")
    assert (await references.get(QUESTION, SOURCES)).worker == "large"
    # A blamed worker is asked last: "third" has less memory than "large", and more than "small".
    other = replace(QUESTION, dtype=DType.BF16)
    assert (await references.get(other, (*SOURCES[:1], THIRD))).worker == "third"
    small_is_larger = (replace(SOURCES[0], free_bytes=30), SOURCES[1])
    assert (await references.get(replace(QUESTION, dtype=DType.F16), small_is_larger)).worker == "large"
    assert workers.asked == ["large", "third", "large"]


@pytest.mark.parametrize("blamed", [("small", "third"), ("large",), ("small", "large"), ("",), ("small", "")])
async def test_a_reference_whose_failures_do_not_blame_one_other_worker_is_dropped_once(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, blamed: tuple[str, ...]
) -> None:
    workers, references = Workers(monkeypatch), References(served, policy=DEFAULT_POLICY)
    await references.get(QUESTION, SOURCES)
    *before, last = blamed
    assert not any(references.record_failure(QUESTION, worker) for worker in before)
    assert references.record_failure(QUESTION, last)
    assert (await references.get(QUESTION, SOURCES)).worker == "small", "its source is asked last"
    assert workers.asked == ["large", "small"]
    assert references.record_failure(QUESTION, "")
    await references.get(QUESTION, SOURCES)
    for worker in ("small", "third", ""):
        assert not references.record_failure(QUESTION, worker), "each source is dropped once"
    assert workers.asked == ["large", "small", "large"]


async def test_a_reference_that_failed_a_plan_is_dropped_with_its_source(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, references = Workers(monkeypatch), References(served, policy=DEFAULT_POLICY)
    await references.get(QUESTION, SOURCES)
    assert not references.source_left("large"), "no plan has failed against it"
    references.record_failure(QUESTION, "small")
    assert not references.source_left("small")
    assert references.source_left("large")
    await references.get(QUESTION, SOURCES[:1])
    assert workers.asked == ["large", "small"]


async def test_references_of_a_worker_with_wrong_weights_are_deleted_on_disk(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workers = Workers(monkeypatch)
    references = References(served, cache_directory=tmp_path, policy=DEFAULT_POLICY)
    await references.get(QUESTION, SOURCES)
    await references.confirm(QUESTION)
    (file,) = (tmp_path / "references").iterdir()
    await references.discard("third")
    assert read_references(file, served.fingerprint)
    await references.discard("large")
    assert not read_references(file, served.fingerprint)
    assert (await references.get(QUESTION, SOURCES)).worker == "small"
    assert workers.asked == ["large", "small"]


async def test_a_confirmed_reference_is_kept_for_the_next_coordinator(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workers = Workers(monkeypatch)
    first = References(served, cache_directory=tmp_path / "cache", policy=DEFAULT_POLICY)
    await first.get(QUESTION, SOURCES)
    assert not (tmp_path / "cache").exists(), "before a plan has passed, nothing is kept"
    await first.confirm(QUESTION)
    assert not first.record_failure(QUESTION, "")
    assert (await first.get(QUESTION, SOURCES)).origin == "the reference of worker large"
    (file,) = (tmp_path / "cache" / "references").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = References(served, cache_directory=tmp_path / "cache", policy=DEFAULT_POLICY)
    known = await second.get(QUESTION, SOURCES)
    assert (known.origin, known.reference) == ("the kept reference", reference_of(QUESTION.texts))
    assert workers.asked == ["large"]
    other = References(
        replace(served, fingerprint="another"), cache_directory=tmp_path / "cache", policy=DEFAULT_POLICY
    )
    await other.get(QUESTION, SOURCES)
    assert workers.asked == ["large", "large"]


@pytest.mark.parametrize("spoil", [b"", b"{", b"[1]", b'{"version": 2}', None])
async def test_a_corrupt_file_is_computed_again_with_a_line_in_the_log(
    served: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: bytes | None,
) -> None:
    workers = Workers(monkeypatch)
    for _ in range(2):
        references = References(served, cache_directory=tmp_path, policy=DEFAULT_POLICY)
        await references.get(QUESTION, SOURCES)
        await references.confirm(QUESTION)
    assert workers.asked == ["large"]
    (file,) = (tmp_path / "references").iterdir()
    # One character of the data, so its checksum does not match.
    file.write_bytes(file.read_bytes().replace(b'"data": "A', b'"data": "B') if spoil is None else spoil)
    if spoil is None:
        text = file.read_text()
        place = text.index('"data": "') + 20
        file.write_text(text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :])
    references = References(served, cache_directory=tmp_path, policy=DEFAULT_POLICY)
    with caplog.at_level(logging.WARNING):
        await references.get(QUESTION, SOURCES)
        await references.confirm(QUESTION)
    assert workers.asked == ["large", "large"]
    assert "the kept reference is not used" in caplog.text
    assert read_references(file, served.fingerprint).keys() == {"f32"}


async def test_an_unwritable_cache_is_ignored(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Workers(monkeypatch)
    (tmp_path / "file").write_text("")
    references = References(served, cache_directory=tmp_path / "file", policy=DEFAULT_POLICY)
    for _ in range(2):
        await references.get(QUESTION, SOURCES)
        with caplog.at_level(logging.WARNING):
            await references.confirm(QUESTION)
    assert caplog.text.count("is not kept for the next start") == 1


async def test_the_recorded_reference_is_for_the_built_in_model_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers(monkeypatch)
    model = open_model(config())
    texts = tuple(check_text(number, 20, model.config.vocab_size) for number in range(NUM_TEXTS))
    for dtype in DType:
        question = ReferenceQuestion(dtype, dtype, texts)
        assert (
            await References(model, policy=DEFAULT_POLICY).get(question, ())
        ).origin == "the recorded reference"
    assert workers.asked == []
    assert read_references(SELF_CHECK_FILE, "another") == {}
    with pytest.raises(NoReference):
        await References(replace(model, is_builtin=False), policy=DEFAULT_POLICY).get(question, ())


VOCAB_SIZE = 50
TEXTS = tuple(check_text(number, 8, VOCAB_SIZE) for number in range(NUM_TEXTS))
ROW = TokenLogprobs(7, -3.0, 9, ((1, -0.5), (2, -1.5)))
ROUNDING = 0.01


def row_after(text: int, position: int) -> TokenLogprobs:
    """Differs by position."""
    tokens = TEXTS[text]
    following = tokens[position + 1] if position + 1 < len(tokens) else 1
    first = -0.25 - 0.01 * position - 0.1 * text
    top = ((1, first), (2, first - 1.0), (3, first - 2.0))
    return TokenLogprobs(following, dict(top).get(following, first - 5.0), 0, top)


def reference() -> Reference:
    texts = tuple(
        TextReference(
            tokens,
            tuple(row_after(number, i) for i in range(len(tokens))),
            roundings(ROUNDING, len(tokens)),
        )
        for number, tokens in enumerate(TEXTS)
    )
    num_tokens = sum(map(len, TEXTS))
    states = array("f", [float(1 + i % 7) for i in range(num_tokens * STATE_WIDTH)])
    layer = LayerReference(states, roundings(ROUNDING, num_tokens))
    return Reference(texts, (layer, layer), 2.0)


REFERENCE = reference()
KNOWN = KnownReference(REFERENCE, "the reference of worker w", "w")


def plan() -> Plan:
    """Two stages of a layer each, and blocks of four tokens."""
    made = plan_of([WorkerCapacity(name=name, memory_bytes=1) for name in "ab"], needed_bytes=0)
    limits = StepLimits(max_step_tokens=16, max_step_sequences=8, max_sequence_tokens=32)
    return replace(made, limits=limits, num_blocks=16, block_size=4)


PLAN = plan()


def new_script() -> Script:
    return write_script(PLAN, 5, TEXTS, KvCacheManager(num_blocks=16, block_size=4))


SCRIPT = new_script()


def answers(script: Script = SCRIPT) -> list[StepResult]:
    """Results of a correct pipeline."""
    results = []
    for step in script.steps:
        entries = []
        for part in step.slices:
            rows = [row_after(part.text, part.first + i) for i in range(part.num_tokens)]
            sampled = replace(rows[-1], token=rows[-1].top[0][0], logprob=rows[-1].top[0][1])
            entries.append(
                SliceResult(
                    part.sequence,
                    0,
                    sampled.token if part.is_sampled else None,
                    sampled if part.is_sampled else None,
                    tuple(rows[: part.num_scored]),
                )
            )
        results.append(StepResult.of(5, step.step.step_id, tuple(entries)))
    return results


def states() -> array[float]:
    """Hidden states of a correct stage."""
    found = array("f")
    for part in (part for step in SCRIPT.steps for part in step.slices):
        for position in range(part.first, part.first + part.num_tokens):
            begin = REFERENCE.token_index(part.text, position) * STATE_WIDTH
            found += REFERENCE.layers[0].states[begin : begin + STATE_WIDTH]
    return found


def verdict_of(results: Sequence[StepResult], **options: Any) -> Verdict:
    found = {"states": {0: states()}, "known": KNOWN} | options
    return judge(SCRIPT, PLAN, results, found["states"], found["known"])


def changed(
    results: Sequence[StepResult], choose: Callable[[SliceResult], bool], **changes: Any
) -> list[StepResult]:
    """Results with the first selected one changed."""
    left = True

    def change(entry: SliceResult) -> SliceResult:
        nonlocal left
        if left and choose(entry):
            left = False
            return replace(entry, **changes)
        return entry

    return [StepResult.of(result.epoch, result.step_id, map(change, result.results)) for result in results]


def is_decode(entry: SliceResult) -> bool:
    return not entry.prompt_logprobs


# Comparison


def test_differences_count_as_a_fraction_of_the_spread() -> None:
    assert row_deviation(ROW, ROW, REFERENCE) == 0.0
    moved = replace(ROW, logprob=-2.5, top=((1, 0.0), (2, -1.0)))
    assert row_deviation(moved, ROW, REFERENCE) == pytest.approx(0.25)


def test_a_token_listed_by_one_side_counts_above_the_last_of_the_other() -> None:
    # 4 in the place of 2: 0.5 above the last that the reference lists, which 2 is itself above the last here.
    other = replace(ROW, top=((1, -0.5), (4, -1.0)))
    assert row_deviation(other, ROW, REFERENCE) == pytest.approx(math.sqrt(0.5**2 / 4) / 2.0)


def test_logits_without_spread_are_compared() -> None:
    flat = replace(REFERENCE, logit_spread=0.0)
    assert row_deviation(ROW, ROW, flat) == 0.0
    assert row_deviation(replace(ROW, logprob=-2.0), ROW, flat) > 100


def by_phase(*groups: list[Token]) -> Groups:
    """Of a fresh prompt, of a continued one, and of decodes."""
    return groups_of(dict(zip(Phase, groups, strict=False)))


def worst_of(*groups: list[Token], before: Groups | None = None) -> Deviation:
    return deviations_of(by_phase(*groups), before)[0]


def usual(deviation: float, *, highest: float = 0.01) -> Token:
    """A token with a typical rounding of 0.01."""
    return Token(deviation, 0.01, highest)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_always_fail_the_check(value: float) -> None:
    found = worst_of([usual(row_deviation(replace(ROW, logprob=value), ROW, REFERENCE)), usual(0.0)])
    assert (found.is_good, found.share) == (False, math.inf)


def test_the_group_with_the_largest_deviation_counts() -> None:
    right, wrong = [usual(0.01)] * 40, [usual(0.01), usual(0.09)]
    found = worst_of(right, wrong, [])
    assert (found.is_good, found.is_typical) == (False, False)
    assert found.value == pytest.approx(math.sqrt((0.01**2 + 0.09**2) / 2))
    assert found.allowed == pytest.approx(ROUNDINGS * 0.01 * 2), "two tokens vary more than many"


def test_each_token_counts_in_multiples_of_its_rounding() -> None:
    """A route that rounding decides may change one token much; the same change of another one is a fault."""
    tokens = [usual(0.01)] * 20
    assert worst_of([usual(0.3, highest=0.3), *tokens]).is_good
    assert not worst_of([usual(0.3), *tokens, usual(0.01, highest=0.3)]).is_good


def test_a_small_deviation_of_all_tokens_is_seen_below_the_highest_rounding() -> None:
    few = [usual(0.01, highest=0.05)] * 36 + [usual(0.05, highest=0.05)] * 4
    assert worst_of(few).is_good
    found = worst_of([usual(0.05, highest=0.05)] * 40)
    assert (found.is_good, found.is_typical) == (False, True)
    assert found.value == pytest.approx(0.05)
    margin = 1 + 1 / 40 + 5 / 40**2
    assert found.allowed == pytest.approx(TYPICAL_ROUNDINGS * math.sqrt(0.01 * 0.05) * margin)


def test_a_token_without_any_deviation_does_not_hide_the_others() -> None:
    found = worst_of([usual(0.0), *[usual(0.05, highest=0.05)] * 40])
    assert (found.is_good, found.is_typical) == (False, True)


def test_a_stage_that_deviates_more_than_the_one_before_is_found() -> None:
    deviating, before = [usual(0.025, highest=0.1)] * 40, [usual(0.01, highest=0.1)] * 40
    assert worst_of(deviating).is_good
    assert worst_of(deviating, before=by_phase(deviating)).is_good
    found = worst_of(deviating, before=by_phase(before))
    assert (found.is_good, found.is_typical) == (False, True)
    assert found.value == pytest.approx(0.025)
    assert found.allowed == pytest.approx(1.5 * 0.01 * (1 + 8 / 40))


def test_decodes_that_deviate_more_than_fresh_prompts_are_found() -> None:
    prompt, decodes = [usual(0.01, highest=0.1)] * 40, [usual(0.035, highest=0.1)] * 12
    assert worst_of([], [], decodes).is_good
    assert not worst_of(prompt, [], decodes).is_good
    assert worst_of(prompt, [], decodes, before=by_phase([], [], decodes)).is_good


def test_typical_roundings_pass_however_little_the_stage_before_deviates() -> None:
    exact = by_phase([usual(0.0)] * 40)
    assert worst_of([usual(0.0115)] * 40, before=exact).is_good
    assert not worst_of([usual(0.013)] * 40, before=exact).is_good


def test_growth_does_not_matter_where_rounding_is_small() -> None:
    exact = by_phase([Token(0.0, 1e-4, 1e-4)] * 40)
    assert worst_of([Token(1.6e-4, 1e-4, 1e-4)] * 40, before=exact).is_good


def test_a_stage_before_that_is_not_finite_does_not_lower_the_limit() -> None:
    other = by_phase([usual(math.nan)] * 40)
    assert worst_of([usual(0.015)] * 40, before=other).is_good


def test_deviations_below_the_minimum_pass_whatever_rounding_is() -> None:
    assert worst_of([Token(1e-5, 0.0, 0.0)] * 40).is_good
    assert not worst_of([Token(1e-4, 0.0, 0.0)] * 40).is_good


# The verdict


def test_answers_like_the_reference_pass() -> None:
    verdict = verdict_of(answers())
    assert (verdict.outcome, verdict.deviation, verdict.stage) == (CheckOutcome.PASSED, 0.0, None)
    assert verdict.text == (
        f"passed: the log-probabilities of {SCRIPT.num_rows} tokens in {len(SCRIPT.steps)} steps differ from "
        "the reference of worker w by 0 of the spread of the logits, and 0.015 is allowed"
    )


def test_one_wrong_decode_is_not_lost_among_right_prompts() -> None:
    wrong = TokenLogprobs(1, -1.5, 1, ((1, -1.5), (2, -3.0), (3, -4.0)))
    verdict = verdict_of(changed(answers(), is_decode, outcome=1, logprobs=wrong))
    assert verdict.outcome is CheckOutcome.FAILED
    assert verdict.deviation is not None and verdict.deviation > 10 * 0.01
    assert verdict.stage == 1
    assert verdict.detail.endswith("; stage 1 (worker b) receives correct hidden states")
    assert "restart worker b, then check" in verdict.text and "--no-self-check" in verdict.text


def test_the_first_stage_that_deviates_is_named() -> None:
    wrong = states()
    wrong[-STATE_WIDTH] += 5.0
    verdict = verdict_of(answers(), states={0: wrong})
    assert (verdict.outcome, verdict.stage) == (CheckOutcome.FAILED, 0)
    assert verdict.detail.startswith("the hidden states of stage 0 (worker a) differ by ")
    other = TokenLogprobs(1, -1.5, 1, ((1, -1.5), (2, -3.0), (3, -4.0)))
    verdict = verdict_of(changed(answers(), is_decode, outcome=1, logprobs=other), states={0: wrong})
    assert (verdict.outcome, verdict.stage) == (CheckOutcome.FAILED, 0)
    assert "; first, the hidden states of stage 0 (worker a) differ by " in verdict.detail


@pytest.mark.parametrize("recorded", [{}, {0: array("f", [1.0])}])
def test_no_stage_is_named_without_its_hidden_states(recorded: dict[int, array[float]]) -> None:
    wrong = TokenLogprobs(1, -1.5, 1, ((1, -1.5), (2, -3.0), (3, -4.0)))
    verdict = verdict_of(changed(answers(), is_decode, outcome=1, logprobs=wrong), states=recorded)
    assert (verdict.outcome, verdict.stage) == (CheckOutcome.FAILED, None)
    assert verdict.detail.endswith("no hidden states of stage 0 to compare")


def test_a_token_other_than_the_clear_maximum_fails() -> None:
    second = TokenLogprobs(2, row_after(0, 0).top[1][1], 2, row_after(0, 0).top)
    verdict = verdict_of(
        changed(
            answers(),
            lambda entry: entry.sequence.choice == 0 and entry.outcome is not None,
            outcome=2,
            logprobs=replace(second, logprob=row_after(0, 1).top[1][1], top=row_after(0, 1).top),
        )
    )
    assert verdict.outcome is CheckOutcome.FAILED
    assert verdict.detail.startswith("token 2 was sampled where 1 is by far the most likely; ")


def test_without_a_reference_answers_have_to_be_finite() -> None:
    nothing = NoReference("worker w: too large")
    verdict = verdict_of(answers(), known=nothing)
    assert (verdict.outcome, verdict.text) == (
        CheckOutcome.FINITE_ONLY,
        "finite only: there is no reference: worker w: too large",
    )
    rows = (replace(ROW, top=((1, math.nan),)),)
    results = changed(answers(), lambda entry: len(entry.prompt_logprobs) == 1, prompt_logprobs=rows)
    assert verdict_of(results, known=nothing).outcome is CheckOutcome.FAILED


def test_the_error_of_a_slice_is_the_problem() -> None:
    key = SCRIPT.steps[0].slices[0].sequence
    error = SliceError(1, 2, f"logits for position 1 of {key} are not finite")
    verdict = verdict_of(changed(answers(), lambda entry: True, outcome=error))
    assert verdict.text.startswith("failed: logits for position 1 are not finite; restart the workers a, b, ")


SPOILT: list[Callable[[list[StepResult]], list[StepResult]]] = [
    lambda results: [replace(results[0], step_id=1), *results[1:]],
    lambda results: [StepResult(results[0].epoch, results[0].step_id), *results[1:]],
    lambda results: changed(results, lambda entry: True, prompt_logprobs=(ROW,) * 9),
    lambda results: changed(results, is_decode, logprobs=None),
    lambda results: changed(results, is_decode, outcome=3),
    lambda results: changed(results, is_decode, logprobs=replace(ROW, token=1, top=())),
    lambda results: changed(
        results, lambda entry: True, sequence=SequenceKey(SCRIPT.steps[0].slices[0].sequence.request_id, 9)
    ),
]


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("known", [KNOWN, NoReference("none")])
def test_answers_to_something_else_fail(
    spoil: Callable[[list[StepResult]], list[StepResult]], known: KnownReference | NoReference
) -> None:
    assert verdict_of(spoil(answers()), known=known).outcome is CheckOutcome.FAILED


# Running


class FakeReferences(References):
    """A store with one reference or none."""

    def __init__(self) -> None:
        self.known: KnownReference | None = KNOWN
        self.confirmed = 0
        self.blamed: list[str] = []

    async def get(self, question: ReferenceQuestion, sources: Sequence[ReferenceSource]) -> KnownReference:
        if self.known is None:
            raise NoReference("not yet")
        return self.known

    def has(self, question: ReferenceQuestion) -> bool:
        return self.known is not None

    async def confirm(self, question: ReferenceQuestion) -> None:
        self.confirmed += 1

    def record_failure(self, question: ReferenceQuestion, worker: str) -> bool:
        self.blamed.append(worker)
        return True


class Running:
    """A check of a pipeline with scripted results."""

    def __init__(self, *, interval_s: float = 600.0, changed: Sequence[Path] = ()) -> None:
        self.references = FakeReferences()
        self.check = SelfCheck(
            self.references,
            vocab_size=VOCAB_SIZE,
            interval_s=interval_s,
            policy=replace(DEFAULT_POLICY, check_answer_timeout_s=0.01, check_states_timeout_s=0.01),
            changed_files=lambda: changed,
            now_us=lambda: 77,
        )
        self.results = answers()
        self.states: array[float] | None = states()

    def _send(self, step: Step) -> None:
        if step.step_id < len(self.results):
            self.check.take(self.results[step.step_id])

    def _tell(self) -> None:
        if self.states is not None:
            self.check.take_states(0, self.states.tobytes())

    async def run(self) -> Verdict:
        self.check.begin()
        known = await self.check.reference(PLAN, DType.F32, ())
        kv = KvCacheManager(num_blocks=16, block_size=4)
        epoch = CheckedEpoch(
            epoch=5, plan=PLAN, kv=kv, first_step_id=0, send=self._send, ask_states=self._tell
        )
        verdict = await self.check.run(epoch, known)
        await self.check.keep_reference()
        return verdict


async def test_the_last_verdict_is_reported_with_its_time() -> None:
    running = Running()
    assert running.check.verdict.text == "not run yet"
    verdict = await running.run()
    assert running.check.verdict is verdict
    assert (verdict.outcome, verdict.at_us) == (CheckOutcome.PASSED, 77)
    assert running.references.confirmed == 1


async def test_a_failed_check_names_files_that_have_changed() -> None:
    files = [Path("/models/one/model-00001.safetensors"), Path("/models/one/model-00002.safetensors")]
    running = Running(changed=files)
    assert "changed" not in (await running.run()).text
    wrong = TokenLogprobs(1, -1.5, 1, ((1, -1.5), (2, -3.0), (3, -4.0)))
    running.results = changed(answers(), is_decode, outcome=1, logprobs=wrong)
    verdict = await running.run()
    assert verdict.text.endswith(
        "the checkpoint has changed since the coordinator started: restore "
        "/models/one/model-00001.safetensors and 1 other files, or restart the coordinator and all workers "
        "to serve the new weights"
    )


async def test_a_missing_result_ends_the_check() -> None:
    running = Running()
    running.results.pop()
    with pytest.raises(TimeoutError):
        await running.run()
    assert running.check.verdict.text == "under way"


async def test_a_reference_that_a_plan_has_failed_with_is_not_kept() -> None:
    running = Running()
    running.states = array("f", [0.0] * len(states()))
    assert (await running.run()).stage == 0
    assert running.references.confirmed == 0
    assert running.check.record_failure("a")
    assert running.references.blamed == ["a"]


async def test_an_uncompared_answer_does_not_confirm_the_reference() -> None:
    running = Running()
    running.results[0] = StepResult(running.results[0].epoch, 0)
    assert (await running.run()).deviation is None
    assert not running.check.record_failure("a")
    assert running.references.blamed == []


async def test_missing_hidden_states_time_out() -> None:
    running = Running()
    running.states = None
    verdict = await running.run()
    assert verdict.outcome is CheckOutcome.PASSED
    assert verdict.detail.endswith("no hidden states of stage 0 to compare")


async def test_a_check_is_due_after_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running()
    assert not running.check.is_due(), "the first one is not for an idle moment"
    await running.run()
    assert not running.check.is_due()
    running.check._checked_at_s = asyncio.get_running_loop().time() - 601
    assert running.check.is_due()
    off = Running(interval_s=0.0)
    await off.run()
    off.check._checked_at_s = -1e9
    assert not off.check.is_due()


async def test_a_check_is_due_when_its_reference_is_available() -> None:
    running = Running()
    running.references.known = None
    assert (await running.run()).outcome is CheckOutcome.FINITE_ONLY
    assert not running.check.is_due()
    running.references.known = KNOWN
    assert running.check.is_due()


# Schedule and configuration


def config(**settings: Any) -> CoordinatorConfig:
    values: dict[str, Any] = {
        "model": None,
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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"self_check": False}, False),
        ({"model": Path("/nowhere")}, True),
        ({"model": Path("/nowhere"), "self_check": False}, False),
        ({"mock_model": "layers=4"}, False),
    ],
)
def test_every_model_with_weights_is_checked_by_default(settings: dict[str, Any], expected: bool) -> None:
    assert config(**settings).wants_self_check is expected


def test_a_mock_model_cannot_be_checked() -> None:
    with pytest.raises(ValueError, match="--self-check needs weights"):
        config(mock_model="layers=4", self_check=True)


@pytest.mark.parametrize("interval_s", [-1.0, math.inf, math.nan])
def test_an_impossible_interval_is_rejected(interval_s: float) -> None:
    with pytest.raises(ValueError, match=rf"--self-check-interval is {interval_s}, must be in \[0, inf\)"):
        config(self_check_interval_s=interval_s)
