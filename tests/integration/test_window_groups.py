"""A model with full and sliding attention: blocks per window, and the tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache import KvWindow
from kvcache.pages import KvPages
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import load_reference, make_checkpoint
from tests.families import make_family
from tests.integration.cluster import Cluster, RequestCase
from tests.integration.test_cluster_recovery import until_tokens
from tests.integration.test_sliding_window import prompt_of
from tests.local_pipeline import LocalPipeline, Request, Run
from wire.steps import Step

pytestmark = pytest.mark.full

WINDOW, BLOCK_SIZE, CHUNK = 20, 8, 24
NUM_LAYERS = 5
CUTS = [(5,), (2, 3), (1, 1, 3), (1, 1, 1, 1, 1)]
"""Layers 1 and 4 have full attention, so some stages have windowed layers only."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["full_attention" if layer in (1, 4) else "sliding_attention" for layer in range(NUM_LAYERS)]
    return make_checkpoint(
        tmp_path_factory.mktemp("mixed"),
        "qwen2",
        num_layers=NUM_LAYERS,
        seed=6,
        initializer_range=0.3,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=0,
        layer_types=kinds,
    )


def expected_tokens(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    model = load_reference(directory)
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def new_pipeline(
    directory: Path, layers: tuple[int, ...] = (2, 3), *, num_blocks: int = 90, num_windowed: int = 40
) -> LocalPipeline:
    return LocalPipeline(
        directory,
        layers,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        other_num_blocks=(num_windowed,),
        max_step_tokens=CHUNK,
    )


class Watch:
    """Most blocks that a sequence held in each group."""

    def __init__(self) -> None:
        self.most_held = [0, 0]

    def __call__(self, step: Step, run: Run) -> None:
        for sequence in run.scheduler.running:
            for group, part in enumerate(sequence.kv.groups):
                self.most_held[group] = max(self.most_held[group], len(part.held_blocks))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("layers", CUTS)
def test_tokens_equal_those_of_transformers_at_every_cut(mixed: Path, layers: tuple[int, ...]) -> None:
    prompts = [prompt_of(150, 1), prompt_of(WINDOW + 1, 2), prompt_of(3, 3)]
    pipeline = new_pipeline(mixed, layers)
    pipeline.on_step = watch = Watch()
    tokens = pipeline.generate(prompts, max_tokens=40)
    assert tokens == [expected_tokens(mixed, prompt, 40) for prompt in prompts]
    # 189 tokens are computed. The windowed bound is 7, for chunks that begin within a block.
    assert KvWindow(WINDOW, CHUNK).num_blocks(BLOCK_SIZE) == 7
    assert watch.most_held == [24, 6]


def test_a_hit_begins_at_the_window_although_the_head_was_evicted(mixed: Path) -> None:
    prompt = prompt_of(200, 21)
    pipeline = new_pipeline(mixed, num_windowed=12)
    others = [Request(prompt=prompt_of(20, seed), max_tokens=4, arrives_at=20) for seed in (22, 23)]
    again = Request(prompt=prompt, max_tokens=20, arrives_at=60)
    run = pipeline.serve([Request(prompt=prompt, max_tokens=20), *others, again])
    assert run.tokens[0] == run.tokens[3] == expected_tokens(mixed, prompt, 20)
    assert run.sequences[3].num_cached_tokens == 199


@pytest.mark.full
@pytest.mark.parametrize(("num_blocks", "num_windowed"), [(30, 40), (90, 9)])
def test_either_group_may_run_short(mixed: Path, num_blocks: int, num_windowed: int) -> None:
    """Sequences are preempted for blocks of one group only; their tokens stay the same."""
    requests = [Request(prompt=prompt_of(seed, seed), max_tokens=60) for seed in range(3, 9)]
    expected = new_pipeline(mixed).serve(requests).tokens
    pipeline = new_pipeline(mixed, num_blocks=num_blocks, num_windowed=num_windowed)
    run = pipeline.serve(requests)
    assert run.tokens == expected
    assert run.scheduler.counts.num_preemptions > 0


async def test_a_cluster_plans_and_serves_both_groups(mixed: Path) -> None:
    prompt = prompt_of(100, 7)
    async with Cluster(
        mixed,
        layers=(1, 4),
        block_size=BLOCK_SIZE,
        max_step_tokens=CHUNK,
        max_step_sequences=2,
        max_kv_tokens=512,
    ) as cluster:
        status = await cluster.client.status()
        assert status.num_blocks == 64
        held = 3 * 2 * KvWindow(WINDOW, CHUNK).num_blocks(BLOCK_SIZE)
        assert list(status.window_blocks) == [cluster_pb2.WindowBlocks(window=WINDOW, num_blocks=held)]
        (completion,) = await cluster.client.complete(prompt, max_tokens=20, ignore_eos=True)
        assert list(completion.token_ids) == expected_tokens(mixed, prompt, 20)


@pytest.mark.full
@pytest.mark.parametrize("lost", ["w0", "w1"])
async def test_tokens_are_the_same_after_the_loss_of_a_worker(mixed: Path, lost: str) -> None:
    """The worker is lost when windowed layers have released blocks; their tokens are computed again.

    Then a prompt is sent again: its blocks of both groups are those of the new epoch.
    """
    lengths = (45, 70, 3)
    cases = [RequestCase(prompt=tuple(prompt_of(length, length)), max_tokens=60) for length in lengths]
    expected = [expected_tokens(mixed, list(case.prompt), 60) for case in cases]
    async with Cluster(
        mixed,
        layers=(1, 4),
        block_size=BLOCK_SIZE,
        max_step_tokens=CHUNK,
        max_step_sequences=2,
        max_kv_tokens=512,
    ) as cluster:
        epoch, planned = cluster.epoch, (await cluster.client.status()).window_blocks[0].num_blocks
        async with cluster.generating(cases) as answers:
            await until_tokens(answers, WINDOW + BLOCK_SIZE)
            await cluster.workers[lost].stop()
            await cluster.start_worker(lost)
        assert [answer.error for answer in answers] == [None] * len(cases)
        assert [answer.tokens for answer in answers] == expected
        assert cluster.epoch > epoch
        (again,) = await cluster.client.complete(list(cases[1].prompt), max_tokens=60, ignore_eos=True)
        assert list(again.token_ids) == expected[1]
        status = await cluster.wait_drained()
        assert status.requests.cached_tokens > 0
        assert status.window_blocks[0].num_blocks == planned


async def test_a_cluster_serves_and_checks_groups_whose_pages_have_other_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4: windowed layers have 2 KV heads of 16 elements, layers with full attention 1 of 32."""
    made: list[KvPages] = []
    new = KvPages.__init__

    def recorded(pages: KvPages, **sizes: Any) -> None:
        new(pages, **sizes)
        made.append(pages)

    monkeypatch.setattr(KvPages, "__init__", recorded)
    directory = make_family(tmp_path / "model", "gemma4_text", global_head_dim=64)
    prompt = prompt_of(60, 8)
    async with Cluster(
        directory, layers=(1, 4), block_size=BLOCK_SIZE, max_step_tokens=CHUNK, self_check=True
    ) as cluster:
        (completion,) = await cluster.client.complete(prompt, max_tokens=20, ignore_eos=True)
        assert list(completion.token_ids) == expected_tokens(directory, prompt, 20)
        status = await cluster.client.status()
        planned = {worker.name: worker.kv_bytes for worker in status.workers}
    block = {(2, 16): 2 * 2 * 16 * BLOCK_SIZE * 4, (1, 64): 2 * 1 * 64 * BLOCK_SIZE * 4}
    windowed, full = (
        status.window_blocks[0].num_blocks * block[2, 16],
        status.num_blocks * block[1, 64],
    )
    assert planned == {"w0": windowed, "w1": windowed + 3 * full}
    shapes = [(pages.num_kv_heads, pages.head_dim, pages.num_layers) for pages in made]
    assert sorted(shapes) == [(1, 64, 3), (2, 16, 1), (2, 16, 1)]
    assert sum(pages.size_bytes for pages in made) == sum(planned.values())
