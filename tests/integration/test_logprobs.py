"""Log-probabilities of prompts and of generated tokens equal transformers', wherever the layers and the
chunks are cut and whatever fails meanwhile; each is returned once.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.scheduler.cost_model import CostModel
from stageline.client.errors import ServerError
from stageline.client.output import TokenLogprobs
from tests.checkpoints import make_checkpoint
from tests.integration.calls import until
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.gate import Gate
from tests.integration.logprob_reference import LogprobReference
from tests.integration.outputs import ChoiceOutput, Outputs
from tests.integration.request_cases import mixed_cases
from tests.repository import STORIES260K
from wire.frames import Frame
from wire.steps import Prefill

BLOCK_SIZE = 8
POISON = 127
LAYERS = {1: (4,), 2: (1, 3), 4: (1, 1, 1, 1)}
CUTS = [
    pytest.param(
        num_stages,
        chunk,
        id=f"{num_stages}-stages-chunks-of-{chunk}",
        marks=() if (num_stages, chunk) in ((1, 64), (2, 16), (4, 8)) else pytest.mark.full,
    )
    for num_stages in LAYERS
    for chunk in (8, 16, 64)
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, wide enough that tokens vary and narrow enough that several of them are likely."""
    directory = tmp_path_factory.mktemp("logprobs") / "model"
    return make_checkpoint(directory, "llama", num_layers=4, initializer_range=0.2)


