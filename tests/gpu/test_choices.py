"""Kernels of sparse attention, in the sizes of DeepSeek V3.2 and V4, compute what a CPU computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from stage_worker.model.choice_work import ChoiceGroup, choice_groups
from stage_worker.model.decode_rows import DecodeRows
from stage_worker.model.indexer import IndexQueries, chosen_tokens
from stage_worker.model.kernels import load_triton
from stage_worker.validation import SliceLayout

pytestmark = pytest.mark.gpu

TOP_K, BLOCK, HEADS, WIDTH = 2048, 16, 64, 128
LENGTHS = (7, 2048, 2049, 8192, 8193, 20_000, 140_000)
"""Tokens of decodes: up to four levels of a choice."""


@pytest.fixture
def gpu(prepared: torch.device) -> torch.device:
    if prepared.type == "cpu":
        pytest.skip("Triton kernels need a GPU; `make test-kernels` interprets them")
    return prepared


def group_on(device: torch.device, ratio: int = 1) -> tuple[ChoiceGroup, list[tuple[int, ...]]]:
    """The group of decodes that choose units of `ratio` tokens, and the pages of each, in any order."""
    counts = [-(-length // BLOCK) for length in LENGTHS]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = [tuple(order.pop() for _ in range(count)) for count in counts]
    decodes = DecodeRows.of(
        [
            SliceLayout(first_position=length - 1, num_tokens=1, pages=table)
            for length, table in zip(LENGTHS, tables, strict=True)
        ]
    )
    rows = np.arange(len(LENGTHS))
    found = choice_groups(decodes, rows, (), (), top_k=TOP_K, block_size=BLOCK, ratio=ratio)
    (group,) = found.make(lambda array: torch.from_numpy(array).to(device))
    return group, tables


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("are_ties", [True, False], ids=["ties", "random"])
def test_choices_are_those_of_a_cpu(are_ties: bool, ratio: int, gpu: torch.device) -> None:
    group, _ = group_on(gpu, ratio)
    scores = random(group.num_scores, seed=2)
    scores = scores.round() if are_ties else scores
    found = load_triton("choices").choose(scores.to(gpu), group, TOP_K).cpu()
    for row, (place, length) in enumerate(group.rows.tolist()):
        expected = torch.arange(length, dtype=torch.int32)
        if length > TOP_K:
            expected = chosen_tokens(scores[None, place : place + length].clone(), TOP_K, ())[0]
        assert torch.equal(found[row, :length], expected), length


@pytest.mark.parametrize("ratio", [1, 4])
def test_scores_are_those_of_a_cpu(ratio: int, gpu: torch.device) -> None:
    """Products of bfloat16 are exact in float32, sums to 1e-5 of the largest."""
    group, tables = group_on(gpu, ratio)
    queries, weights = (
        random(len(LENGTHS), HEADS, WIDTH, seed=3).bfloat16(),
        random(len(LENGTHS), HEADS, seed=4),
    )
    pages = random(sum(map(len, tables)), BLOCK // ratio, WIDTH, seed=5).bfloat16()
    given = (queries.to(gpu), weights.to(gpu), group, pages.to(gpu))
    found = load_triton("choices").score(*given, ratio=ratio).cpu()
    for row, (place, length) in enumerate(group.rows.tolist()):
        if length > TOP_K:
            keys = pages[list(tables[row])].flatten(0, 1)[:length]
            one = IndexQueries(queries[row : row + 1].float(), weights[row : row + 1])
            expected = one.scores(keys[None])[0]
            difference = (found[place : place + length] - expected).abs().max()
            assert float(difference / expected.abs().max()) < 1e-5


def test_queries_attend_to_their_choice(gpu: torch.device) -> None:
    """128 heads of latents of 512 elements and shared keys of 64, in bfloat16: to 1 % of the largest."""
    group, tables = group_on(gpu)
    query = random(len(LENGTHS), 128, 576, seed=6).bfloat16()
    pages = random(sum(map(len, tables)), 1, 1, BLOCK, 576, seed=7).bfloat16()
    chosen = torch.zeros(len(LENGTHS), TOP_K, dtype=torch.int32)
    for row, length in enumerate(LENGTHS):
        order = torch.randperm(length, generator=torch.Generator().manual_seed(row))[:TOP_K]
        chosen[row, : len(order)] = order.sort().values.int()
    output = torch.empty(len(LENGTHS), 128, 512, dtype=torch.bfloat16, device=gpu)
    load_triton("attention").attend(
        query.to(gpu), output, group.attention, pages.to(gpu), scale=0.02, chosen=chosen.to(gpu)
    )
    for row, length in enumerate(LENGTHS):
        taken = chosen[row, : min(length, TOP_K)].long()
        keys = pages[list(tables[row])].flatten(0, 3)[taken].float()
        expected = (query[row].float() @ keys.T * 0.02).softmax(-1) @ keys[:, :512]
        assert float((output[row].cpu().float() - expected).abs().max() / expected.abs().max()) < 0.01
