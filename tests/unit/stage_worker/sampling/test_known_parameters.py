"""No way of sampling ignores a parameter: it applies it, or leaves the row to the general way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stage_worker.sampling import Sampler, random_choice, step_rows
from stage_worker.sampling.random_choice import PARAMETERS, Draw, KnownParameters
from tests.sampled import GENERATED, PROMPT, STAGE, Row, decode, key, start_record
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import SliceResult, Step, StepSlice

VOCAB, NUM_ROWS = 600, 64
"""More tokens than candidates."""
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
"""Nothing is on a GPU: rows are made as for one."""
DRAWN = StepSampling(temperature=1.0, seed=3)
HELD_BACK = tuple(range(0, VOCAB, 2))
OTHER_VALUES: dict[str, StepSampling] = {
    "temperature": replace(DRAWN, temperature=0.3),
    "top_p": replace(DRAWN, top_p=0.4),
    "min_p": replace(DRAWN, min_p=0.3),
    "typical_p": replace(DRAWN, typical_p=0.3),
    "repetition_penalty": replace(DRAWN, repetition_penalty=9.0),
    "frequency_penalty": replace(DRAWN, frequency_penalty=2.0),
    "presence_penalty": replace(DRAWN, presence_penalty=2.0),
    "top_k": replace(DRAWN, top_k=5),
    "seed": replace(DRAWN, seed=4),
    "logit_bias": replace(DRAWN, logit_bias=((5, 50.0),)),
    "allowed_token_ids": replace(DRAWN, allowed_token_ids=HELD_BACK),
    "bad_words": replace(DRAWN, bad_words=tuple((token,) for token in HELD_BACK)),
    "min_tokens": replace(DRAWN, min_tokens=99, min_tokens_hold_back=HELD_BACK),
    "min_tokens_hold_back": replace(DRAWN, min_tokens=99, min_tokens_hold_back=HELD_BACK),
    "logprobs": replace(DRAWN, logprobs=2),
}
"""Another value of each parameter, which changes tokens or results."""
NOT_OF_ROWS = {
    "grammar": "needs a tokenizer, see test_structured_rows.py",
    "prompt_logprobs": "is of chunks of a prompt, see test_sampler.py",
}


def logits_of_rows() -> torch.Tensor:
    """Some tokens are likely, most are possible; those of the history are among the likely ones."""
    scores = torch.randn(NUM_ROWS, VOCAB, generator=torch.Generator().manual_seed(7))
    scores[:, :12] += 6.0
    return scores


def started(sampling: StepSampling, *, has_kernels: bool = False) -> tuple[Sampler, list[StepSlice]]:
    made = Sampler(vocab_size=VOCAB, stage=STAGE, has_kernels=has_kernels)
    parts = []
    for index in range(NUM_ROWS):
        row = Row(sampling=sampling, prompt=PROMPT * (1 + index), generated=GENERATED)
        made.start(start_record(key(index), row))
        parts.append(decode(key(index), 7, len(row.tokens)))
    return made, parts


def general(sampling: StepSampling) -> list[SliceResult]:
    """Results of rows at full width."""
    made, parts = started(sampling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_choice, "_by_width", lambda draws, vocab_size: ({}, {}, draws))
        return list(made.choose(parts, logits_of_rows()))


def settled(sampling: StepSampling, device: torch.device) -> list[SliceResult]:
    """Results of rows that are sampled as on `device`, by torch's operators."""
    made, parts = started(sampling)
    step = made.prepare(Step.of(tuple(parts), epoch=1, step_id=1, digest=0), device=device)
    logits = logits_of_rows()
    tokens = [] if step.rows is None else step.rows.choose(logits, None, torch.from_numpy).tolist()
    return [
        one if isinstance(one, SliceResult) else SliceResult(part.sequence, part.restart_count, one)
        for part, one in zip(parts, made.settle(step, logits, tokens), strict=True)
    ]


def test_each_parameter_of_the_table_has_another_value_here() -> None:
    """A new parameter: add a value of it to OTHER_VALUES."""
    assert OTHER_VALUES.keys() | NOT_OF_ROWS.keys() == PARAMETERS
    for name, sampling in OTHER_VALUES.items():
        assert getattr(sampling, name) != getattr(DRAWN, name)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_each_parameter_changes_results_alike_in_every_way_of_torch(name: str) -> None:
    sampling = OTHER_VALUES[name]
    expected = general(sampling)
    assert expected != general(DRAWN), f"{name} has no effect"
    made, parts = started(sampling)
    assert list(made.choose(parts, logits_of_rows())) == expected
    assert settled(sampling, CPU) == expected
    assert settled(sampling, GPU) == expected


@pytest.mark.parametrize("name", ["top_p", "min_p", "top_k"])
def test_a_parameter_that_kernels_do_not_name_is_not_theirs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was added to the table."""

    def held() -> int:
        made, parts = started(OTHER_VALUES[name], has_kernels=True)
        return len(made.prepare(Step.of(tuple(parts), epoch=1, step_id=1, digest=0), device=CPU).held)

    assert held() == 0
    named = {"temperature", "seed", "top_p", "min_p", "top_k"} - {name}
    monkeypatch.setattr(step_rows, "_KERNEL_PARAMETERS", KnownParameters(*named))
    assert held() == NUM_ROWS


@pytest.mark.parametrize("name", ["top_p", "min_p", "typical_p"])
def test_a_parameter_that_a_shortcut_does_not_name_takes_the_full_width(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = {0: Draw(OTHER_VALUES[name], 0, 5), 1: Draw(DRAWN, 0, 5)}
    named = {"temperature", "seed", "top_k", "top_p", "min_p", "typical_p"} - {name}
    monkeypatch.setattr(random_choice, "_OF_CANDIDATES", KnownParameters(*named))
    plain, few, many = random_choice._by_width(draws, VOCAB)
    assert (list(plain), list(few), list(many)) == ([1], [], [0])


@pytest.mark.parametrize("name", sorted(PARAMETERS - {"grammar"}))
def test_a_way_that_names_nothing_takes_only_what_every_way_applies(name: str) -> None:
    every_way = {
        *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "logprobs"),
        *("allowed_token_ids", "bad_words", "min_tokens", "min_tokens_hold_back", "prompt_logprobs"),
    }
    value: object = {"prompt_logprobs": 3, "min_tokens": 3, "temperature": 1.0}.get(
        name, getattr(OTHER_VALUES.get(name), name, None)
    )
    sampling = replace(StepSampling(), **{name: value})
    assert KnownParameters().suffice_for(sampling) is (name in every_way)
    assert KnownParameters(name).suffice_for(sampling)


def test_a_grammar_is_of_every_way() -> None:
    grammar = GrammarSpec(definition="x", tokenizer_checksum=1)
    assert KnownParameters().suffice_for(replace(StepSampling(), grammar=grammar))
    with pytest.raises(AssertionError, match="no parameters"):
        KnownParameters("top_n_sigma")