@pytest.fixture(scope="module")
def reference(llama: Path) -> LogprobReference:
    return LogprobReference(llama)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, POISON, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request and the check of its outputs."""

    prompt: list[int]
    max_tokens: int = 12
    logprobs: int | None = 5
    prompt_logprobs: int | None = 5
    options: dict[str, Any]

    async def run(self, cluster: Cluster, into: Outputs | None = None) -> Outputs:
        outputs = cluster.client.generate(
            self.prompt,
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            timeout_s=DEADLINE_S,
            **self.options,
        )
        return await (into or Outputs()).take(outputs)

    def check(self, outputs: Outputs, reference: LogprobReference) -> None:
        """Assert that the outputs have exactly the requested log-probabilities."""
        for choice in outputs.choices.values():
            assert len(choice.tokens) == self.max_tokens
            assert choice.finish_reason == "length"
            self._check_generated(choice, reference)
        if self.prompt_logprobs is None:
            assert not outputs.prompt_logprobs
        else:
            reference.check(outputs.prompt_logprobs, self.prompt, first=0, num_top=self.prompt_logprobs)

    def _check_generated(self, choice: ChoiceOutput, reference: LogprobReference) -> None:
        if self.logprobs is None:
            assert not choice.logprobs
            return
        tokens = [*self.prompt, *choice.tokens]
        reference.check(choice.logprobs, tokens, first=len(self.prompt), num_top=self.logprobs)


def call_of(prompt: Sequence[int], **more: Any) -> Call:
    """Build a Call from its fields, with other keywords as request options; a seed implies sampling."""
    fields = {name: more.pop(name) for name in ("max_tokens", "logprobs", "prompt_logprobs") if name in more}
    if "seed" in more:
        more.setdefault("temperature", 1.0)
    return Call(prompt=list(prompt), options=more, **fields)


async def run_all(cluster: Cluster, calls: Sequence[Call]) -> list[Outputs]:
    """Run all calls concurrently."""
    return await asyncio.gather(*(call.run(cluster) for call in calls))


def assert_close(some: Sequence[TokenLogprobs], others: Sequence[TokenLogprobs]) -> None:
    """Assert equal log-probabilities up to the summation order."""
    assert [(token.token_id, token.rank) for token in some] == [
        (token.token_id, token.rank) for token in others
    ]
    numbers = [[token.logprob or 0.0 for token in side] for side in (some, others)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0, abs=1e-5)


@pytest.mark.matrix(1, full=3)
@pytest.mark.parametrize(("num_stages", "chunk"), CUTS)
async def test_every_cut_reports_the_log_probabilities_of_transformers(
    llama: Path, reference: LogprobReference, num_stages: int, chunk: int
) -> None:
    lengths = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * chunk + 5)
    prompts = [prompt_of(length, seed=length) for length in lengths]
    calls = [
        *(call_of(prompt) for prompt in prompts),
        *(call_of(prompt, seed=index) for index, prompt in enumerate(prompts)),
    ]
    async with Cluster(
        llama,
        layers=LAYERS[num_stages],
        max_step_tokens=chunk,
        block_size=BLOCK_SIZE,
        max_kv_tokens=4096,
    ) as cluster:
        for call, outputs in zip(calls, await run_all(cluster, calls), strict=True):
            call.check(outputs, reference)
            assert outputs.only.cached_tokens == 0
        await cluster.wait_drained()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("layers", [(5,), (1, 2, 2)], ids=["1-stage", "3-stages"])
async def test_a_trained_model_reports_the_log_probabilities_of_transformers(layers: tuple[int, ...]) -> None:
    expected = json.loads((STORIES260K / "expected.json").read_text())
    # Part of the known story as a prompt of several chunks.
    prompt = [*expected["prompt_token_ids"], *expected["generated_token_ids"][:100]]
    reference = LogprobReference(STORIES260K)
    calls = [
        call_of(expected["prompt_token_ids"], max_tokens=40),
        call_of(prompt, max_tokens=24),
        call_of(prompt, max_tokens=24, seed=5, top_p=0.9),
    ]
    async with Cluster(STORIES260K, layers=layers, max_step_tokens=32) as cluster:
        answers = await run_all(cluster, calls)
    for call, outputs in zip(calls, answers, strict=True):
        call.check(outputs, reference)
    assert answers[0].only.tokens == expected["generated_token_ids"][:40]


async def test_penalties_and_filters_change_no_log_probability(
    llama: Path, reference: LogprobReference
) -> None:
    call = call_of(
        prompt_of(20),
        seed=2,
        temperature=2.0,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias={3: 4.0},
        bad_word_ids=[[5], [3, 3]],
    )
    async with Cluster(llama, layers=LAYERS[2]) as cluster:
        outputs = await call.run(cluster)
    call.check(outputs, reference)
    assert any(token.rank > 1 for token in outputs.only.logprobs), "these are the model's most likely tokens"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("length", [1, 2, 3 * 16 + 5])
async def test_an_echo_without_new_tokens_scores_the_prompt(
    llama: Path, reference: LogprobReference, length: int
) -> None:
    prompt = prompt_of(length)
    async with Cluster(llama, layers=LAYERS[2], max_step_tokens=16) as cluster:
        scored = await call_of(prompt, logprobs=None, max_tokens=0).run(cluster)
        echoed = await call_of(prompt, prompt_logprobs=None, max_tokens=0, echo=True).run(cluster)
        both = await call_of(prompt, logprobs=3, prompt_logprobs=5, max_tokens=4, echo=True).run(cluster)
        await cluster.wait_drained()
    assert scored.only.tokens == []
    assert scored.only.logprobs == []
    reference.check(scored.prompt_logprobs, prompt, first=0, num_top=5)
    assert echoed.only.tokens == prompt
    assert not echoed.prompt_logprobs
    reference.check(echoed.only.logprobs, prompt, first=0, num_top=5)
    assert_close(echoed.only.logprobs, scored.prompt_logprobs)
    assert both.only.tokens[:length] == prompt
    assert len(both.only.tokens) == length + 4
    reference.check(both.only.logprobs, both.only.tokens, first=0, num_top=3)
    reference.check(both.prompt_logprobs, prompt, first=0, num_top=5)
    assert [outputs.only.cached_tokens for outputs in (scored, echoed, both)] == [0, 0, 0]


async def test_scoring_neither_reads_nor_damages_the_cache(llama: Path, reference: LogprobReference) -> None:
    prompt = prompt_of(4 * BLOCK_SIZE + 3)
    plain = call_of(prompt, logprobs=5, prompt_logprobs=None)
    async with Cluster(llama, layers=LAYERS[2], max_step_tokens=16) as cluster:
        assert (await plain.run(cluster)).only.cached_tokens == 0
        again = await plain.run(cluster)
        assert again.only.cached_tokens == 4 * BLOCK_SIZE, "the prompt is cached"
        scored = await call_of(prompt).run(cluster)
        call_of(prompt).check(scored, reference)
        assert scored.only.cached_tokens == 0
        after = await plain.run(cluster)
        assert after.only.cached_tokens == 4 * BLOCK_SIZE
        plain.check(after, reference)
        await cluster.wait_drained()


async def test_choices_of_a_scored_prompt_share_one_score(llama: Path, reference: LogprobReference) -> None:
    calls = [call_of(prompt_of(length), seed=4, n=2) for length in (1, 2 * BLOCK_SIZE, 37)]
    echo = call_of(prompt_of(21), seed=4, n=3, echo=True, prompt_logprobs=None, max_tokens=6)
    async with Cluster(llama, layers=LAYERS[2], max_step_tokens=16) as cluster:
        answers = await run_all(cluster, calls)
        echoed = await echo.run(cluster)
        await cluster.wait_drained()
    for call, outputs in zip(calls, answers, strict=True):
        assert len(outputs.choices) == 2
        call.check(outputs, reference)
    assert len(set(map(tuple, answers[2].tokens))) == 2
    assert len(echoed.choices) == 3
    assert [echoed.choices[index].cached_tokens for index in range(3)] == [0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE]
    for choice in echoed.choices.values():
        assert len(choice.tokens) == 21 + 6
        reference.check(choice.logprobs, choice.tokens, first=0, num_top=5)


@pytest.mark.full
async def test_log_probabilities_are_returned_only_where_requested(
    llama: Path, reference: LogprobReference
) -> None:
    requested: list[tuple[int | None, int | None]] = [
        (None, None), (0, None), (5, None), (None, 0), (None, 2), (20, 20), (1, 7), (0, 0),
    ]  # fmt: skip
    calls = [
        call_of(prompt_of(3 + 9 * index, seed=index), logprobs=own, prompt_logprobs=of_prompt, seed=index)
        for index, (own, of_prompt) in enumerate(requested * 2)
    ]
    async with Cluster(llama, layers=LAYERS[4], max_step_tokens=32, max_kv_tokens=4096) as cluster:
        for call, outputs in zip(calls, await run_all(cluster, calls), strict=True):
            call.check(outputs, reference)
        await cluster.wait_drained()


@pytest.mark.full
async def test_preempted_requests_report_each_log_probability_once(
    llama: Path, reference: LogprobReference
) -> None:
    calls = [call_of(prompt_of(20 + 5 * index, seed=index), max_tokens=40, seed=index) for index in range(8)]
    async with Cluster(llama, layers=LAYERS[2], max_step_tokens=8, max_kv_tokens=128) as cluster:
        answers = await run_all(cluster, calls)
        await cluster.wait_drained()
    for call, outputs in zip(calls, answers, strict=True):
        call.check(outputs, reference)
    assert sum(outputs.only.restarts for outputs in answers) > 2


def reaches(position: int, frame: Frame) -> bool:
    """Whether the frame has a prefill from `position` or later."""
    steps = [step_slice.inference_step for step_slice in frame.step.slices]
    return any(isinstance(step, Prefill) and step.start >= position for step in steps)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_worker_loss_during_prefill_leaves_no_gap(
    llama: Path, reference: LogprobReference, stage: int
) -> None:
    scored = call_of(prompt_of(150), max_tokens=8)
    echoed = call_of(prompt_of(12, seed=1), max_tokens=40, seed=3, echo=True, prompt_logprobs=None)
    first, second = Outputs(), Outputs()
    async with Cluster(llama, layers=LAYERS[2], max_step_tokens=16, hop_proxies=[0]) as cluster:
        gate = Gate(cluster, stops=lambda frame: reaches(80, frame))
        gate.close()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(scored.run(cluster, first))
            tasks.create_task(echoed.run(cluster, second))
            await gate.wait_quiet()
            await until(lambda: len(first.prompt_logprobs) > 40)
            assert len(first.prompt_logprobs) < 150
            assert not first.choices[0].tokens
            await cluster.workers[f"w{stage}"].stop()
            gate.open()
            await cluster.start_worker(f"w{stage}")
        await cluster.wait_drained()
    scored.check(first, reference)
    assert first.only.restarts >= 1
    assert len(second.only.tokens) == 12 + 40
    reference.check(second.only.logprobs, second.only.tokens, first=0, num_top=5)


async def test_other_chunk_boundaries_after_a_restart_repeat_nothing(
    llama: Path, reference: LogprobReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks begin at 0, 16, 32, ... before the restart; at 0, 8, 24, ... after it."""
    # Measured times of a busy machine would choose smaller chunks.
    monkeypatch.setattr(CostModel, "observe", lambda *measured: None)
    scored = call_of(prompt_of(150), max_tokens=4)
    ahead = call_of(prompt_of(8, seed=1), max_tokens=1, logprobs=None, prompt_logprobs=None, priority="high")
    outputs = Outputs()
    async with Cluster(llama, layers=LAYERS[2], max_step_tokens=16, hop_proxies=[0]) as cluster:
        gate = Gate(cluster, stops=lambda frame: reaches(80, frame))
        gate.close()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(scored.run(cluster, outputs))
            await gate.wait_quiet()
            await until(lambda: len(outputs.prompt_logprobs) == 81)
            tasks.create_task(ahead.run(cluster))
            await cluster.wait_status(lambda status: status.requests.prefill + status.requests.waiting == 2)
            cluster.server.controller.fail_epoch(cluster.epoch, "made up")
            gate.open()
        await cluster.wait_drained()
        starts = {
            step_slice.first_position
            for step in cluster.proxy(0).steps.values()
            for step_slice in step.slices
        }
    assert {24, 72} <= starts
    scored.check(outputs, reference)


async def test_non_finite_scores_fail_only_their_request_with_the_position(llama: Path) -> None:
    directory = llama.parent / "poisoned"
    make_checkpoint(directory, "llama", num_layers=4, initializer_range=0.2)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    tensors["lm_head.weight"][POISON] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})
    poisoned = prompt_of(40)
    poisoned[25] = POISON
    bad, fine = call_of(poisoned), call_of(prompt_of(30, seed=1), prompt_logprobs=None)
    async with Cluster(directory, layers=LAYERS[2], max_step_tokens=16) as cluster:
        epoch = cluster.epoch
        async with cluster.generating(mixed_cases(3, tokens_below=POISON)) as others:
            with pytest.raises(ServerError) as caught:
                await bad.run(cluster)
            await fine.run(cluster)
        assert all(answer.succeeded for answer in others)
        assert cluster.epoch == epoch
        await cluster.wait_drained()
    assert caught.value.code == "INTERNAL"
    assert re.match(r"stage 1, step \d+: logits", caught.value.message)
    # From the start of its chunk: masked values are multiplied by 0, and NaN times 0 is NaN.
    position = re.search(r"for position (\d+) of", caught.value.message)
    assert position is not None
    assert 17 <= int(position[1]) <= 26
