"""Kernels of attention to chosen blocks, in the sizes of Qwen3.8-Flash-Next, compute what a CPU computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoint import Norm, RopeConfig
from checkpoint.block_indexer import BlockIndexer
from checkpoint.blueprint import NormKind
from stage_worker.model.block_work import BlockChoices, block_choices
from stage_worker.model.decode_rows import DecodeRows
from stage_worker.model.indexer import IndexQueries, chosen_tokens
from stage_worker.model.kernels import BY_TRITON, load_triton
from stage_worker.model.norms import NormWeights, row_norm
from stage_worker.model.operations import operations
from stage_worker.model.rope import Rope, rotate_
from stage_worker.validation import SliceLayout

pytestmark = pytest.mark.gpu

INDEXER = BlockIndexer(num_heads=4, head_dim=128, block_size=4, top_blocks=512, norm_eps=1e-6)
PAGE, HEADS, KV_HEADS, WIDTH = 16, 24, 2, 256
LENGTHS = (7, 2051, 2052, 9001, 140_002)
"""Tokens of decodes: up to two levels of a choice."""


@pytest.fixture
def gpu(prepared: torch.device) -> torch.device:
    if prepared.type == "cpu":
        pytest.skip("Triton kernels need a GPU; `make test-kernels` interprets them")
    return prepared


def choices_on(device: torch.device) -> tuple[BlockChoices, list[tuple[int, ...]]]:
    """The work of decodes in one group, and the pages of each, in any order."""
    counts = [-(-length // PAGE) for length in LENGTHS]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [tuple(order.pop() for _ in range(count)) for count in counts]
    decodes = DecodeRows.of(
        [
            SliceLayout(first_position=length - 1, num_tokens=1, pages=table)
            for length, table in zip(LENGTHS, tables, strict=True)
        ]
    )
    rows = np.arange(len(LENGTHS))
    found = block_choices(decodes, rows, (), (), indexer=INDEXER, block_size=PAGE)
    made = found.make(lambda array: torch.from_numpy(array).to(device))
    assert len(made.groups) == 1
    return made, tables


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_keys_of_blocks_are_those_of_a_cpu(gpu: torch.device) -> None:
    """bfloat16: to 2 % of the largest, for means that are rounded the other way."""
    work, tables = choices_on(gpu)
    pages = random(sum(map(len, tables)), PAGE, 128, seed=2)
    norm, weight = Norm(kind=NormKind.RMS_OFFSET, eps=INDEXER.norm_eps), random(128, seed=3) * 0.1
    positions = torch.arange(0, max(LENGTHS), INDEXER.block_size)
    rope = Rope(RopeConfig(theta=1e7, width=64), 128, torch.bfloat16, torch.device("cpu"))
    cos, sin = rope.cos_sin(positions, end=max(LENGTHS))
    given = operations(BY_TRITON).norm(norm, NormWeights(weight.to(gpu), None))
    kernels = load_triton("block_keys")
    found = kernels.block_keys(pages.to(gpu), work.blocks, 4, given, cos.to(gpu), sin.to(gpu)).cpu()
    for (_, num_blocks, place), table in zip(work.blocks.sequences.tolist(), tables, strict=True):
        own = pages[list(table)].flatten(0, 1)[: num_blocks * 4].view(num_blocks, 4, 128)
        expected = row_norm(norm, NormWeights(weight, None))(own.float().mean(1).bfloat16())
        rotate_(expected, cos[:num_blocks, 0], sin[:num_blocks, 0])
        difference = found[place : place + num_blocks].float() - expected.float()
        assert float(difference.abs().max() / expected.float().abs().max()) < 0.02


def test_choices_are_those_of_a_cpu_and_attended_to(gpu: torch.device) -> None:
    """Scores to 1e-5 of the largest, choices of the same scores exactly, and bfloat16 outputs to 1 %."""
    work, tables = choices_on(gpu)
    (group,), kernels = work.groups, load_triton("choices")
    queries, keys = random(len(LENGTHS), 4, 128, seed=4), random(work.blocks.num_blocks, 128, seed=5)
    scores = kernels.score(queries.to(gpu), None, group, keys.to(gpu)[:, None], ratio=4)
    chosen = kernels.choose(scores, group, INDEXER.top_blocks, has_last=True)
    query = random(len(LENGTHS), HEADS, WIDTH, seed=6)
    pages = random(sum(map(len, tables)), 2, KV_HEADS, PAGE, WIDTH, seed=7)
    output = torch.empty_like(query, device=gpu)
    load_triton("attention").attend(
        *(query.to(gpu), output, group.attention, pages.to(gpu)), scale=0.0625, chosen=chosen, unit=4
    )
    for row, (place, num_blocks) in enumerate(group.rows.tolist()):
        own = scores[place : place + num_blocks].cpu()
        expected = torch.arange(num_blocks, dtype=torch.int32)
        if num_blocks > INDEXER.top_blocks:
            first = int(work.blocks.sequences[row, 2])
            one = IndexQueries(queries[row : row + 1].float(), torch.ones(1, 4))
            of_cpu = one.scores(keys[None, first : first + num_blocks])[0]
            assert float((own - of_cpu).abs().max() / of_cpu.abs().max()) < 1e-5
            expected = chosen_tokens(own[None].clone(), INDEXER.top_blocks, ())[0]
        blocks = torch.cat((expected, torch.tensor([num_blocks], dtype=torch.int32)))
        assert torch.equal(chosen[row, : len(blocks)].cpu(), blocks)
        tokens = (blocks.long()[:, None] * 4 + torch.arange(4)).flatten()
        seen = pages[list(tables[row])].permute(0, 3, 1, 2, 4).flatten(0, 1)
        seen = seen[tokens[tokens < LENGTHS[row]]].float()
        heads = seen.repeat_interleave(HEADS // KV_HEADS, dim=2)
        weights = torch.einsum("hd,shd->hs", query[row].float(), heads[:, 0]).mul(0.0625).softmax(-1)
        mixed = torch.einsum("hs,shd->hd", weights, heads[:, 1])
        assert float((output[row].cpu().float() - mixed).abs().max() / mixed.abs().max()) < 0.01
