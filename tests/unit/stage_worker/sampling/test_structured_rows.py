"""Rows with a grammar: in mixed batches, with sampling parameters, and after restarts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from stage_worker.sampling import Sampler
from stageline_rpc.internal.v1 import step_pb2
from tests.unit.stage_worker.sampling.grammar_walks import EOS, VOCAB_SIZE, InlinePool, Setting
from tests.unit.text.trained_tokenizers import byte_level, save_tokenizer
from text.grammars import GrammarKind
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import Decode, Prefill, SliceError, StartRecord, StepSlice, TokenLogprobs

PROMPT = (1, 50, 60)
PHONE = r"[0-9]{3}-[0-9]{4}(ext[0-9])?"


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting.of(save_tokenizer(tmp_path, byte_level()))


def new_sampler(setting: Setting) -> Sampler:
    return Sampler(vocab_size=VOCAB_SIZE, stage=2, grammars=setting.masks(InlinePool()))


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
