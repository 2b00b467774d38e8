"""Kernels of each stage can be chosen and are shown in status, log and spans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint import Checkpoint
from stage_worker.backends.contract import KernelChoice
from stage_worker.config import WorkerConfig
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.cluster import Cluster
from tests.integration.request_cases import mixed_cases
from tests.unit.stage_worker.model.kernel_choices import IN_PLACE, skip_unless_possible

AUTO, PLAIN, COMPILED = KernelChoice


class ChoosyCluster(Cluster):
    """Workers w0, w1 with different kernels."""

    def __init__(self, directory: Path, kernels: tuple[KernelChoice, KernelChoice], **settings: Any) -> None:
        self._kernels = dict(zip(("w0", "w1"), kernels, strict=True))
        super().__init__(directory, layers=(1, 1), **{"dtype": "bf16", **settings})

    def worker_config(self, name: str, *arguments: Any, **more: Any) -> WorkerConfig:
        return replace(super().worker_config(name, *arguments, **more), kernels=self._kernels[name])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(
        tmp_path_factory.mktemp("kernels"), "llama", num_layers=2, dtype="bfloat16", head_dim=32
    )
    skip_unless_possible(IN_PLACE, Checkpoint.open(made).config)
    return made


async def test_status_shows_dtype_and_kernels_of_each_stage(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ChoosyCluster(directory, (AUTO, AUTO)) as cluster:
        status = await cluster.client.status()
        for worker in status.workers:
            assert (worker.device, worker.dtype) == ("cpu", cluster_pb2.DTYPE_BF16)
            assert worker.kernels == "compiled"
            assert "decode by compiled kernels" in worker.kernels_detail
        answers = await cluster.generate_all(mixed_cases(4))
        assert all(answer.succeeded for answer in answers)
    assert "compute differently" not in caplog.text


async def test_stages_with_different_kernels_log_one_warning(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with ChoosyCluster(directory, (PLAIN, COMPILED)) as cluster:
        status = await cluster.client.status()
        assert [worker.kernels for worker in status.workers] == ["plain", "compiled"]
        assert "chosen with --kernels plain" in status.workers[0].kernels_detail
        await cluster.workers["w1"].stop()
        await cluster.start_worker("w1")
        await cluster.wait_status(lambda now: now.epoch > status.epoch and _serves(now))
    warnings = [record for record in caplog.records if "compute differently" in record.message]
    assert [record.levelname for record in warnings] == ["WARNING"]
    assert "stage 0: plain on cpu; stage 1: compiled on cpu" in warnings[0].message


@pytest.mark.full
async def test_unavailable_compiled_kernels_fail_the_load_with_the_reason(directory: Path) -> None:
    async with ChoosyCluster(directory, (AUTO, COMPILED), dtype="f32", waits=False) as cluster:
        status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_BLOCKED)
        assert "--kernels compiled is not possible: the compiled kernels are for bf16" in status.detail


def _serves(status: cluster_pb2.GetStatusResponse) -> bool:
    return status.state == cluster_pb2.CLUSTER_STATE_SERVING
