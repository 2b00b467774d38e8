"""With every sampling parameter in use, tokens do not depend on where and how they are computed."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from stageline.client.request import GenerateOptions
from tests.checkpoints import make_checkpoint
from tests.integration.calls import until
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.logprob_reference import LogprobReference
from tests.integration.outputs import Outputs
from tests.integration.request_cases import mixed_cases
from tests.unit.stage_worker.sampling.reference_distribution import Context, distribution
from wire.sampling import StepSampling

LAYERS = {1: (5,), 2: (2, 3), 3: (2, 1, 2), 5: (1, 1, 1, 1, 1)}
MAX_TOKENS = 32
MIN_TOKENS = 12
STOP_TOKENS = (7, 23, 64, 99, 110)
BIAS = {3: 2.5, 7: 3.0, 40: -4.0, 90: 1.5}
BAD_WORDS = [[5], [3, 90], [11, 12], [90, 3, 40]]
ALLOWED = tuple(token for token in range(128) if token % 9 != 4)
EVERYTHING: GenerateOptions = {
    "max_tokens": MAX_TOKENS,
    "temperature": 2.5,
    "top_k": 60,
    "top_p": 0.97,
    "min_p": 0.01,
    "typical_p": 0.95,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "logit_bias": BIAS,
    "bad_word_ids": BAD_WORDS,
    "allowed_token_ids": ALLOWED,
    "min_tokens": MIN_TOKENS,
    "stop_token_ids": STOP_TOKENS,
    "logprobs": 2,
    "n": 3,
}


SAME_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
"""As in StepSampling."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt with a seed."""

    prompt: tuple[int, ...]
    seed: int

    async def run(self, cluster: Cluster, into: Outputs | None = None, **changes: Any) -> Outputs:
        options: Any = {**EVERYTHING, "seed": self.seed, **changes}
        outputs = cluster.client.generate(list(self.prompt), timeout_s=DEADLINE_S, **options)
        return await (into or Outputs()).take(outputs)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist())


CASES = tuple(
    Case(prompt=prompt_of(length), seed=seed)
    for length, seed in ((1, 0), (16, 2**64 - 1), (21, 5), (75, 2**40 + 1))
)
Tokens = list[list[int]]
"""Of each choice."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("everywhere") / "model"
    return make_checkpoint(directory, "llama", num_layers=5, initializer_range=0.2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def solo(llama: Path) -> list[Tokens]:
    """Tokens of CASES on one stage, one after the other, each prompt in one chunk."""
    async with Cluster(llama, layers=LAYERS[1], max_step_tokens=256) as cluster:
        return [(await case.run(cluster)).tokens for case in CASES]


async def run_all(cluster: Cluster, cases: Sequence[Case] = CASES, **changes: Any) -> list[Outputs]:
    """Run all cases concurrently."""
    return await asyncio.gather(*(case.run(cluster, **changes) for case in cases))


def tokens_of(answers: Sequence[Outputs]) -> list[Tokens]:
    return [outputs.tokens for outputs in answers]


def restarts(answers: Sequence[Outputs]) -> int:
    return sum(choice.restarts for outputs in answers for choice in outputs.choices.values())


def test_the_cases_vary_enough_to_compare(solo: list[Tokens]) -> None:
    """Choices differ; some stop early, none too early, and some reach the length limit."""
    choices = [tuple(tokens) for case in solo for tokens in case]
    assert len(set(choices)) == len(choices)
    assert all(len(tokens) > MIN_TOKENS for tokens in choices)
    assert any(len(tokens) < MAX_TOKENS for tokens in choices)
    assert any(len(tokens) == MAX_TOKENS for tokens in choices)
    assert all(len(set(tokens)) > 8 for tokens in choices)


def test_every_parameter_reaches_the_last_stage(llama: Path, solo: list[Tokens]) -> None:
    """Every token is possible by probabilities computed independently from transformers' logits."""
    reference = LogprobReference(llama)
    for case, choices in zip(CASES, solo, strict=True):
        for tokens in choices:
            logits = reference.logits([*case.prompt, *tokens]).double().numpy()
            for index, token in enumerate(tokens):
                context = Context(
                    sampling=_step_sampling(case.seed), prompt=case.prompt, generated=tuple(tokens[:index])
                )
                shares = distribution(logits[len(case.prompt) - 1 + index], context)
                assert shares[token] > 0, f"token {index} of {tokens}"
                assert np.count_nonzero(shares) > 1
            assert not any(list(pair) in BAD_WORDS for pair in pairwise(tokens))
            assert not set(tokens[:MIN_TOKENS]) & set(STOP_TOKENS)


