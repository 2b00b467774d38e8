"""Rows with a grammar: in mixed batches, with sampling parameters, and after restarts."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stage_worker.policy import WORKER_POLICY
from stage_worker.sampling import SampledStep, Sampler
from stage_worker.sampling.grammar_masks import MaskRows
from stageline_rpc.internal.v1 import step_pb2
from tests.fake_cuda import DEVICE, fake_cuda
from tests.unit.stage_worker.sampling.grammar_walks import EOS, VOCAB_SIZE, HeldPool, InlinePool, Setting
from tests.unit.text.trained_tokenizers import byte_level, save_tokenizer
from text.grammars import GrammarKind
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import (
    Decode,
    Prefill,
    SliceError,
    SliceResult,
    StartRecord,
    Step,
    StepSlice,
    TokenLogprobs,
)

PROMPT = (1, 50, 60)
PHONE = r"[0-9]{3}-[0-9]{4}(ext[0-9])?"


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting.of(save_tokenizer(tmp_path, byte_level()))


def new_sampler(setting: Setting) -> Sampler:
    return Sampler(vocab_size=VOCAB_SIZE, stage=2, grammars=setting.masks(InlinePool()))


def late_sampler(setting: Setting) -> tuple[Sampler, HeldPool]:
    """A sampler that waits for no mask, whose masks are computed on demand."""
    pool = HeldPool()
    return Sampler(vocab_size=VOCAB_SIZE, stage=2, grammars=setting.masks(pool, wait_s=0.0)), pool


def started(sampler: Sampler, sampling: StepSampling, generated: tuple[int, ...] = ()) -> SequenceKey:
    key = SequenceKey(new_request_id(), 0)
    sampler.start(StartRecord(key, 1, len(PROMPT), (*PROMPT, *generated), sampling))
    return key


def part(key: SequenceKey, generated: list[int]) -> StepSlice:
    """The slice after the prompt or the last generated token."""
    if not generated:
        return StepSlice(key, 1, PROMPT, Prefill(0, len(PROMPT), len(PROMPT)))
    return StepSlice(key, 1, (generated[-1],), Decode(len(PROMPT) + len(generated) - 1))


def logits_at(position: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(position))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_row_with_a_grammar_does_not_change_its_batch_mate(setting: Setting, temperature: float) -> None:
    spec = setting.spec(GrammarKind.REGEX, PHONE)
    sampling = StepSampling(temperature=temperature, seed=3, repetition_penalty=1.3, top_p=0.9)
    sampler, alone = new_sampler(setting), new_sampler(setting)
    bound = started(sampler, StepSampling(temperature=temperature, seed=7, logprobs=2, grammar=spec))
    free, free_alone = started(sampler, sampling), started(alone, sampling)
    text: list[int] = []
    mate: list[int] = []
    while not text or text[-1] not in EOS:
        logits = logits_at(len(text), 2)
        before = logits.clone()
        [ours, theirs] = sampler.choose([part(bound, text), part(free, mate)], logits)
        [solo] = alone.choose([part(free_alone, mate)], logits[1:])
        assert torch.equal(logits, before)
        assert theirs.outcome == solo.outcome
        assert isinstance(ours.outcome, int)
        assert isinstance(theirs.outcome, int)
        assert isinstance(ours.logprobs, TokenLogprobs)
        model_logprob = float(before[0].log_softmax(-1)[ours.outcome])
        assert ours.logprobs.logprob == pytest.approx(model_logprob, abs=1e-4)
        text.append(ours.outcome)
        mate.append(theirs.outcome)
    assert re.fullmatch(PHONE, setting.codec.decode(text))


def device_step(sampler: Sampler, slices: list[StepSlice]) -> SampledStep:
    """Rows as for a GPU; nothing is on one."""
    return sampler.prepare(
        Step.of(tuple(slices), epoch=1, step_id=1, digest=0), device=torch.device("cuda:0")
    )


def settled(sampler: Sampler, step: SampledStep, logits: torch.Tensor) -> list[object]:
    """Tokens, or results, where only the arrays of the step are on the device."""
    assert step.rows is not None
    placed = {id(array): torch.from_numpy(array) for array in step.rows.arrays}
    tokens = step.rows.choose(logits, None, lambda array: placed[id(array)]).tolist()
    return [
        one.outcome if isinstance(one, SliceResult) else one for one in sampler.settle(step, logits, tokens)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_device_masks_rows_whose_masks_are_known(setting: Setting, temperature: float) -> None:
    spec = setting.spec(GrammarKind.REGEX, PHONE)
    sampling = StepSampling(temperature=temperature, seed=7, repetition_penalty=1.2, grammar=spec)
    found, expected = new_sampler(setting), new_sampler(setting)
    key, key_expected = started(found, sampling), started(expected, sampling)
    free = started(found, StepSampling(temperature=temperature, seed=1))
    text: list[int] = []
    while not text or text[-1] not in EOS:
        logits = logits_at(len(text), 2)
        step = device_step(found, [part(key, text), part(free, text)])
        assert step.held == frozenset()
        [ours, mate] = settled(found, step, logits)
        [theirs] = expected.choose([part(key_expected, text)], logits[:1])
        assert ours == theirs.outcome
        assert isinstance(ours, int) and isinstance(mate, int)
        text.append(ours)
    assert re.fullmatch(PHONE, setting.codec.decode(text))


def test_a_sampled_token_begins_the_next_mask(setting: Setting) -> None:
    pool = InlinePool()
    sampler = Sampler(vocab_size=VOCAB_SIZE, stage=2, grammars=setting.masks(pool))
    key = started(sampler, StepSampling(temperature=0.0, grammar=setting.spec(GrammarKind.REGEX, PHONE)))
    [token] = settled(sampler, device_step(sampler, [part(key, [])]), logits_at(0, 1))
    assert isinstance(token, int)
    num_pieces = pool.num_pieces
    assert num_pieces == 2  # of the start, and of the token
    assert device_step(sampler, [part(key, [token])]).held == frozenset()
    assert pool.num_pieces == num_pieces


def test_masking_waits_for_no_device() -> None:
    """More rows than are masked together, and ids that end within an octet."""
    masks = MaskRows({row: np.full(13, 255, np.uint8) for row in range(0, 60, 3)})
    with fake_cuda() as copies:
        placed = {id(array): torch.from_numpy(array).to(DEVICE) for array in masks.arrays}
        scores = torch.empty((60, 100), device=DEVICE)
        copies.counts.clear()
        masks.apply(scores, lambda array: placed[id(array)])
    assert copies.counts["operations"] > 0
    assert (copies.counts["up"], copies.counts["down"]) == (0, 0)


def test_rows_whose_masks_are_not_known_in_time_are_held(setting: Setting) -> None:
    sampler, pool = late_sampler(setting)
    spec = setting.spec(GrammarKind.REGEX, PHONE)
    bound, free = (
        started(sampler, StepSampling(temperature=0.0, grammar=spec)),
        started(sampler, StepSampling()),
    )
    slices = [part(bound, []), part(free, [])]
    step = device_step(sampler, slices)
    assert step.held == {0}
    pool.work()
    assert device_step(sampler, slices).held == frozenset()
    [ours, _] = settled(sampler, step, logits_at(0, 2))
    assert setting.codec.decode([ours])[0].isdigit()  # type: ignore[list-item]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_late_row_gets_the_token_of_a_row_in_time(setting: Setting, temperature: float) -> None:
    """Its mate of the step waits for nothing."""
    spec = setting.spec(GrammarKind.REGEX, PHONE)
    sampling = StepSampling(temperature=temperature, seed=7, logprobs=1, repetition_penalty=1.2, grammar=spec)
    (late, pool), in_time = late_sampler(setting), new_sampler(setting)
    key, key_in_time = started(late, sampling), started(in_time, sampling)
    free = started(late, StepSampling())
    text: list[int] = []
    while not text or text[-1] not in EOS:
        logits = logits_at(len(text), 2)
        row, mate = late.choose([part(key, text), part(free, text)], logits)
        assert (row.outcome, row.is_late, isinstance(mate.outcome, int)) == (None, True, True)
        logits.fill_(0.0)  # a device uses the memory again
        assert late.take_late_rows(may_wait=True) == ()
        pool.work()
        [found] = late.take_late_rows(may_wait=False)
        [expected] = in_time.choose([part(key_in_time, text)], logits_at(len(text), 2)[:1])
        assert (found.outcome, found.logprobs) == (expected.outcome, expected.logprobs)
        assert late.take_late_rows(may_wait=False) == ()
        assert isinstance(found.outcome, int)
        text.append(found.outcome)
    assert re.fullmatch(PHONE, setting.codec.decode(text))


def test_logits_of_late_rows_are_on_the_host(setting: Setting) -> None:
    """A row alone in its step has its logits on the device, one beside a settled row on the host."""
    sampler, _ = late_sampler(setting)
    spec = setting.spec(GrammarKind.REGEX, PHONE)
    keys = [started(sampler, StepSampling(temperature=0.0, grammar=spec)) for _ in range(2)]
    with fake_cuda():
        for key, device in zip(keys, (DEVICE, torch.device("cpu")), strict=True):
            logits = torch.empty(1, VOCAB_SIZE, device=device)
            assert sampler._late_results([part(key, [])], [sampler._live[key]], logits, ())
    assert {row.logits.device for row in sampler._late._rows.values()} == {torch.device("cpu")}


def test_a_late_row_of_a_grammar_that_fails_is_an_error(setting: Setting) -> None:
    sampler, pool = late_sampler(setting)
    spec = replace(setting.spec(GrammarKind.REGEX, PHONE), tokenizer_checksum=1)
    sampler.choose([part(started(sampler, StepSampling(grammar=spec)), [])], logits_at(0, 1))
    pool.work()
    [row] = sampler.take_late_rows(may_wait=False)
    assert isinstance(row.outcome, SliceError)
    assert (row.outcome.kind, row.is_late) == (step_pb2.SliceError.KIND_GRAMMAR, False)


def test_the_late_row_of_an_ended_sequence_is_dropped(setting: Setting) -> None:
    sampler, pool = late_sampler(setting)
    key = started(sampler, StepSampling(grammar=setting.spec(GrammarKind.REGEX, PHONE)))
    sampler.choose([part(key, [])], logits_at(0, 1))
    sampler.end(key)
    pool.work()
    assert sampler.take_late_rows(may_wait=True) == ()


def test_a_mask_that_takes_too_long_fails_its_sequence(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, _ = late_sampler(setting)
    key = started(sampler, StepSampling(grammar=setting.spec(GrammarKind.REGEX, PHONE)))
    sampler.choose([part(key, [])], logits_at(0, 1))
    assert sampler.take_late_rows(may_wait=False) == ()
    limit_s = WORKER_POLICY.mask_limit_s
    later_s = time.monotonic() + limit_s + 1
    monkeypatch.setattr("stage_worker.sampling.late_rows.time.monotonic", lambda: later_s)
    [row] = sampler.take_late_rows(may_wait=False)
    text = f"the mask of the grammar was not ready after {limit_s:g} s"
    assert row.outcome == SliceError(step_pb2.SliceError.KIND_GRAMMAR, 2, text)
    assert row.sequence == key


def test_masks_beyond_the_room_for_edits_are_applied_after_the_step(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage_worker.sampling.sampler.MAX_EDIT_BYTES", (VOCAB_SIZE + 7) // 8)
    sampler = new_sampler(setting)
    sampling = StepSampling(temperature=0.0, grammar=setting.spec(GrammarKind.REGEX, PHONE))
    slices = [part(started(sampler, sampling), []) for _ in range(2)]
    step = device_step(sampler, slices)
    assert step.held == {1}
    [first, second] = settled(sampler, step, logits_at(0, 1).expand(2, -1).clone())
    assert first == second


def test_a_sequence_started_again_draws_the_same_tokens(setting: Setting) -> None:
    sampling = StepSampling(
        temperature=1.0, seed=11, grammar=setting.spec(GrammarKind.REGEX, r"[a-z]{30}[0-9]{30}")
    )
    sampler = new_sampler(setting)
    key = started(sampler, sampling)
    tokens: list[int] = []
    for _ in range(20):
        again = new_sampler(setting)
        key_again = started(again, sampling, tuple(tokens))
        whole = (*PROMPT, *tokens)
        prefill = StepSlice(key_again, 1, whole, Prefill(0, len(whole), len(whole)))
        logits = logits_at(len(tokens), 1)
        [ours] = sampler.choose([part(key, tokens)], logits)
        [theirs] = again.choose([prefill], logits)
        assert ours.outcome == theirs.outcome
        assert isinstance(ours.outcome, int)
        tokens.append(ours.outcome)
        if tokens[-1] in EOS:
            break


def test_parameters_that_exclude_the_grammar_fail_that_row_alone(setting: Setting) -> None:
    sampler = new_sampler(setting)
    spec = setting.spec(GrammarKind.CHOICE, "x")
    [letter] = setting.codec.encode("x")[1:]
    barred = started(sampler, StepSampling(grammar=spec, bad_words=((letter,),)))
    well = started(sampler, StepSampling(grammar=spec))
    [failed, chosen] = sampler.choose([part(barred, []), part(well, [])], logits_at(0, 2))
    assert isinstance(failed.outcome, SliceError)
    assert failed.outcome.kind == step_pb2.SliceError.KIND_SAMPLER
    assert failed.outcome.message.endswith("by bad_words and the grammar")
    assert chosen.outcome == letter


def test_a_grammar_without_a_next_token_fails_its_row_alone(setting: Setting) -> None:
    sampler = new_sampler(setting)
    [letter] = setting.codec.encode("a")[1:]
    dead = setting.spec(GrammarKind.GRAMMAR, 'start: "a" B\nB: /x/ & /y/')
    ended = started(sampler, StepSampling(grammar=dead), (letter,))
    well = started(sampler, StepSampling(grammar=setting.spec(GrammarKind.CHOICE, "ab")), (letter,))
    whole = (*PROMPT, letter)
    slices = [StepSlice(key, 1, whole, Prefill(0, len(whole), len(whole))) for key in (ended, well)]
    [failed, chosen] = sampler.choose(slices, logits_at(0, 2))
    assert isinstance(failed.outcome, SliceError)
    assert failed.outcome.kind == step_pb2.SliceError.KIND_GRAMMAR
    assert failed.outcome.message == "structured output: the grammar allows no token here"
    assert isinstance(chosen.outcome, int)


def test_a_stage_that_cannot_serve_grammars_fails_that_row_alone(setting: Setting, tmp_path: Path) -> None:
    spec = setting.spec(GrammarKind.CHOICE, "x")
    (tmp_path / "tokenizer.json").unlink()
    for sampler in (Sampler(vocab_size=VOCAB_SIZE, stage=2), new_sampler(setting)):
        bound, free = started(sampler, StepSampling(grammar=spec)), started(sampler, StepSampling())
        [failed, chosen] = sampler.choose([part(bound, []), part(free, [])], logits_at(0, 2))
        assert isinstance(failed.outcome, SliceError)
        assert "structured output" in failed.outcome.message
        assert isinstance(chosen.outcome, int)


def test_an_ended_sequence_releases_its_grammar_state(setting: Setting) -> None:
    grammars = setting.masks(InlinePool())
    sampler = Sampler(vocab_size=VOCAB_SIZE, stage=2, grammars=grammars)
    key = started(sampler, StepSampling(grammar=setting.spec(GrammarKind.CHOICE, "x")))
    sampler.end(key)
    logits = torch.zeros(1, VOCAB_SIZE)
    assert grammars.apply(logits, [(0, key)]) == {}
    assert not logits.any()
