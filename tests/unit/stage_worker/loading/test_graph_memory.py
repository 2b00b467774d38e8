"""Which stages have CUDA graphs, and the memory that these may hold."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint
from checkpoint.step_graphs import graph_bytes
from stage_worker.assignment import Assignment
from stage_worker.backends.contract import CudaGraphs
from stage_worker.loading.stage_loader import WorkerResources, _graph_bytes, _staging_bytes
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.kernels import Kernels, by_triton
from tests.fake_cuda import DEVICE, fake_cuda
from tests.families import make_family
from tests.integration.stage_bench import new_assignment

KV_BYTES = 1000


class Stage:
    """Stage 1 of 3 on a GPU, without weights."""

    def __init__(self, directory: Path, *, has_kernels: bool = True) -> None:
        self.assignment: Assignment = new_assignment(directory, stage=1)
        self.config = Checkpoint.open(directory).config
        kernels: Kernels | None = by_triton(self.config) if has_kernels else None
        with fake_cuda():
            self.model = DecoderStage(
                self.config,
                layer_begin=1,
                layer_end=2,
                has_embeddings=False,
                has_head=False,
                dtype=self.assignment.dtype,
                device=DEVICE,
                kernels=kernels,
            )
        staging = _staging_bytes(self.assignment, self.config, DEVICE)
        self.others = self.model.weight_bytes + KV_BYTES + staging

    @property
    def needed(self) -> int:
        return graph_bytes(
            self.config.kinds,
            self.config.hidden_size,
            self.assignment.dtype,
            max_step_tokens=self.assignment.max_step_tokens,
            max_step_sequences=self.assignment.max_step_sequences,
            sampled_tokens=self.config.vocab_size if self.model.has_head else 0,
        )

    def bytes_with(self, memory_bytes: int, choice: CudaGraphs = CudaGraphs.AUTO) -> int:
        resources = WorkerResources(
            device=DEVICE, memory_bytes=memory_bytes, model_directory=None, cuda_graphs=choice
        )
        return _graph_bytes(self.assignment, resources, self.model, kv_bytes=KV_BYTES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("llama") / "model", "llama", num_layers=3)


def test_graphs_take_what_weights_and_pages_leave(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(directory)
    assert stage.needed > 64 << 20
    assert stage.bytes_with(stage.others + stage.needed) == stage.needed
    with caplog.at_level(logging.WARNING):
        assert stage.bytes_with(stage.others + stage.needed - 1) == 0
    assert f"no CUDA graphs: they need {stage.needed} bytes" in caplog.text
    assert f"leave {stage.needed - 1} of" in caplog.text


def test_graphs_can_be_switched_off(directory: Path) -> None:
    assert Stage(directory).bytes_with(1 << 40, CudaGraphs.OFF) == 0


def test_stages_without_triton_kernels_have_no_graphs(directory: Path) -> None:
    stage = Stage(directory, has_kernels=False)
    assert not stage.model.is_recordable
    assert stage.bytes_with(1 << 40) == 0


def test_a_cpu_has_no_graphs(directory: Path) -> None:
    stage = Stage(directory)
    stage.model.device = torch.device("cpu")
    assert stage.bytes_with(1 << 40) == 0


def test_layers_with_experts_are_not_recorded(tmp_path: Path) -> None:
    stage = Stage(make_family(tmp_path / "model", "mixtral", num_layers=3))
    assert not stage.model.is_recordable
    assert (stage.needed, stage.bytes_with(1 << 40)) == (0, 0)


def test_the_memory_of_graphs_grows_with_the_largest_recorded_step(directory: Path) -> None:
    stage = Stage(directory)
    small = stage.needed
    stage.assignment = replace(stage.assignment, max_step_tokens=512)
    larger = stage.needed
    stage.assignment = replace(stage.assignment, max_step_tokens=8192)
    assert small < larger == stage.needed
    stage.assignment = replace(stage.assignment, max_step_sequences=1024)
    assert stage.needed > larger
