"""Operations between the matrix products of a layer: torch operators, compiled functions, Triton kernels.

Both stack the heads that share a key as query rows: SDPA's `enable_gqa=True` is ten times slower on a CPU,
and with a mask prevents CUDA's fused kernels. Batched products are for bfloat16 on a CPU, where SDPA calls
one small product per sequence and head. Scores and softmax are float32 as in SDPA: scores rounded to
bfloat16, as of a plain product, have up to five times the error.

Compiled functions round like torch's operators: float32 inside, bfloat16 after norms, rotation and silu;
attention of one query keeps its weights in float32. They release the GIL. Products and attention use the
threads of torch, the others only the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from checkpoint import Attention, Compressed, GatedDelta, KimiDelta, Latent, Mamba2, Norm
from checkpoint.blueprint import Activation, ClampedSwiGlu
from checkpoint.names import TensorRole
from checkpoint.ngrams import NgramEmbedding
from checkpoint.streams import GatedCollapse, GatedConnection, HyperConnection, WeightedCollapse
from stage_worker.model import hyper_connections
from stage_worker.model.attention_views import DecodeView, PrefillView
from stage_worker.model.attention_work import AttentionWork
from stage_worker.model.hyper_connections import Collapse, Read, WriteWeights
from stage_worker.model.kernels import AttentionMethod, Kernels, load, load_triton
from stage_worker.model.layer_weights import (
    DeltaWeights,
    KimiDeltaWeights,
    MambaWeights,
    NgramWeights,
    StreamTensors,
)
from stage_worker.model.norms import NormWeights, RowNorm, rms_norm, row_norm
from stage_worker.model.projections import Weight
from stage_worker.model.rope import RotaryTable, rotate_
from stage_worker.model.step_layout import LayerKv, LayerStates


def limited(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap). Source: Bello et al. 2016, arXiv:1611.09940, as in Gemma 2."""
    return (x / cap).tanh_().mul_(cap)


def attention_weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of float32 `scores`, which may be modified.

    `sinks` [..., 1] take part in it and are dropped. Source: Xiao et al. 2023, arXiv:2309.17453, section 3.3.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    highest = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = scores.sub_(highest).exp_()
    return weights.div_(weights.sum(dim=-1, keepdim=True).add_((sinks - highest).exp_()))


_FEW_ELEMENTS = 1 << 19
"""Up to here, converting keys to float32 is cheaper than multiplying twice."""


def decode_sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, mixer: Attention) -> Tensor:
    """Attention of `query` [kv_heads, b, group, head_dim], returned in that shape.

    `keys` and `values` are [kv_heads, b, s, head_dim]; `mask` [1, b, 1, s] is added to the scores.
    """
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=mixer.scale)


def decode_products(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    mixer: Attention | Latent,
    sinks: Tensor | None = None,
) -> Tensor:
    """Like `decode_sdpa`, with a float32 mask, a limit of scores, and `sinks` float32 [heads].

    Values may have another width, which the result has, too.

    torch has no bfloat16 product with a float32 result on a CPU. Many keys are multiplied twice: the
    second product is the rounding error of the first (beta=-1 is added to the unrounded sum).
    """
    shape = (*query.shape[:3], keys.shape[2])
    queries, keys = query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
    if keys.numel() <= _FEW_ELEMENTS or keys.dtype is torch.float32:
        parts = [torch.bmm(queries.to(torch.float32), keys.to(torch.float32))]
    else:
        rounded = torch.bmm(queries, keys)
        parts = [rounded, torch.baddbmm(rounded, queries, keys, beta=-1)]
    if mixer.softcap is not None:
        exact = torch.stack(parts).sum(0, dtype=torch.float32).view(shape)
        capped = limited(exact * mixer.scale, mixer.softcap)
        scores = capped if mask is None else capped + mask
    else:
        scores = torch.zeros(shape, device=query.device) if mask is None else mask
        for part in parts:
            scores = torch.add(scores, part.view(shape), alpha=mixer.scale)
    by_group = None if sinks is None else sinks.view(shape[0], 1, -1, 1)
    weights = attention_weights(scores, by_group).to(values.dtype)
    return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(*query.shape[:3], -1)


