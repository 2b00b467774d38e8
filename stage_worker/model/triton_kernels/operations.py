"""`Operations` of a stage on a GPU, by Triton kernels; matrix products stay with cuBLAS."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from checkpoint import Attention, GatedDelta, KimiDelta, Mamba2, Norm
from checkpoint.blueprint import Activation, ClampedSwiGlu, NormKind
from checkpoint.names import TensorRole
from checkpoint.ngrams import NgramEmbedding
from checkpoint.streams import GatedCollapse, GatedConnection, HyperConnection, WeightedCollapse
from stage_worker.model.attention_views import DecodeView
from stage_worker.model.held_matrices import ByteMatrix, NibbleMatrix
from stage_worker.model.hyper_connections import Collapse, Read, WriteWeights
from stage_worker.model.kernels import Kernels, has_head_kernel
from stage_worker.model.layer_weights import (
    DeltaWeights,
    KimiDeltaWeights,
    MambaWeights,
    NgramWeights,
    StreamTensors,
)
from stage_worker.model.norms import NormWeights, RowNorm
from stage_worker.model.operations import (
    Function,
    GateProjection,
    HeadFunction,
    NgramFunction,
    Products,
    StateFunction,
)
from stage_worker.model.projections import Weight
from stage_worker.model.rope import RotaryTable, rotate_
from stage_worker.model.step_layout import LayerKv
from stage_worker.model.triton_kernels import gates, heads, streams
from stage_worker.model.triton_kernels.byte_products import byte_expert_products
from stage_worker.model.triton_kernels.experts import expert_products
from stage_worker.model.triton_kernels.ngrams import FusedNgrams
from stage_worker.model.triton_kernels.nibble_products import nibble_expert_products
from stage_worker.model.triton_kernels.norms import KernelNorm, add_and_norm, picked_norm
from stage_worker.model.triton_kernels.recurrent import FusedChannelDelta, FusedDelta, FusedScan

_OFFSETS = (NormKind.RMS_OFFSET, NormKind.LAYER_OFFSET)


def _kernel_weight(norm: Norm, weight: Tensor) -> Tensor:
    """The weight as kernels take it, see `KernelNorm`."""
    if norm.kind is NormKind.RMS:
        return weight
    return weight.float() + 1.0 if norm.kind in _OFFSETS else weight.float()


class TritonOperations:
    """See `Operations`."""

    def norm(self, norm: Norm, weights: NormWeights) -> RowNorm:
        bias = None if weights.bias is None else weights.bias.float()
        return KernelNorm(norm.kind, norm.eps, _kernel_weight(norm, weights.weight), bias)

    def add_and_norm(
        self, residual: Tensor, added: Tensor, out_norm: RowNorm | None, scale: float, norm: RowNorm | None
    ) -> tuple[Tensor, Tensor]:
        assert out_norm is None or isinstance(out_norm, KernelNorm), "a norm of another implementation"
        assert norm is None or isinstance(norm, KernelNorm), "a norm of another implementation"
        return add_and_norm(residual, added, out_norm, scale, norm)

    def final_norm(self, hidden: Tensor, rows: Tensor | None, norm: RowNorm) -> tuple[Tensor, Tensor | None]:
        assert isinstance(norm, KernelNorm), "a norm of another implementation"
        return picked_norm(hidden, rows, norm)

    def head_function(self, mixer: Attention, norms: Mapping[TensorRole, NormWeights]) -> HeadFunction | None:
        qk_norm = mixer.qk_norm
        if qk_norm is not None and not has_head_kernel(qk_norm):
            return None
        head_norm = None
        if qk_norm is not None:
            both = [norms[role].weight for role in (TensorRole.Q_NORM, TensorRole.K_NORM)]
            head_norm = heads.HeadNorm(
                weights=_kernel_weight(qk_norm.norm, torch.stack(both)),
                eps=qk_norm.norm.eps,
                rounds_first=qk_norm.norm.kind is NormKind.RMS,
                is_after_rotation=qk_norm.is_after_rotation,
            )
        plan = heads.HeadPlan(norm=head_norm, value_eps=mixer.value_norm_eps)
        return functools.partial(_rotate_and_write, num_heads=mixer.num_heads, plan=plan)

    def rotate_and_write(
        self,
        given: Tensor,
        num_heads: int,
        rotary: RotaryTable,
        kv: LayerKv,
        between: Callable[[Tensor], None] | None = None,
    ) -> None:
        if between is None:
            _rotate_and_write(given, rotary, kv, num_heads=num_heads, plan=heads.HeadPlan())
            return
        num_kv = (given.shape[1] - num_heads) // 2
        rotate_(given[:, : num_heads + num_kv], rotary.cos, rotary.sin)
        between(given)
        kv.write(given[:, num_heads:])

    def decode(
        self,
        query: Tensor,
        output: Tensor,
        view: DecodeView,
        mixer: Attention,
        kv: LayerKv,
        sinks: Tensor | None = None,
    ) -> None:
        raise AssertionError("views of Triton kernels are work lists")

    def gate(self, gate_up: Tensor) -> Tensor:
        return gates.gate(gate_up, Activation.SILU)

    def other_gate(self, activation: Activation | ClampedSwiGlu) -> Function | None:
        if not gates.is_supported(activation):
            return None
        return functools.partial(gates.gate, activation=activation)

    def expert_products(self, matrices: Weight, biases: Tensor | None) -> Products | None:
        match matrices:
            case NibbleMatrix():
                return functools.partial(nibble_expert_products, matrix=matrices, biases=biases)
            case ByteMatrix():
                return functools.partial(byte_expert_products, matrix=matrices, biases=biases)
        return functools.partial(expert_products, matrices=matrices, biases=biases)

    def delta_function(self, mixer: GatedDelta, weights: DeltaWeights) -> StateFunction | None:
        return FusedDelta(mixer, weights)

    def channel_delta_function(
        self, mixer: KimiDelta, weights: KimiDeltaWeights, expand: GateProjection
    ) -> StateFunction | None:
        return FusedChannelDelta(mixer, weights, expand)

    def scan_function(self, mixer: Mamba2, weights: MambaWeights) -> StateFunction | None:
        return FusedScan(mixer, weights)

    def ngram_function(
        self, plan: NgramEmbedding, weights: NgramWeights, kernels: Kernels
    ) -> NgramFunction | None:
        return FusedNgrams(plan, weights, kernels)

    def connection(
        self, plan: HyperConnection | GatedConnection, tensors: StreamTensors, norm: RowNorm | None
    ) -> Read:
        assert norm is None or isinstance(norm, KernelNorm), "a norm of another implementation"
        return streams.connection_of(plan, tensors, norm)

    def collapse(self, plan: WeightedCollapse | GatedCollapse, tensors: StreamTensors) -> Collapse:
        return streams.collapse_of(plan, tensors)

    def written(
        self, given: Tensor, result: Tensor, weights: WriteWeights, *, in_place: bool = False
    ) -> Tensor:
        return streams.written(given, result, weights, in_place=in_place)


def _rotate_and_write(
    given: Tensor, rotary: RotaryTable, kv: LayerKv, *, num_heads: int, plan: heads.HeadPlan
) -> None:
    heads.rotate_and_write(
        given,
        num_heads,
        rotary.cos,
        rotary.sin,
        kv.writes.by_row,
        kv.store,
        plan=plan,
        page_scales=kv.scales,
    )