def _step_sampling(seed: int) -> StepSampling:
    given: dict[str, Any] = dict(EVERYTHING)
    return StepSampling(
        **{name: given[name] for name in SAME_NAMES},
        seed=seed,
        logit_bias=tuple(BIAS.items()),
        allowed_token_ids=ALLOWED,
        bad_words=tuple(map(tuple, BAD_WORDS)),
        min_tokens=MIN_TOKENS,
        min_tokens_hold_back=STOP_TOKENS,
    )


@pytest.mark.matrix(1, full=1)
@pytest.mark.parametrize("num_stages", LAYERS)
async def test_tokens_are_the_same_alone_and_batched_on_any_number_of_stages(
    llama: Path, solo: list[Tokens], num_stages: int
) -> None:
    async with Cluster(llama, layers=LAYERS[num_stages], max_kv_tokens=4096) as cluster:
        assert (await CASES[2].run(cluster)).tokens == solo[2]
        again = await CASES[2].run(cluster)
        assert again.tokens == solo[2]
        assert [choice.cached_tokens for choice in again.choices.values()] == [16] * 3
        async with cluster.generating(mixed_cases(16, max_tokens=32)) as others:
            await until(lambda: all(answer.tokens for answer in others))
            assert tokens_of(await run_all(cluster)) == solo
        assert all(answer.succeeded for answer in others)
        await cluster.wait_drained()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_choices", [1, 2, 5])
async def test_a_choice_does_not_depend_on_the_number_of_choices(
    llama: Path, solo: list[Tokens], num_choices: int
) -> None:
    async with Cluster(llama, layers=LAYERS[2]) as cluster:
        answers = await run_all(cluster, n=num_choices)
        await cluster.wait_drained()
    most = min(num_choices, 3)
    assert [outputs.tokens[:most] for outputs in answers] == [case[:most] for case in solo]


@pytest.mark.matrix(0, full=2)
@pytest.mark.parametrize(
    ("num_stages", "chunk"),
    [
        (2, 8),
        (3, 16),
        (1, 8),
        (3, 128),
        (5, 8),
        (5, 256),
    ],
)
async def test_tokens_are_the_same_in_small_and_large_chunks(
    llama: Path, solo: list[Tokens], num_stages: int, chunk: int
) -> None:
    async with Cluster(llama, layers=LAYERS[num_stages], max_step_tokens=chunk) as cluster:
        assert tokens_of(await run_all(cluster)) == solo


@pytest.mark.full
@pytest.mark.parametrize("block_size", [4, 32])
async def test_tokens_are_the_same_in_small_and_large_blocks(
    llama: Path, solo: list[Tokens], block_size: int
) -> None:
    async with Cluster(llama, layers=LAYERS[2], block_size=block_size, max_kv_tokens=1024) as cluster:
        assert tokens_of(await run_all(cluster)) == solo
        assert tokens_of(await run_all(cluster)) == solo


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_stages", [1, 3])
async def test_tokens_are_the_same_after_preemptions(
    llama: Path, solo: list[Tokens], num_stages: int
) -> None:
    async with Cluster(llama, layers=LAYERS[num_stages], max_kv_tokens=120) as cluster:
        answers = await run_all(cluster)
        await cluster.wait_drained()
    assert tokens_of(answers) == solo
    assert restarts(answers) > 3


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_tokens_are_the_same_after_a_worker_loss_while_decoding(
    llama: Path, solo: list[Tokens], stage: int
) -> None:
    async with Cluster(llama, layers=LAYERS[3], max_kv_tokens=2048) as cluster:
        answers = [Outputs() for _ in CASES]
        async with asyncio.TaskGroup() as tasks:
            for case, outputs in zip(CASES, answers, strict=True):
                tasks.create_task(case.run(cluster, outputs))
            await until(lambda: all(len(outputs.choices[2].tokens) > 4 for outputs in answers))
            await cluster.workers[f"w{stage}"].stop()
            await cluster.start_worker(f"w{stage}")
        await cluster.wait_drained()
    assert tokens_of(answers) == solo
    assert restarts(answers) > 3


@pytest.mark.full
async def test_greedy_tokens_with_penalties_are_the_same(llama: Path) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "n": 1, "top_k": 0}
    async with Cluster(llama, layers=LAYERS[1], max_step_tokens=256) as cluster:
        alone = [(await case.run(cluster, **greedy)).tokens for case in CASES]
    async with Cluster(llama, layers=LAYERS[3], max_step_tokens=16, max_kv_tokens=128) as cluster:
        crowded = await run_all(cluster, [*CASES, *CASES], **greedy)
        await cluster.wait_drained()
    assert tokens_of(crowded) == alone * 2
    assert restarts(crowded) > 0
