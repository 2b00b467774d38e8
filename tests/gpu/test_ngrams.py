"""Embeddings of n-grams are those of a CPU: by Triton kernels, which read the table in page-locked memory of
the host, and by torch's operators. Sizes are those of Qwen3.8-Flash-Next, but for the rows of the table.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stage_worker.model.host_weights import with_tensors
from stage_worker.model.kernels import PLAIN, load_triton
from stage_worker.model.layer_weights import NgramWeights
from stage_worker.model.ngrams import SeparateNgrams
from stage_worker.model.state_rows import HostStates
from stage_worker.model.step_layout import LayerStates
from stage_worker.model.weight_reads import WeightReads
from tests.gpu.devices import queue_of
from tests.kernels.interpreted.paged import random
from tests.ngram_layers import PLAN, SEPARATOR, memory_of, states_of, tokens_of, weights_of

pytestmark = pytest.mark.gpu

SIZES = replace(PLAN, heads_per_size=8, head_dim=160, hidden_size=2560, num_streams=4, num_rows=100_000)
LENGTHS, SLOTS = (1, 1, 40, 1, 3, 2), (5, 2, 9, 0, 7, 3)


def on_device(weights: NgramWeights, device: torch.device) -> NgramWeights:
    """The weights there, and their table on the host."""
    assert isinstance(weights.table, Tensor)
    with WeightReads(queue_of(device)) as reads:
        table = reads.new_table(weights.table.dtype, *weights.table.shape)
    assert table is not None
    table.rows.copy_(weights.table)
    moved = with_tensors(replace(weights, table=table), lambda tensor: tensor.to(device))
    assert moved.table is table
    return moved


@pytest.mark.parametrize("by_triton", [True, False], ids=["triton", "torch"])
def test_embeddings_are_those_of_a_cpu(by_triton: bool, prepared: torch.device) -> None:
    """Ids exactly, float32 to 1e-4 of the spread of a tensor."""
    if by_triton and prepared.type == "cpu":
        pytest.skip("Triton kernels need a GPU; `make test-kernels` interprets them")
    weights, tokens = weights_of(SIZES), tokens_of(sum(LENGTHS), SEPARATOR)
    streams = random(len(tokens), SIZES.channels, seed=11)
    parts = [states_of(SIZES, torch.float32, SLOTS, begun=True) for _ in range(2)]
    memory = memory_of(HostStates.of(LENGTHS, SLOTS, by_triton=False), parts[0], tokens)
    expected = SeparateNgrams(SIZES, weights, PLAIN)(streams, memory)
    new: Any = load_triton("ngrams").FusedNgrams if by_triton else SeparateNgrams
    moved = [part.to(prepared) for part in parts[1]]
    states = HostStates.of(LENGTHS, SLOTS, by_triton=by_triton)
    step: Any = SimpleNamespace(
        states=states.rows.make(lambda array: torch.from_numpy(array).to(prepared)),
        num_tokens=len(tokens),
        token_ids=tokens.to(prepared),
    )
    output = new(SIZES, on_device(weights, prepared), PLAIN)(streams.to(prepared), LayerStates(step, moved))
    pairs = [(output, expected), *zip(moved[2:], parts[0][2:], strict=True)]
    for found, wanted in pairs:
        spread = float(wanted[wanted.isfinite()].std())
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4 * spread, equal_nan=True)
    assert torch.equal(moved[3].cpu().nan_to_num(-1.0), parts[0][3].nan_to_num(-1.0))
