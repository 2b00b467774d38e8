"""A stage with NaN weights in memory: its requests are recomputed correctly elsewhere."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stageline_rpc.v1 import cluster_pb2
from tests.integration.cluster import Cluster
from tests.integration.gate import Gate
from tests.integration.request_cases import SoloRuns, mixed_cases
from tests.integration.test_drain import places

LAYERS = (1, 1, 1)


def overwrite_weights(cluster: Cluster, name: str) -> None:
    """Overwrite the worker's weights in memory with NaN; its files are unchanged."""
    backend = cluster.workers[name].worker._backend
    compute = backend._cache._compute  # type: ignore[attr-defined]
    with torch.inference_mode():
        compute._model._loaded().layers[0]._ffn_norm._weight.fill_(math.nan)


def num_live(status: cluster_pb2.GetStatusResponse) -> int:
    return status.requests.waiting + status.requests.prefill + status.requests.decode


@pytest.mark.matrix(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_requests_continue_without_a_stage_that_produces_non_finite_values(
    tiny_llama: Path, stage: int
) -> None:
    cases = mixed_cases(8)
    async with Cluster(tiny_llama, layers=LAYERS, hop_proxies=(0,)) as cluster:
        overwrite_weights(cluster, f"w{stage}")
        gate = Gate(cluster)
        # One that arrives long before the others is alone in all its steps, and might be the cause itself.
        gate.close()
        async with cluster.generating(cases) as answers:
            await cluster.wait_status(lambda status: num_live(status) == len(cases))
            gate.open()
        status = await cluster.client.status()
    SoloRuns(tiny_llama).check(answers)
    assert f"w{stage}" not in places(status)
    (left_out,) = (worker for worker in status.workers if worker.name == f"w{stage}")
    assert left_out.state == cluster_pb2.WORKER_STATE_SUSPECT
    assert "NON_FINITE" in left_out.detail
