"""Products of the experts of one layer, as checkpoints store them, against the bytes that they read or, of
prompts, against the products.

Random codes are made on the device. Each row chooses its experts at random, all rows before the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu import targets
from bench.gpu.phase import Recorder, needs_cuda
from bench.gpu.phases.decode import NO_TIME
from bench.gpu.rates import Rates
from bench.gpu.timing import seconds_of
from bench.harness.figure import Better
from checkpoint.blueprint import Activation, ClampedSwiGlu
from checkpoint.held import HeldBytes, HeldNibbles, HeldPlan
from stage_worker.model.experts import rows_of_each
from stage_worker.model.held_matrices import HeldMatrix, NibbleMatrix, empty_matrix
from stage_worker.model.kernels import BY_TRITON
from stage_worker.model.operations import operations

SEED = 1
CELL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """Experts of a model: `up` has gates and ups."""

    per_token: int
    up: HeldPlan
    down: HeldPlan
    activation: Activation | ClampedSwiGlu = Activation.SILU

    def read_bytes(self, num_chosen: int) -> float:
        """Bytes of the matrices of `num_chosen` experts."""
        return (self.up.num_bytes + self.down.num_bytes) * num_chosen / self.up.experts

    def flops(self, num_tokens: int) -> float:
        """Operations of the products of `num_tokens`, in all their experts."""
        weights = sum(plan.rows * plan.columns / plan.experts for plan in (self.up, self.down))
        return 2.0 * num_tokens * self.per_token * weights

    def bound_ms(self, rates: Rates, num_tokens: int, num_chosen: int) -> float:
        """Least time for `num_tokens` that choose `num_chosen` experts together."""
        reading_s = self.read_bytes(num_chosen) / rates.memory
        return 1e3 * max(reading_s, self.flops(num_tokens) / rates.products)


_MXFP4 = HeldNibbles(rows=128 * 5760, columns=2880, group=32, experts=128, is_float=True, has_exponents=True)
_FP8 = HeldBytes(rows=256 * 4096, columns=7168, height=128, width=128, is_fp8=True, experts=256)
_INT4 = HeldNibbles(rows=128 * 1536, columns=2048, group=128, experts=128, has_zeros=True)
LAYERS = {
    "gpt-oss-120b, mxfp4": ExpertLayer(
        per_token=4,
        up=_MXFP4,
        down=replace(_MXFP4, rows=128 * 2880),
        activation=ClampedSwiGlu(alpha=1.702, limit=7.0),
    ),
    "DeepSeek V3, fp8": ExpertLayer(per_token=8, up=_FP8, down=replace(_FP8, rows=256 * 7168, columns=2048)),
    "Qwen3-30B-A3B, int4": ExpertLayer(
        per_token=8, up=_INT4, down=replace(_INT4, rows=128 * 2048, columns=768)
    ),
}
FULL, QUICK = (1, 8, 32, 128, 512), (4,)
"""Tokens of a step, of decodes and of a chunk of a prompt, the most important first."""


async def measure(recorder: Recorder) -> None:
    """Both products and the activation between them, without the router and the order of rows."""
    batches = QUICK if recorder.order.is_quick else FULL
    for name, layer in LAYERS.items():
        if not recorder.order.is_cuda:
            for batch in batches:
                _missing(recorder, name, batch, needs_cuda(recorder.order))
            continue
        _measure_layer(recorder, name, layer, batches)


def _missing(recorder: Recorder, name: str, batch: int, reason: str) -> None:
    recorder.not_measured(targets.experts_name(name, batch), "ms", reason, better=Better.LOWER)


@torch.inference_mode()
def _measure_layer(recorder: Recorder, name: str, layer: ExpertLayer, batches: tuple[int, ...]) -> None:
    device = torch.device(recorder.order.device)
    generator = torch.Generator(device).manual_seed(SEED)
    compute = _layer(random_matrix(layer.up, generator), random_matrix(layer.down, generator), layer)
    rates = Rates.of(recorder.order.rates)
    for batch in batches:
        if recorder.left_s < CELL_S:
            _missing(recorder, name, batch, NO_TIME)
            continue
        counts = chosen_rows(batch, layer, generator)
        x = torch.randn(
            batch * layer.per_token,
            layer.up.columns,
            generator=generator,
            device=device,
            dtype=torch.bfloat16,
        )
        num_chosen = int((counts > 0).sum())
        took_s = seconds_of(partial(compute, x, counts), device, rounds=5, repeats=50)
        recorder.figure(
            targets.experts_name(name, batch),
            took_s * 1e3,
            "ms",
            bound=None if rates is None else layer.bound_ms(rates, batch, num_chosen),
            better=Better.LOWER,
            details={"read_bytes": layer.read_bytes(num_chosen), "chosen_experts": float(num_chosen)},
        )


def _layer(up: HeldMatrix, down: HeldMatrix, layer: ExpertLayer) -> Callable[[Tensor, Tensor], Tensor]:
    triton = operations(BY_TRITON)
    ups, downs = triton.expert_products(up, None), triton.expert_products(down, None)
    gate = triton.other_gate(layer.activation)
    assert ups is not None and downs is not None and gate is not None, "no kernels of experts"
    return lambda x, counts: downs(gate(ups(x, counts)), counts)


def random_matrix(plan: HeldPlan, generator: torch.Generator) -> HeldMatrix:
    """Random codes and small scales; exponents of MXFP4 near 2 ** -7."""
    matrix = empty_matrix(plan, generator.device)
    most = 0x7E if isinstance(plan, HeldBytes) else 0xFF
    matrix.codes.random_(0, most + 1, generator=generator)
    if matrix.scales.dtype is torch.uint8:
        matrix.scales.random_(118, 122, generator=generator)
    else:
        matrix.scales.uniform_(0.001, 0.01, generator=generator)
    if isinstance(matrix, NibbleMatrix) and matrix.zeros is not None:
        matrix.zeros.random_(0, 16, generator=generator)
    return matrix


def chosen_rows(batch: int, layer: ExpertLayer, generator: torch.Generator) -> Tensor:
    """Rows of each expert, int64 [experts], of tokens that choose different experts at random."""
    scores = torch.rand(batch, layer.up.experts, generator=generator, device=generator.device)
    return rows_of_each(scores.topk(layer.per_token).indices.flatten(), layer.up.experts)
