"""Embeddings of n-grams by Triton kernels equal those by torch's operators, interpreted: rows and ids
exactly, float32 to 1e-5, float16 to 2e-3, bfloat16 to one step of the last bit, of the spread of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from checkpoint.ngrams import NgramEmbedding
from stage_worker.model.kernels import BY_TRITON, PLAIN
from stage_worker.model.layer_weights import NgramWeights
from stage_worker.model.ngrams import NgramLookup, SeparateNgrams, tokens_before
from stage_worker.model.operations import NgramFunction
from stage_worker.model.state_rows import HostStates
from stage_worker.model.triton_kernels import ngrams
from stage_worker.model.triton_kernels.ngrams import FusedNgrams
from tests.kernels.interpreted.paged import random
from tests.ngram_layers import NUM_STATES, PLAN, memory_of, states_of, tokens_of, weights_of

pytestmark = pytest.mark.kernels

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-7}
PLANS = {
    "pairs": replace(PLAN, size=2, heads_per_size=1, kernel_size=2),
    "up to four tokens": replace(PLAN, size=4, heads_per_size=3, head_dim=5),
    "one token of a convolution": replace(PLAN, kernel_size=2, num_streams=1),
    "separator 0": replace(PLAN, separator=0),
}
STEPS = {
    "one": (1,),
    "decodes": (1, 1, 1, 1, 1),
    "prompt": (40,),
    "chunks of up to three": (3, 2, 1, 3, 1, 2),
    "prompts beside decodes": (1, 17, 1, 2, 20, 1, 3),
}


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    spread = float(expected[expected.isfinite()].float().std())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * spread, equal_nan=True)


def check(plan: NgramEmbedding, dtype: torch.dtype, lengths: Sequence[int], *, begun: bool = True) -> None:
    """One step, in slots of any order; ids exactly."""
    slots = torch.randperm(NUM_STATES, generator=torch.Generator().manual_seed(3))[: len(lengths)].tolist()
    tokens, weights = tokens_of(sum(lengths), plan.separator), weights_of(plan, dtype)
    streams = random(len(tokens) + 2, plan.channels, dtype=dtype, seed=11)
    functions: list[tuple[NgramFunction, bool]]
    functions = [(SeparateNgrams(plan, weights, PLAIN), False), (fused(plan, weights), True)]
    results = []
    for function, by_triton in functions:
        parts = states_of(plan, dtype, slots, begun)
        states = HostStates.of(lengths, slots, by_triton=by_triton)
        results.append((function(streams, memory_of(states, parts, tokens)), parts))
    (expected, expected_parts), (found, found_parts) = results
    assert_close(found, expected, TOLERANCES[dtype])
    assert torch.equal(found[-2:], streams[-2:])
    assert_close(found_parts[2], expected_parts[2], TOLERANCES[dtype])
    assert torch.equal(found_parts[3].nan_to_num(-1.0), expected_parts[3].nan_to_num(-1.0))


def fused(plan: NgramEmbedding, weights: NgramWeights) -> FusedNgrams:
    return FusedNgrams(plan, weights, replace(BY_TRITON, products=PLAIN.products))


@pytest.mark.parametrize("begun", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
def test_steps_equal_those_of_torch(lengths: tuple[int, ...], begun: bool) -> None:
    check(PLAN, torch.float32, lengths, begun=begun)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_shapes_equal_those_of_torch(plan: NgramEmbedding) -> None:
    check(plan, torch.float32, STEPS["prompts beside decodes"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_steps_in_the_run_dtype(dtype: torch.dtype) -> None:
    check(PLAN, dtype, STEPS["prompts beside decodes"])


@pytest.mark.parametrize("sequences", [2, 128])
@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("plan", [PLAN, PLANS["up to four tokens"]], ids=["three", "four"])
def test_rows_of_the_table_are_exactly_those_of_torch(
    plan: NgramEmbedding, lengths: tuple[int, ...], sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes are negative for half of the n-grams, which a table of distinct rows shows."""
    monkeypatch.setattr(ngrams, "_SEQUENCES", sequences)
    slots = list(range(len(lengths), 0, -1))
    tokens, weights = tokens_of(sum(lengths), plan.separator), weights_of(plan)
    rows = [HostStates.of(lengths, slots, by_triton=by_triton) for by_triton in (False, True)]
    own, other = (one.rows.make(torch.from_numpy) for one in rows)
    kept = states_of(plan, torch.float32, slots, begun=True)[3]
    as_found = kept.clone()
    found = ngrams.looked_up(tokens, as_found, other, plan, weights)
    assert torch.equal(as_found.nan_to_num(-1.0), kept.nan_to_num(-1.0)), "ids advance after all reads"
    before = tokens_before(tokens, own, kept, plan.separator)
    assert torch.equal(found, NgramLookup(plan, weights)(tokens, before))
    products = tokens[:, None] * weights.multipliers[:1] ^ before[:, :1] * weights.multipliers[1]
    assert len(tokens) < 17 or (products < 0).any()
    ngrams.advance(tokens, as_found, other, plan)
    assert torch.equal(as_found.nan_to_num(-1.0), kept.nan_to_num(-1.0))


