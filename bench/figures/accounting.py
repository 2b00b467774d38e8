"""Key ratios of `bench.kv` and `bench.sampling`: cost of the ledger, and of a token after its logits."""

from __future__ import annotations

import torch

from bench import kv, sampling
from bench.harness.figure import Better, Figure
from bench.harness.group import Setting

VOCAB_SIZE, BATCH = 32_000, 16
SAMPLED = ("temperature, top-p 0.95", "all filters")
MOST_OF_SORT = 2.0


async def measure(setting: Setting) -> list[Figure]:
    """Measure on one thread."""
    torch.set_num_threads(1)
    return [*_ledger(setting), *_sampling(setting)]


def _ledger(setting: Setting) -> list[Figure]:
    return [
        Figure(
            name=f"ledger, {line.what} : {line.limit_us:g} us",
            measured=line.cpu_us,
            bound=line.limit_us,
            unit="us",
            better=Better.LOWER,
            target=1.0,
            noise=0.2,
            how="CPU time of one step's tokens in sequences, ledger, digest and signals : the limit",
        )
        for line in kv.measure_decode(setting.rounds(6, 2))
        if line.limit_us is not None
    ]


def _sampling(setting: Setting) -> list[Figure]:
    lines = sampling.measure("peaked", VOCAB_SIZE, BATCH, rounds=setting.rounds(7, 2))
    return [
        Figure(
            name=f"sampling, {line.what} : sort",
            measured=line.us_per_sequence,
            bound=line.sort_us_per_sequence,
            unit="us",
            better=Better.LOWER,
            target=MOST_OF_SORT,
            noise=0.25,
            how=f"CPU time per sequence at batch {BATCH}, {VOCAB_SIZE:,} tokens : torch.sort of the logits",
        )
        for line in lines
        if line.what in SAMPLED
    ]