def prefill_products(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: PrefillView,
    mixer: Attention | Latent,
    target: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Attention of one slice's `query` [kv_heads, group, n, head_dim], into `target` of that shape.

    `keys` and `values` are [kv_heads, s, head_dim]; values and `target` may have another width.
    """
    wide_keys = _contiguous(keys, torch.float32).transpose(1, 2)
    values = _contiguous(values, values.dtype)
    kv_heads, group = query.shape[:2]
    by_head = None if sinks is None else sinks.view(kv_heads, group, 1, 1)
    for block in view.blocks:
        (first, last), (low, high) = block.queries, block.keys
        wide = _contiguous(query[:, :, first:last], torch.float32).mul_(mixer.scale)
        scores = torch.bmm(wide.flatten(1, 2), wide_keys[:, :, low:high])
        if mixer.softcap is not None:
            scores = limited(scores, mixer.softcap)
        by_query = scores.view(kv_heads, group, last - first, high - low)
        for begin, mask in block.edges:
            by_query[..., begin : begin + mask.shape[1]].add_(mask)
        weights = attention_weights(by_query, by_head).to(values.dtype)
        found = torch.bmm(weights.flatten(1, 2), values[:, low:high])
        target[:, :, first:last].copy_(found.view(kv_heads, group, last - first, -1))


def _contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


_PAGE_FORMATS = {torch.bfloat16: "IN_BF16", torch.int8: "IN_INT8", torch.float8_e4m3fn: "IN_FP8"}


@cache
def _page_format(element: torch.dtype) -> int:
    found: int = getattr(load(), _PAGE_FORMATS[element])
    return found


def _memory_of(kv: LayerKv) -> tuple[int, int, int]:
    """Addresses of a layer's pages and of their scales (0: none), and the format of their elements."""
    store, scales = kv.store, kv.scales
    return store.data_ptr(), 0 if scales is None else scales.data_ptr(), _page_format(store.dtype)


def attend_prompt(
    query: Tensor, fresh: Tensor, output: Tensor, view: PrefillView, mixer: Attention, kv: LayerKv
) -> None:
    """Compiled attention of one slice's queries, see `decoder_layer.attend`.

    Without history, keys and values come from `fresh`, else from the pages.
    """
    num_tokens, num_heads, head_dim = query.shape
    store = kv.store
    num_blocks, _, kv_heads, block_size, _ = store.shape
    table = view.pages
    if table is not None and (page := int(table.max())) >= num_blocks:
        raise IndexError(f"page {page} needed, {num_blocks} available")
    load().attend_prompt(
        *(query.data_ptr(), query.stride(0), fresh.data_ptr(), fresh.stride(0)),
        *(_memory_of(kv), 0 if table is None else table.data_ptr()),
        *(output.data_ptr(), output.stride(0), num_tokens, view.num_keys, mixer.window or 0, mixer.scale),
        (num_heads, kv_heads, head_dim, block_size),
    )


HeadFunction = Callable[[Tensor, RotaryTable, LayerKv], None]
"""Norms heads [n, heads + 2 * kv_heads, head_dim], rotates queries and keys, and writes keys and values to
the step's pages; normed and rotated queries replace the given ones.
"""
Function = Callable[[Tensor], Tensor]
Products = Callable[[Tensor, Tensor], Tensor]
"""Rows [m, out] of rows [m, in] sorted by expert and the numbers of rows of each expert, int64 [experts]."""
StateFunction = Callable[[Tensor, LayerStates], Tensor]
"""A recurrent mixer between its projections: gated output [m, o_size] of rows [m, in] of the first, with
zeros after the step's tokens. States advance.
"""
NgramFunction = Callable[[Tensor, LayerStates], Tensor]
"""Residual streams [m, channels] plus embeddings of the n-grams of the step's tokens, as a new tensor; rows
after these tokens stay. States advance.
"""
GateProjection = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Decays and output gates of Kimi Delta Attention, [n, heads * head_dim] each, of their latents
[n, 2 * rank], those of decays first.
"""


class Operations(Protocol):
    """Interface; shapes are for a step of n tokens.

    Methods that return None leave a function to torch's operators.
    """

    def norm(self, norm: Norm, weights: NormWeights) -> RowNorm:
        """The norm with `weights`, of rows [n, width]."""

    def add_and_norm(
        self, residual: Tensor, added: Tensor, out_norm: RowNorm | None, scale: float, norm: RowNorm | None
    ) -> tuple[Tensor, Tensor]:
        """`residual` [n, width] plus `scale` times the norm of `added`, and the norm of this sum.

        Without `norm`, the second is the sum. Norms are of `norm`; `added` may be modified.
        """

    def final_norm(self, hidden: Tensor, rows: Tensor | None, norm: RowNorm) -> tuple[Tensor, Tensor | None]:
        """`norm` of `rows` int64 [m] of `hidden` [n, width] (None: all), and flags int32 [m] of these rows.

        A flag is not 0 if the row has a NaN or an infinity. None instead of flags: their logits tell.
        """

    def head_function(self, mixer: Attention, norms: Mapping[TensorRole, NormWeights]) -> HeadFunction | None:
        """The function for the heads of `mixer`, whose `norms` are those of queries and keys."""

    def rotate_and_write(
        self,
        heads: Tensor,
        num_heads: int,
        rotary: RotaryTable,
        kv: LayerKv,
        between: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Rotate queries and keys in place, and write keys and values to the step's pages.

        `heads` is [n, num_heads + 2 * kv_heads, head_dim]: queries, keys, values. `between` changes them
        after the rotation, by torch's operators only.
        """

    def decode(
        self,
        query: Tensor,
        output: Tensor,
        view: DecodeView,
        mixer: Attention,
        kv: LayerKv,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend from rows of `query` [n, heads, head_dim] into the same rows of `output`.

        `sinks` is float32 [heads], see `Attention`.
        """

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [n, width], of concatenated gate and up [n, 2 * width]."""

    def other_gate(self, activation: Activation | ClampedSwiGlu) -> Function | None:
        """Like `gate`, with another activation than SILU."""

    def expert_products(self, matrices: Weight, biases: Tensor | None) -> Products | None:
        """The products of all experts with `matrices` [experts, out, in], or with held ones one below the
        other, plus `biases` [experts, out].
        """

    def delta_function(self, mixer: GatedDelta, weights: DeltaWeights) -> StateFunction | None:
        """Gated DeltaNet between its projections."""

    def channel_delta_function(
        self, mixer: KimiDelta, weights: KimiDeltaWeights, expand: GateProjection
    ) -> StateFunction | None:
        """Kimi Delta Attention between the projections of its input and of its output."""

    def scan_function(self, mixer: Mamba2, weights: MambaWeights) -> StateFunction | None:
        """Mamba2 between its projections."""

    def ngram_function(
        self, plan: NgramEmbedding, weights: NgramWeights, kernels: Kernels
    ) -> NgramFunction | None:
        """Embeddings of n-grams, with their projections."""

    def connection(
        self, plan: HyperConnection | GatedConnection, tensors: StreamTensors, norm: RowNorm | None
    ) -> Read:
        """The connection of one sub-layer to residual streams, whose input is normed."""

    def collapse(self, plan: WeightedCollapse | GatedCollapse, tensors: StreamTensors) -> Collapse:
        """The end of the residual streams."""

    def written(
        self, streams: Tensor, result: Tensor, weights: WriteWeights, *, in_place: bool = False
    ) -> Tensor:
        """New streams in the form of `streams`, with `result` [m, hidden_size] of a sub-layer; they may
        overwrite the old ones with `in_place`.
        """


def operations(kernels: Kernels) -> Operations:
    """The implementation for `kernels`."""
    match kernels.decode:
        case AttentionMethod.IN_PLACE:
            return NativeOperations()
        case AttentionMethod.TRITON:
            found: Operations = load_triton("operations").TritonOperations()
            return found
    return TorchOperations()


def attend_in_pages(
    query: Tensor,
    output: Tensor,
    work: AttentionWork,
    mixer: Attention | Latent | Compressed,
    kv: LayerKv,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    unit: int = 1,
) -> None:
    """Fill the rows of `output` that `work` names, see `triton_kernels.attention.attend`."""
    load_triton("attention").attend(
        query,
        output,
        work,
        kv.store,
        scale=mixer.scale,
        window=mixer.window,
        softcap=mixer.softcap,
        sinks=sinks,
        page_scales=kv.scales,
        chosen=chosen,
        unit=unit,
    )


class _SeparateOperations:
    """Norms and sums one after the other; everything else that may be fused is left to torch's operators."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `norms.rms_norm`; `x` is [n, width]."""
        return rms_norm(x, weight, eps)

    def norm(self, norm: Norm, weights: NormWeights) -> RowNorm:
        return row_norm(norm, weights, self.rms_norm)

    def add_and_norm(
        self, residual: Tensor, added: Tensor, out_norm: RowNorm | None, scale: float, norm: RowNorm | None
    ) -> tuple[Tensor, Tensor]:
        normed = added if out_norm is None else out_norm(added)
        total = normed.mul_(scale).add_(residual)
        return total, total if norm is None else norm(total)

    def final_norm(self, hidden: Tensor, rows: Tensor | None, norm: RowNorm) -> tuple[Tensor, Tensor | None]:
        return norm(hidden if rows is None else hidden.index_select(0, rows)), None

    def head_function(self, mixer: Attention, norms: Mapping[TensorRole, NormWeights]) -> HeadFunction | None:
        return None

    def other_gate(self, activation: Activation | ClampedSwiGlu) -> Function | None:
        return None

    def expert_products(self, matrices: Weight, biases: Tensor | None) -> Products | None:
        return None

    def delta_function(self, mixer: GatedDelta, weights: DeltaWeights) -> StateFunction | None:
        return None

    def channel_delta_function(
        self, mixer: KimiDelta, weights: KimiDeltaWeights, expand: GateProjection
    ) -> StateFunction | None:
        return None

    def scan_function(self, mixer: Mamba2, weights: MambaWeights) -> StateFunction | None:
        return None

    def ngram_function(
        self, plan: NgramEmbedding, weights: NgramWeights, kernels: Kernels
    ) -> NgramFunction | None:
        return None

    def connection(
        self, plan: HyperConnection | GatedConnection, tensors: StreamTensors, norm: RowNorm | None
    ) -> Read:
        return hyper_connections.connection_of(plan, tensors, norm)

    def collapse(self, plan: WeightedCollapse | GatedCollapse, tensors: StreamTensors) -> Collapse:
        return hyper_connections.collapse_of(plan, tensors)

    def written(
        self, streams: Tensor, result: Tensor, weights: WriteWeights, *, in_place: bool = False
    ) -> Tensor:
        return hyper_connections.written(streams, result, weights)


class NativeOperations(_SeparateOperations):
    """Compiled implementation of `Operations`, for contiguous bfloat16 rows on the CPU."""

    def __init__(self) -> None:
        module = load()
        self._rms_norm, self._gate = module.rms_norm, module.gate
        self._rotate_and_write, self._attend = module.rotate_and_write, module.attend

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), width, rows, width, eps)
        return out

    def rotate_and_write(
        self,
        heads: Tensor,
        num_heads: int,
        rotary: RotaryTable,
        kv: LayerKv,
        between: Callable[[Tensor], None] | None = None,
    ) -> None:
        assert between is None, "no operation between rotation and write"
        num_tokens, all_heads, head_dim = heads.shape
        store, cos, sin, writes = kv.store, rotary.cos, rotary.sin, kv.writes
        if writes.highest_slot >= store.shape[0] * store.shape[3]:
            raise IndexError(f"slot {writes.highest_slot} of {store.shape[0] * store.shape[3]} needed")
        shape = (num_heads, (all_heads - num_heads) // 2, head_dim, store.shape[3])
        self._rotate_and_write(
            heads.data_ptr(),
            heads.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            writes.by_row.data_ptr(),
            _memory_of(kv),
            num_tokens,
            shape,
        )

    def decode(
        self,
        query: Tensor,
        output: Tensor,
        view: DecodeView,
        mixer: Attention,
        kv: LayerKv,
        sinks: Tensor | None = None,
    ) -> None:
        assert sinks is None, "no sinks"
        _, num_heads, head_dim = query.shape
        batch, width = view.pages.shape
        store = kv.store
        num_blocks, _, kv_heads, block_size, _ = store.shape
        if view.highest_page >= num_blocks:
            raise IndexError(f"page {view.highest_page} needed, {num_blocks} available")
        assert view.ranges is not None, "a view of another kind"
        self._attend(
            query.data_ptr(),
            query.stride(0),
            _memory_of(kv),
            view.pages.data_ptr(),
            width,
            view.ranges.data_ptr(),
            0 if view.rows is None else view.rows.data_ptr(),
            output.data_ptr(),
            output.stride(0),
            batch,
            width * block_size,
            mixer.scale,
            (num_heads, kv_heads, head_dim, block_size),
        )

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
        return out


class TorchOperations(_SeparateOperations):
    """Implementation by torch's operators, for every device and dtype."""

    def rotate_and_write(
        self,
        heads: Tensor,
        num_heads: int,
        rotary: RotaryTable,
        kv: LayerKv,
        between: Callable[[Tensor], None] | None = None,
    ) -> None:
        kv_heads = (heads.shape[1] - num_heads) // 2
        rotate_(heads[:, : num_heads + kv_heads], rotary.cos, rotary.sin)
        if between is not None:
            between(heads)
        kv.write(heads[:, num_heads:])

    def decode(
        self,
        query: Tensor,
        output: Tensor,
        view: DecodeView,
        mixer: Attention,
        kv: LayerKv,
        sinks: Tensor | None = None,
    ) -> None:
        chosen = query if view.rows is None else query.index_select(0, view.rows)
        batch, num_heads, head_dim = chosen.shape
        keys, values = kv.gather(view.pages)
        grouped = chosen.reshape(batch, keys.shape[0], -1, head_dim).transpose(0, 1)
        if kv.kernels.decode is AttentionMethod.SDPA:
            assert sinks is None, "no sinks"
            found = decode_sdpa(grouped, keys, values, view.mask, mixer)
        else:
            found = decode_products(grouped, keys, values, view.mask, mixer, sinks)
        found = found.transpose(0, 1).reshape(batch, num_heads, head_dim)
        if view.rows is None:
            output.copy_(found)
        else:
            output.index_copy_(0, view.rows, found)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)
