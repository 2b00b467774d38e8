"""Prefix sharing: in flight, inside one step, within one salt; never by hash alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvcache.hashing
from kvcache.pages import KvPages
from tests.checkpoints import make_checkpoint
from tests.local_pipeline import LocalPipeline, Request, Run
from wire.steps import Step

BLOCK_SIZE = 16
NUM_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", num_layers=3, seed=9, initializer_range=0.3
    )


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (num_tokens,), generator=generator).tolist()


def request(prompt: list[int], *, cache_salt: str = "", arrives_at: int = 0) -> Request:
    return Request(prompt=prompt, max_tokens=NUM_NEW_TOKENS, cache_salt=cache_salt, arrives_at=arrives_at)


def new_pipeline(directory: Path, *, chunk: int = 64) -> LocalPipeline:
    return LocalPipeline(directory, (1, 1, 1), block_size=BLOCK_SIZE, max_step_tokens=chunk)


def alone(directory: Path, prompt: list[int]) -> list[int]:
    pipeline = LocalPipeline(directory, (3,), max_step_tokens=256, prefix_caching=False)
    return pipeline.serve([request(prompt)]).tokens[0]


Seen = dict[int, list[tuple[int, int]]]


def slices_of(pipeline: LocalPipeline, requests: list[Request]) -> tuple[Run, Seen]:
    """The run, and (step, first position) of every slice per sequence."""
    seen: Seen = {index: [] for index in range(len(requests))}

    def note(step: Step, run: Run) -> None:
        owners = {sequence.key: index for index, sequence in enumerate(run.sequences)}
        for step_slice in step.slices:
            seen[owners[step_slice.sequence]].append((step.step_id, step_slice.first_position))

    pipeline.on_step = note
    return pipeline.serve(requests), seen


def test_a_prompt_shares_blocks_computed_earlier_in_the_same_step(llama: Path) -> None:
    prompt = random_tokens(3 * BLOCK_SIZE, seed=1)
    longer = [*prompt, *random_tokens(5, seed=2)]
    run, seen = slices_of(new_pipeline(llama), [request(prompt), request(prompt), request(longer)])
    assert [slices[0] for slices in seen.values()] == [(0, 0), (0, 47), (0, 48)]
    assert run.tokens == [alone(llama, prompt), alone(llama, prompt), alone(llama, longer)]
    assert [sequence.num_cached_tokens for sequence in run.sequences] == [0, 47, 48]


def test_sharing_inside_a_step_needs_keys_written_before_attention(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With writes after the attention, the sharing sequence reads unwritten pages."""
    write, seen = KvPages.write, []

    def late(pages: KvPages, layer: int, tokens: torch.Tensor, slots: torch.Tensor, *rest: Any) -> None:
        if slots.numel() > 1:
            seen.append(layer)
        else:
            write(pages, layer, tokens, slots, *rest)

    prompt = random_tokens(3 * BLOCK_SIZE, seed=1)
    monkeypatch.setattr(KvPages, "write", late)
    run = new_pipeline(llama).serve([request(prompt), request(prompt)])
    assert seen
    assert run.tokens[1] != alone(llama, prompt)


def test_a_prompt_shares_blocks_of_steps_in_flight(llama: Path) -> None:
    prompt = random_tokens(5 * BLOCK_SIZE + 3, seed=3)
    run, seen = slices_of(new_pipeline(llama, chunk=2 * BLOCK_SIZE), [request(prompt), request(prompt)])
    # Chunks of 32, 32 and 19 tokens; the second prompt arrives with the third chunk, before any result.
    assert seen[0][:3] == [(0, 0), (1, 32), (2, 64)]
    assert seen[1][0] == (2, 80)
    assert run.tokens == [alone(llama, prompt)] * 2


def test_requests_share_blocks_only_within_the_same_salt(llama: Path) -> None:
    prompt = random_tokens(4 * BLOCK_SIZE, seed=4)
    salts = ["", "tenant a", "tenant b", "tenant a", ""]
    run = new_pipeline(llama).serve(
        [request(prompt, cache_salt=salt, arrives_at=30 * i) for i, salt in enumerate(salts)]
    )
    assert [sequence.num_cached_tokens for sequence in run.sequences] == [0, 0, 0, 63, 63]
    assert run.tokens == [alone(llama, prompt)] * 5


def test_prompts_with_colliding_hashes_never_share_blocks(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_tokens(3 * BLOCK_SIZE + 2, seed=seed) for seed in (5, 6, 7)]
    expected = [alone(llama, prompt) for prompt in prompts]
    assert expected[0] != expected[1] != expected[2]
    monkeypatch.setattr(kvcache.hashing, "packed_block_hash", lambda packed, salt: len(packed))
    together = new_pipeline(llama).serve([request(prompt) for prompt in prompts])
    assert together.tokens == expected
    assert together.scheduler.counts.num_cached_tokens == 0
    apart = [request(prompt, arrives_at=40 * i) for i, prompt in enumerate([*prompts, prompts[0]])]
    run = new_pipeline(llama).serve(apart)
    assert run.tokens == [*expected, expected[0]]
    # The first prompt's blocks kept the hash; only the first prompt hits them.
    assert [sequence.num_cached_tokens for sequence in run.sequences] == [0, 0, 0, 48]
