"""`--max-model-len` chooses the rotary factors of a "longrope" model in every stage and in the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageline_rpc.v1 import cluster_pb2
from tests.families import FAMILIES, make_family
from tests.integration.cluster import Cluster, RequestCase
from tests.unit.stage_worker.model.test_families import NUM_TOKENS, greedy_tokens

ORIGINAL = 64
LONG, SHORT = tuple(range(20, 20 + ORIGINAL + 6)), tuple(range(20, 34))


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("max_model_len", "prompt"), [(None, LONG), (ORIGINAL, SHORT)])
async def test_a_checked_cluster_answers_like_transformers(
    max_model_len: int | None, prompt: tuple[int, ...], tmp_path: Path
) -> None:
    factors = {"long_factor": [1.0, 2.0, 4.0, 8.0, 12.0, 16.0], "original_max_position_embeddings": ORIGINAL}
    rope = FAMILIES["phi3"]["rope_parameters"] | factors
    model = make_family(
        tmp_path / "model",
        "phi3",
        num_layers=3,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
    )
    async with Cluster(
        model, layers=(2, 1), dtype="f32", max_sequence_tokens=max_model_len, self_check=True
    ) as cluster:
        status = await cluster.client.status()
        answer = await cluster.generate(RequestCase(prompt=prompt, max_tokens=NUM_TOKENS))
    assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED
    assert answer.tokens == greedy_tokens(model, list(prompt))
