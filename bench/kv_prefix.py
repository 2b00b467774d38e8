"""32 requests with one long common prompt through an in-process pipeline, with and without prefix sharing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tests.checkpoints import make_checkpoint
from tests.local_pipeline import LocalPipeline, Request

NUM_REQUESTS = 32
OWN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """`*_first_token_s`: seconds from the arrival of all requests to a request's first token."""

    what: str
    num_prefill_tokens: int
    mean_first_token_s: float
    last_first_token_s: float


def measure_prefix_sharing(directory: Path, *, num_common: int) -> list[PrefixResult]:
    """Measure with sharing, then without; the tokens are equal (float32)."""
    model = make_checkpoint(
        directory / "model",
        "llama",
        num_layers=4,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
    )
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(0, 128, (num_common,), generator=generator).tolist()
    requests = [
        Request(
            prompt=[*common, *torch.randint(0, 128, (OWN_TOKENS,), generator=generator).tolist()],
            max_tokens=4,
        )
        for _ in range(NUM_REQUESTS)
    ]
    results, tokens = [], []
    for prefix_caching in (True, False):
        pipeline = LocalPipeline(
            model,
            (2, 2),
            block_size=64,
            num_blocks=NUM_REQUESTS * (num_common // 64 + 2),
            max_step_tokens=512,
            max_step_sequences=64,
            prefix_caching=prefix_caching,
        )
        run = pipeline.serve(requests)
        times_s = list(run.first_token_after_s.values())
        what = "with sharing" if prefix_caching else "without"
        results.append(PrefixResult(what, run.num_prefill_tokens, sum(times_s) / len(times_s), max(times_s)))
        tokens.append(run.tokens)
    assert tokens[0] == tokens[1], "sharing must not change a token"
    return results
