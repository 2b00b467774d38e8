"""Models with sliding windows in all layers release blocks out of view without changing tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache import KvWindow, group_windows
from kvcache.pages import KvPages
from stageline import InvalidRequest
from tests.checkpoints import make_checkpoint
from tests.integration.cluster import Cluster
from tests.local_pipeline import GREEDY, LocalPipeline, Request, Run
from wire.errors import StepFault, StepFaultKind
from wire.steps import Step

pytestmark = pytest.mark.full

WINDOW, BLOCK_SIZE, CHUNK = 20, 8, 24
NUM_BLOCKS = 40
LAYERS = (1, 2)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistral")
    return make_checkpoint(
        directory, "mistral", num_layers=3, seed=5, initializer_range=0.3, sliding_window=WINDOW
    )


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (num_tokens,), generator=generator).tolist()


def new_pipeline(directory: Path, *, num_blocks: int = NUM_BLOCKS, releases: bool = True) -> LocalPipeline:
    return LocalPipeline(
        directory,
        LAYERS,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_step_tokens=CHUNK,
        releases_window=releases,
    )


LOAD = [
    Request(prompt=prompt_of(200, 1), max_tokens=40),
    Request(prompt=[*prompt_of(200, 1)[:160], *prompt_of(30, 2)], max_tokens=40, arrives_at=9),
    Request(prompt=prompt_of(37, 3), max_tokens=60, sampling=replace(GREEDY, temperature=0.9, seed=4)),
]


class Watch:
    """Maximum number of blocks held per sequence when its steps were sent."""

    def __init__(self) -> None:
        self.most_held: dict[int, int] = {}
        self.most_active = 0

    def __call__(self, step: Step, run: Run) -> None:
        self.most_active = max(self.most_active, run.kv.num_active)
        for sequence in run.scheduler.running:
            held = len(sequence.kv.held_blocks)
            self.most_held[sequence.order.arrival] = max(held, self.most_held.get(sequence.order.arrival, 0))


def test_releasing_blocks_changes_no_token_and_bounds_held_blocks(
    mistral: Path,
) -> None:
    watches, tokens = [], []
    for releases in (True, False):
        pipeline = new_pipeline(mistral, num_blocks=90, releases=releases)
        pipeline.on_step = watch = Watch()
        tokens.append(pipeline.serve(LOAD).tokens)
        watches.append(watch)
    assert tokens[0] == tokens[1]
    assert all(len(set(output)) > 10 for output in tokens[0])
    bound = KvWindow(WINDOW, CHUNK).num_blocks(BLOCK_SIZE)
    assert bound == 7
    assert max(watches[0].most_held.values()) <= bound
    assert max(watches[1].most_held.values()) == 240 // BLOCK_SIZE


def test_the_bound_of_held_blocks_is_tight_for_every_shape() -> None:
    """The block before the first query is held even if the window hides it."""
    for window in range(1, 12):
        for chunk in range(1, 9):
            for block_size in (1, 2, 3, 4):
                held = [
                    (first + chunk - 1) // block_size
                    - max(0, min(first - window + 1, first - 1)) // block_size
                    + 1
                    for first in range(40)
                ]
                assert max(held) == KvWindow(window, chunk).num_blocks(block_size)


def test_released_blocks_serve_other_sequences(mistral: Path) -> None:
    """Two sequences of 30 blocks each run concurrently in a pool of 32."""
    requests = [Request(prompt=prompt_of(200, seed), max_tokens=40) for seed in (11, 12)]
    alone = [new_pipeline(mistral).serve([request]).tokens[0] for request in requests]
    for releases in (True, False):
        pipeline = new_pipeline(mistral, num_blocks=32, releases=releases)
        together = 0

        def count(step: Step, run: Run) -> None:
            nonlocal together
            together += len(step.slices) > 1 or len(run.scheduler.running) > 1

        pipeline.on_step = count
        run = pipeline.serve(requests)
        assert run.tokens == alone
        assert run.scheduler.counts.num_preemptions == 0
        assert (together > 10) == releases


def test_a_hit_on_a_whole_prompt_holds_only_the_blocks_of_the_window(mistral: Path) -> None:
    prompt = prompt_of(200, 21)
    pipeline = new_pipeline(mistral, num_blocks=60)
    held: list[tuple[int, int]] = []

    def watch(step: Step, run: Run) -> None:
        second = run.sequences[1]
        if any(step_slice.sequence == second.key for step_slice in step.slices):
            held.append((len(second.kv.held_blocks), second.kv.num_released_blocks))

    pipeline.on_step = watch
    run = pipeline.serve(
        [Request(prompt=prompt, max_tokens=4), Request(prompt=prompt, max_tokens=4, arrives_at=40)]
    )
    assert run.tokens[0] == run.tokens[1]
    assert run.sequences[1].num_cached_tokens == 199
    # Token 199 sees back to 180, which lies in block 22; block 24 is the last.
    assert held[0] == (3, 22)


def test_stages_reject_a_block_released_too_early(mistral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(self: KvWindow, first_query: int) -> int:
        return max(0, first_query - self.num_tokens + 2)

    def too_early(self: KvWindow, num_released_blocks: int, block_size: int) -> int:
        return (num_released_blocks + 1) * block_size + self.num_tokens - 2

    monkeypatch.setattr(KvWindow, "first_visible", too_late)
    monkeypatch.setattr(KvWindow, "next_release", too_early)
    with pytest.raises(StepFault, match="sees") as caught:
        new_pipeline(mistral).serve(LOAD)
    assert caught.value.kind is StepFaultKind.INTERNAL


@pytest.mark.full
def test_preemption_restarts_from_all_tokens(mistral: Path) -> None:
    requests = [Request(prompt=prompt_of(seed, seed), max_tokens=60) for seed in range(3, 13)]
    alone = [new_pipeline(mistral).serve([request]).tokens[0] for request in requests]
    run = new_pipeline(mistral, num_blocks=17).serve(requests)
    assert run.scheduler.counts.num_preemptions > 0
    assert run.tokens == alone


def test_cached_blocks_after_an_evicted_one_are_not_rewritten(
    mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads are released and evicted first; the following blocks may still be cached."""
    pipeline = new_pipeline(mistral, num_blocks=10)
    written: dict[int, int] = {}
    write, now = KvPages.write, 0

    def count(pages: KvPages, layer: int, tokens: Tensor, slots: Tensor, *rest: Any) -> None:
        written[now] = written.get(now, 0) + slots.numel()
        write(pages, layer, tokens, slots, *rest)

    def note(stage: int, step: Step) -> None:
        nonlocal now
        now = len(step.slices[0].tokens) if step.slices else 0

    monkeypatch.setattr(KvPages, "write", count)
    prompt = prompt_of(80, 41)
    short = [Request(prompt=prompt_of(5, seed), max_tokens=3, arrives_at=20) for seed in range(42, 50)]
    requests = [
        Request(prompt=prompt, max_tokens=1),
        *short,
        Request(prompt=prompt, max_tokens=1, arrives_at=40),
    ]
    pipeline.before_stage = note
    run = pipeline.serve(requests)
    assert run.tokens[0] == run.tokens[-1]
    assert run.sequences[-1].num_cached_tokens == 0
    # Three layers. The first time chunks of 24, 24, 24 and 8 tokens write all 80 slots; the second time only
    # the eight blocks that were evicted are written: all but 7 and 8.
    assert written[24] + written[8] == 3 * (80 + 64)


