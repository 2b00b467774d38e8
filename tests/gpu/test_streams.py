"""Kernels of residual streams, in the sizes of published models, compute what a CPU computes in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpoint import Norm
from checkpoint.streams import BASE, SCALE, GatedConnection, HyperConnection
from stage_worker.model.kernels import BY_TRITON, PLAIN
from stage_worker.model.norms import NormWeights
from stage_worker.model.operations import Operations, operations

pytestmark = pytest.mark.gpu

DEEPSEEK_V4 = HyperConnection(num_streams=4, norm_eps=1e-6, gate_eps=1e-6, mixing_rounds=20)
HY_V4 = HyperConnection(num_streams=4, norm_eps=1e-5, gate_eps=1e-6, write_eps=1e-6)
QWEN3_8 = GatedConnection(num_streams=4, rank=320, norm_eps=1e-6)
SIZES: dict[str, tuple[HyperConnection | GatedConnection, int]] = {
    "v4-flash": (DEEPSEEK_V4, 4096),
    "v4-pro": (DEEPSEEK_V4, 7168),
    "hy4": (HY_V4, 4096),
    "qwen3_8": (QWEN3_8, 2560),
}
NUM_ROWS = 67


@pytest.fixture
def gpu(prepared: torch.device) -> torch.device:
    if prepared.type == "cpu":
        pytest.skip("Triton kernels need a GPU; `make test-kernels` interprets them")
    return prepared


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class SubLayer:
    """Weights of a connection and of a norm, and rows of streams and of results, all in bfloat16."""

    def __init__(self, plan: HyperConnection | GatedConnection, width: int) -> None:
        self._plan, self._width = plan, width
        self._tensors = {
            kind: (
                random(*shape, seed=seed) * (1.0 if kind in (BASE, SCALE) else shape[-1] ** -0.5)
            ).bfloat16()
            for seed, (kind, shape) in enumerate(plan.shapes(width).items(), 5)
        }
        self._norm = random(width, seed=3).bfloat16()
        self.streams = random(NUM_ROWS, plan.num_streams * width, seed=1).bfloat16()
        self.results = random(NUM_ROWS, width, seed=2).bfloat16()

    def passed(
        self, chosen: Operations, device: torch.device, dtype: torch.dtype, rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """What a sub-layer reads, and new streams."""
        of_plan = torch.float32 if self._plan.is_wide else dtype
        tensors = {kind: tensor.to(device, of_plan) for kind, tensor in self._tensors.items()}
        norm = None
        if isinstance(self._plan, HyperConnection):
            norm = chosen.norm(Norm(eps=1e-6), NormWeights(self._norm.to(device, dtype), None))
        streams = self.streams[rows].to(device, dtype)
        row, weights = chosen.connection(self._plan, tensors, norm)(streams)
        return row, chosen.written(streams, self.results[rows].to(device, dtype), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", SIZES)
def test_streams_are_those_of_a_cpu(model: str, dtype: torch.dtype, gpu: torch.device) -> None:
    """In bfloat16 to 1 % of the largest: gates and products of gated streams are rounded, too."""
    layer = SubLayer(*SIZES[model])
    found = layer.passed(operations(BY_TRITON), gpu, dtype)
    expected = layer.passed(operations(PLAIN), torch.device("cpu"), torch.float32)
    most = 1e-4 if dtype is torch.float32 else 0.01
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine.cpu().float() - theirs).abs().max() / theirs.abs().max()) < most


@pytest.mark.parametrize("model", [model for model, (plan, _) in SIZES.items() if plan.is_wide])
def test_rows_do_not_depend_on_their_batch(model: str, gpu: torch.device) -> None:
    layer = SubLayer(*SIZES[model])
    together = layer.passed(operations(BY_TRITON), gpu, torch.bfloat16)
    for rows in (slice(0, 1), slice(31, 33), slice(40, 67)):
        alone = layer.passed(operations(BY_TRITON), gpu, torch.bfloat16, rows)
        assert all(torch.equal(mine, theirs[rows]) for mine, theirs in zip(alone, together, strict=True))