@pytest.mark.parametrize("lengths", [(1, 1), (1, 5), (9,)], ids=str)
def test_padding_changes_no_state(lengths: tuple[int, ...]) -> None:
    """Rows that no sequence has keep their streams; further sequences have the slot of another."""
    weights, slots, num_rows = weights_of(PLAN), list(range(1, len(lengths) + 1)), sum(lengths)
    slots[0] = 0  # as that of sequences without rows
    tokens, streams = tokens_of(num_rows + 3), random(num_rows + 3, PLAN.channels, seed=11)
    states = HostStates.of(lengths, slots, by_triton=True)
    padded = states.padded(7, has_longer=True)
    assert padded is not None
    as_is, with_padding = (states_of(PLAN, torch.float32, slots, begun=True) for _ in range(2))
    function = fused(PLAN, weights)
    expected = function(streams[:num_rows], memory_of(states, as_is, tokens[:num_rows]))
    found = function(streams, memory_of(padded, with_padding, tokens))
    assert_close(found[:num_rows], expected, 1e-5)
    assert torch.equal(found[num_rows:], streams[num_rows:])
    for part, other in zip(with_padding[2:], as_is[2:], strict=True):
        assert_close(part, other, 1e-5)


@pytest.mark.parametrize("sizes", [(1,) * 9, (2, 7), (8, 1), (3, 3, 3)], ids=str)
def test_slices_equal_the_whole_in_a_slot_that_is_used_again(sizes: tuple[int, ...]) -> None:
    """Zeros of a slot are the beginning of a sequence; slices are shorter than the convolution."""
    function, parts = fused(PLAN, weights_of(PLAN)), states_of(PLAN, torch.float32, [4], begun=True)
    tokens, streams = tokens_of(9), random(9, PLAN.channels, seed=11)
    whole = states_of(PLAN, torch.float32, [4], begun=False)
    expected = function(streams, memory_of(HostStates.of([9], [4], by_triton=True), whole, tokens))
    for part in parts[2:]:
        part[4].zero_()
    found = [
        function(rows, memory_of(HostStates.of([len(rows)], [4], by_triton=True), parts, own))
        for rows, own in zip(torch.split(streams, list(sizes)), torch.split(tokens, list(sizes)), strict=True)
    ]
    assert_close(torch.cat(found), expected, 1e-5)
    for part, other in zip(parts[2:], whole[2:], strict=True):
        assert_close(part, other, 1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e-3, 1e3])
def test_gates_of_small_and_large_products(scale: float) -> None:
    """Of 0, of less than the least that a root is taken of, and of far from it; not a number stays so."""
    weights = weights_of(PLAN)
    weights = replace(weights, key_norm=weights.key_norm * 0 + scale - 1.0)
    tokens, streams = tokens_of(5), random(5, PLAN.channels, seed=11)
    streams[3, 1] = float("nan")
    results = []
    functions: list[tuple[NgramFunction, bool]]
    functions = [(SeparateNgrams(PLAN, weights, PLAIN), False), (fused(PLAN, weights), True)]
    for function, by_triton in functions:
        states = HostStates.of([5], [2], by_triton=by_triton)
        parts = states_of(PLAN, torch.float32, [2], begun=True)
        results.append(function(streams, memory_of(states, parts, tokens)))
    assert_close(results[1], results[0], 1e-5)