@pytest.mark.parametrize(
    ("windows", "widest"), [((5, 9, 7), 9), ((5, None, 7), None), ((None,), None), ((4,), 4)]
)
def test_groups_are_the_distinct_windows_in_descending_order(
    windows: tuple[int | None, ...], widest: int | None
) -> None:
    first, *others = group_windows(windows)
    assert first == widest
    assert others == sorted({window for window in windows if window} - {widest}, reverse=True)


@pytest.mark.full
@pytest.mark.parametrize("num_blocks", [5, 7, 16])
def test_sequences_longer_than_the_cache_are_computed_within_their_window(
    mistral: Path, num_blocks: int
) -> None:
    """Sequences hold at most 7 blocks, and 5 suffice: chunks are cut to the free blocks."""
    expected = new_pipeline(mistral, num_blocks=90).serve(LOAD).tokens
    assert KvWindow(WINDOW, CHUNK).min_blocks(BLOCK_SIZE) == 5
    pipeline = new_pipeline(mistral, num_blocks=num_blocks)
    pipeline.on_step = watch = Watch()
    assert pipeline.serve(LOAD).tokens == expected
    assert max(watch.most_held.values()) <= 7
    assert watch.most_active <= num_blocks


async def test_a_cluster_accepts_a_sequence_longer_than_its_cache(mistral: Path) -> None:
    prompt, max_tokens = prompt_of(200, 1), 40
    expected = new_pipeline(mistral, num_blocks=90).generate([prompt], max_tokens=max_tokens)
    async with Cluster(
        mistral, layers=LAYERS, block_size=BLOCK_SIZE, max_step_tokens=CHUNK, max_kv_tokens=16 * BLOCK_SIZE
    ) as cluster:
        model = await cluster.client.model()
        assert model.max_sequence_tokens == 512
        (completion,) = await cluster.client.complete(prompt, max_tokens=max_tokens, ignore_eos=True)
        assert [list(completion.token_ids)] == expected
        with pytest.raises(InvalidRequest, match=r"more than the 512 that fit \(model: 512") as refused:
            await cluster.client.complete(prompt, max_tokens=400)
        assert "KV cache" not in str(refused.value)
