"""Layers with embeddings of n-grams: weights, tokens and states in any sizes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from checkpoint.ngrams import NgramEmbedding
from stage_worker.model.layer_weights import NgramWeights
from stage_worker.model.state_rows import HostStates
from stage_worker.model.step_layout import LayerStates
from tests.kernels.interpreted.paged import random

NUM_STATES, SEPARATOR = 12, 7
PLAN = NgramEmbedding(
    size=3,
    heads_per_size=4,
    head_dim=12,
    num_rows=5000,
    num_shards=2,
    kernel_size=4,
    separator=SEPARATOR,
    hidden_size=40,
    num_streams=3,
    norm_eps=1e-6,
)


def weights_of(plan: NgramEmbedding, dtype: torch.dtype = torch.float32) -> NgramWeights:
    """Products with multipliers exceed 63 bits: half of the combined ones are negative."""
    sizes = torch.tensor([5 + 2 * head for head in range(plan.num_heads)])
    generator = torch.Generator().manual_seed(4)
    norms = {
        name: 0.2 * random(plan.channels, dtype=dtype, seed=seed)
        for seed, name in enumerate(("key_norm", "stream_norm", "conv_norm"), start=20)
    }
    return NgramWeights(
        multipliers=torch.randint(2**55, 2**62, (plan.size,), generator=generator) | 1,
        sizes=sizes * 40,
        offsets=(sizes * 40).cumsum(0) - sizes * 40,
        table=random(plan.num_rows, plan.head_dim, dtype=dtype, seed=1),
        key=random(plan.channels, plan.width, dtype=dtype, seed=2),
        value=random(plan.hidden_size, plan.width, dtype=dtype, seed=3),
        conv=random(plan.channels, 1, plan.kernel_size, dtype=dtype, seed=5),
        **norms,
    )


def tokens_of(num_tokens: int, separator: int = SEPARATOR, seed: int = 0) -> Tensor:
    """Every fourth one is a separator; the others are up to the largest that a state holds."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 2**24, (num_tokens,), generator=generator)
    is_separator = torch.randint(0, 4, (num_tokens,), generator=generator) == 0
    return torch.where(is_separator, separator, found)


def states_of(plan: NgramEmbedding, dtype: torch.dtype, slots: Sequence[int], begun: bool) -> list[Tensor]:
    """Parts of a layer's state, NaN but in `slots`: zeros, or those of sequences that have `begun`."""
    inputs, ids = (
        torch.full((NUM_STATES, *part.shape), float("nan"), dtype=torch.float32 if part.is_wide else dtype)
        for part in plan.state_parts
    )
    inputs[list(slots)], ids[list(slots)] = 0.0, 0.0
    if begun:
        inputs[list(slots)] = random(len(slots), *inputs.shape[1:], dtype=dtype, seed=6)
        earlier = tokens_of(len(slots) * ids.shape[1], plan.separator, seed=9) - plan.separator
        ids[list(slots)] = earlier.view(len(slots), -1).float()
    return [torch.empty(0), torch.empty(0), inputs, ids]


def memory_of(states: HostStates, parts: list[Tensor], tokens: Tensor) -> LayerStates:
    step: Any = SimpleNamespace(
        states=states.rows.make(torch.from_numpy), num_tokens=len(tokens), token_ids=tokens
    )
    return LayerStates(step, parts)
