"""One decoder layer: paged attention and MLP, with norms around them.

One-token slices attend in one call (`Operations.decode`), longer ones one at a time by SDPA. For bfloat16
on a CPU without AMX, where SDPA has a quarter of the speed of a product, they use batched products over
blocks of queries: scores and softmax in float32, weights rounded to bfloat16 for the product with the
values, as in SDPA. Heads that share a key access it with a stride of 0, or are stacked as rows. The compiled
function does the same; it divides by the sum of the weights after the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from checkpoint import (
    Attention,
    Compressed,
    Dense,
    Experts,
    GatedDelta,
    KimiDelta,
    LayerPlan,
    Mamba2,
    Mixer,
    NoMixer,
)
from checkpoint.blueprint import NormSpan, Placement, QkNorm
from checkpoint.names import TensorRole
from checkpoint.tensors import norm_roles
from stage_worker.model.attention_views import PrefillView
from stage_worker.model.block_indexer import BlockChooser
from stage_worker.model.branches import Branches
from stage_worker.model.compressed_attention import CompressedAttention
from stage_worker.model.experts import ExpertMixture
from stage_worker.model.feed_forward import FeedForward, Mlp
from stage_worker.model.gated_delta import gated_delta_net
from stage_worker.model.kernels import AttentionMethod, Kernels
from stage_worker.model.kimi_delta import kimi_delta_attention
from stage_worker.model.latent_attention import LatentAttention
from stage_worker.model.layer_weights import (
    AttentionWeights,
    CompressedWeights,
    DeltaWeights,
    DenseWeights,
    KimiDeltaWeights,
    LatentWeights,
    LayerWeights,
    MambaWeights,
)
from stage_worker.model.mamba2 import state_space_model
from stage_worker.model.ngrams import ngram_features
from stage_worker.model.norms import NormWeights, RowNorm, row_norm, unit_norm
from stage_worker.model.operations import (
    HeadFunction,
    NgramFunction,
    Operations,
    attend_in_pages,
    attend_prompt,
    operations,
    prefill_products,
)
from stage_worker.model.projections import project
from stage_worker.model.rope import Rotary, RotaryTable
from stage_worker.model.step_layout import LayerKv, LayerMemory, LayerStates, StepLayout
from stage_worker.model.window_views import AttentionViews

Mix = Callable[[Tensor, LayerMemory], Tensor]
"""A mixer: rows [m, width] for normed rows [m, hidden_size], with zeros after the step's tokens."""


def attend(
    query: Tensor,
    heads: Tensor,
    output: Tensor,
    *,
    operations: Operations,
    mixer: Attention,
    kv: LayerKv,
    views: AttentionViews | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Fill `output` [n, heads, head_dim] from the rotated `query` [n, heads, head_dim], through `views`, by
    default those of the step.

    `heads` [n, heads + 2 * kv_heads, head_dim] are the step's queries, keys and values; keys and values are
    already in the pages. `sinks` is float32 [heads], see `Attention`.
    """
    step = kv.step
    views = views or step.views[mixer.window]
    if views.work is not None:
        attend_in_pages(query, output, views.work, mixer, kv, sinks)
    for view in views.decodes:
        operations.decode(query, output, view, mixer, kv, sinks)
    for (begin, end), prefill in zip(step.prefill_rows, views.prefills, strict=True):
        rows = slice(begin, end)
        fresh = heads[rows, mixer.num_heads :]
        if step.kernels.prefill is AttentionMethod.IN_PLACE:
            assert sinks is None, "no sinks"
            attend_prompt(query[rows], fresh, output[rows], prefill, mixer, kv)
        else:
            _prefill(query[rows], fresh, output[rows], prefill, mixer, kv, sinks)


def _prefill(
    query: Tensor,
    fresh: Tensor,
    output: Tensor,
    view: PrefillView,
    mixer: Attention,
    kv: LayerKv,
    sinks: Tensor | None,
) -> None:
    """Fill `output` [n, heads, head_dim] for the n queries of one sequence."""
    if view.pages is None:
        keys, values = fresh.transpose(0, 1).chunk(2)
    else:
        keys, values = (x[:, 0, : view.num_keys] for x in kv.gather(view.pages))
    num_tokens, num_heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    sizes = (num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    grouped, target = (x.view(sizes).permute(1, 2, 0, 3) for x in (query, output))
    if kv.kernels.prefill is AttentionMethod.SDPA:
        assert sinks is None, "no sinks"
        _prefill_sdpa(grouped, keys, values, view, mixer, target)
    else:
        prefill_products(grouped, keys, values, view, mixer, target, sinks)


def _prefill_sdpa(
    query: Tensor, keys: Tensor, values: Tensor, view: PrefillView, mixer: Attention, target: Tensor
) -> None:
    shared = (-1, query.shape[1], -1, -1)
    found = scaled_dot_product_attention(
        query,
        keys[:, None].expand(shared),
        values[:, None].expand(shared),
        attn_mask=view.mask,
        is_causal=view.mask is None,
        scale=mixer.scale,
    )
    target.copy_(found)


def _unchanged(x: Tensor) -> Tensor:
    return x


class HeadNorms:
    """Norms of a step's queries and keys, in place."""

    def __init__(self, qk_norm: QkNorm, mixer: Attention, norms: Mapping[TensorRole, NormWeights]) -> None:
        ranges = ((0, mixer.num_heads), (mixer.num_heads, mixer.num_heads + mixer.num_kv_heads))
        functions = (row_norm(qk_norm.norm, norms[role]) for role in (TensorRole.Q_NORM, TensorRole.K_NORM))
        self._parts = tuple(zip(ranges, functions, strict=True))
        self._is_whole = qk_norm.span is NormSpan.WIDTH

    def __call__(self, heads: Tensor) -> None:
        """Norm `heads` [n, heads + 2 * kv_heads, head_dim]: queries, keys, values."""
        for (begin, end), norm in self._parts:
            part = heads[:, begin:end]
            normed = norm(part.flatten(1)).view_as(part) if self._is_whole else norm(part)
            part.copy_(normed)


class SeparateHeads:
    """A `HeadFunction` with norms by torch's operators."""

    def __init__(
        self, mixer: Attention, norms: Mapping[TensorRole, NormWeights], operations: Operations
    ) -> None:
        self._mixer, self._operations = mixer, operations
        head_norms = None if mixer.qk_norm is None else HeadNorms(mixer.qk_norm, mixer, norms)
        is_late = mixer.qk_norm is not None and mixer.qk_norm.is_after_rotation
        self._norm_heads = None if is_late else head_norms
        self._norm_rotated = head_norms if is_late else None
        self._norm_values = None if mixer.value_norm_eps is None else unit_norm(mixer.value_norm_eps)

    def __call__(self, heads: Tensor, rotary: RotaryTable, kv: LayerKv) -> None:
        if self._norm_heads is not None:
            self._norm_heads(heads)
        if self._norm_values is not None:
            values = heads[:, -self._mixer.num_kv_heads :]
            values.copy_(self._norm_values(values))
        self._operations.rotate_and_write(heads, self._mixer.num_heads, rotary, kv, self._norm_rotated)


class GroupedAttention:
    """See `Attention`."""

    def __init__(
        self, mixer: Attention, weights: LayerWeights, operations: Operations, kernels: Kernels
    ) -> None:
        """Packed weights replace the given ones."""
        given = weights.mixer
        assert isinstance(given, AttentionWeights), "weights of another kind"
        self._mixer = mixer
        self._rotary = Rotary.of(mixer)
        self._sinks = None if given.sinks is None else given.sinks.float()
        self._operations = operations
        fused = operations.head_function(mixer, weights.norms)
        self._write: HeadFunction = fused or SeparateHeads(mixer, weights.norms, operations)
        self._qkv = project(given.qkv, given.qkv_bias, kernels.layer_products)
        self._choose = None
        if given.index is not None:
            self._choose = BlockChooser(mixer, given.index, weights.norms, kernels)

    def __call__(self, normed: Tensor, kv: LayerMemory) -> Tensor:
        """Attention output [m, heads * head_dim] of `normed` [m, hidden_size], with zeros after the step's
        tokens.
        """
        assert isinstance(kv, LayerKv), "memory of another kind"
        step = kv.step
        num_rows, num_tokens, num_heads = normed.shape[0], step.num_tokens, self._mixer.num_heads
        is_whole = num_rows == num_tokens  # slices of all rows would cost 3 us
        heads = self._heads(normed)
        gates = None
        if self._mixer.has_output_gate:
            heads, gates = heads.tensor_split((num_heads + 2 * self._mixer.num_kv_heads,), dim=1)
            heads = heads.contiguous()
        if not is_whole:
            heads = heads[:num_tokens]
        query = heads[:, :num_heads]
        rotary = step.rotary[self._rotary]
        # All slices are written before any attends, since slices may share pages.
        self._write(heads, rotary, kv)
        if rotary.query_scale is not None:
            query.mul_(rotary.query_scale)
        new = normed.new_empty if is_whole else normed.new_zeros
        mixed = new(num_rows, num_heads, self._mixer.head_dim)
        output = mixed if is_whole else mixed[:num_tokens]
        attend(
            query,
            heads,
            output,
            operations=self._operations,
            mixer=self._mixer,
            kv=kv,
            views=self._views(normed, query, output, kv),
            sinks=self._sinks,
        )
        if gates is not None:
            mixed.mul_(gates.sigmoid())
        return mixed.view(num_rows, -1)

    def _views(self, normed: Tensor, query: Tensor, output: Tensor, kv: LayerKv) -> AttentionViews | None:
        """Views of the queries without a row of `output` so far, None for those of the step; Triton kernels
        fill the rows of queries that choose blocks.
        """
        if self._choose is None:
            return None
        if not kv.kernels.are_triton:
            return self._choose(normed, kv)
        self._choose.attend(normed, query, output, kv, self._sinks)
        return None

    def _heads(self, normed: Tensor) -> Tensor:
        """Queries, keys and values [m, heads + 2 * kv_heads, head_dim] of `normed` [m, hidden_size]."""
        heads = self._qkv(normed).view(normed.shape[0], -1, self._mixer.head_dim)
        if self._mixer.value_is_key:
            return torch.cat((heads, heads[:, self._mixer.num_heads :]), dim=1)
        return heads


def _mixer(mixer: Mixer, weights: LayerWeights, operations: Operations, kernels: Kernels) -> Mix | None:
    if isinstance(mixer, NoMixer):
        return None
    if isinstance(mixer, Attention):
        return GroupedAttention(mixer, weights, operations, kernels)
    if isinstance(mixer, GatedDelta):
        assert isinstance(weights.mixer, DeltaWeights), "weights of another kind"
        return gated_delta_net(mixer, weights.mixer, operations, kernels)
    if isinstance(mixer, KimiDelta):
        assert isinstance(weights.mixer, KimiDeltaWeights), "weights of another kind"
        return kimi_delta_attention(mixer, weights.mixer, operations, kernels)
    if isinstance(mixer, Mamba2):
        assert isinstance(weights.mixer, MambaWeights), "weights of another kind"
        return state_space_model(mixer, weights.mixer, operations, kernels)
    if isinstance(mixer, Compressed):
        assert isinstance(weights.mixer, CompressedWeights), "weights of another kind"
        return CompressedAttention(mixer, weights.mixer, weights.norms, kernels)
    assert isinstance(weights.mixer, LatentWeights), "weights of another kind"
    return LatentAttention(mixer, weights.mixer, weights.norms, kernels)


def _feed_forward(
    plan: LayerPlan, weights: LayerWeights, ffn_norm: RowNorm, operations: Operations, kernels: Kernels
) -> FeedForward | None:
    given, layer_plan = weights.feed_forward, plan.feed_forward
    if given is None:
        return None
    if isinstance(given, DenseWeights):
        assert isinstance(layer_plan, Dense), "weights of another kind"
        return Mlp(layer_plan, given, operations, kernels)
    assert isinstance(layer_plan, Experts), "weights of another kind"
    if layer_plan.branch_norm is not None:
        return Branches(layer_plan, given, weights.norms, ffn_norm, operations, kernels)
    return ExpertMixture(layer_plan, given, operations, kernels)


def _ngrams(
    plan: LayerPlan, weights: LayerWeights, operations: Operations, kernels: Kernels
) -> NgramFunction | None:
    if plan.ngrams is None:
        return None
    assert weights.ngrams is not None, "n-grams without weights"
    return ngram_features(plan.ngrams, weights.ngrams, operations, kernels)


class Beside:
    """A state space model that reads the same input as attention, with its output projection."""

    def __init__(self, plan: Mamba2, weights: LayerWeights, operations: Operations, kernels: Kernels) -> None:
        """Packed weights replace the given ones."""
        assert weights.beside is not None and weights.beside_o is not None, "weights of another kind"
        self._mix = state_space_model(plan, weights.beside, operations, kernels)
        self._o = project(weights.beside_o, weights.beside_o_bias, kernels.layer_products)

    def added_to(self, output: Tensor, normed: Tensor, memory: LayerMemory) -> Tensor:
        """`output` [m, hidden_size], which may be modified, plus that of `normed` [m, hidden_size]."""
        return self._o.added_to(output, self._mix(normed, memory))


def _adds_plainly(plan: LayerPlan) -> bool:
    """Whether each sub-layer's result is added as it is."""
    is_usual = plan.placement in (Placement.BEFORE, Placement.NONE)
    return is_usual and plan.residual_scale == 1.0 and plan.beside is None


class DecoderLayer:
    """Weights and kernels of one layer, independent of steps and of the stage's other layers."""

    def __init__(self, plan: LayerPlan, weights: LayerWeights, kernels: Kernels) -> None:
        """Packed weights replace the given ones."""
        self._operations = operations(kernels)
        self._residual_scale = plan.residual_scale
        self._is_shared = plan.placement is Placement.SHARED
        self._is_hashed = plan.is_hashed
        norms = {
            role: self._operations.norm(plan.norm, given)
            for role, given in weights.norms.items()
            if role in norm_roles(plan)
        }
        self._mixer_norm = norms.get(TensorRole.MIXER_NORM, _unchanged)
        self._ffn_norm = norms.get(TensorRole.FFN_NORM, _unchanged)
        self._mixer_out_norm = norms.get(TensorRole.MIXER_OUT_NORM)
        self._ffn_out_norm = norms.get(TensorRole.FFN_OUT_NORM)
        self._adds_mixed, self._adds_fed = (
            norm is None and plan.residual_scale == 1.0 for norm in (self._mixer_out_norm, self._ffn_out_norm)
        )
        if kernels.decode is AttentionMethod.TRITON:
            self._adds_mixed = False  # one kernel adds and norms
        self._mix = _mixer(plan.mixer, weights, self._operations, kernels)
        self._scale = weights.scale
        self._o = None if weights.o is None else project(weights.o, weights.o_bias, kernels.layer_products)
        self._beside = None
        if plan.beside is not None:
            self._beside = Beside(plan.beside, weights, self._operations, kernels)
            self._adds_mixed = False
        self._feed_forward = _feed_forward(plan, weights, self._ffn_norm, self._operations, kernels)
        if isinstance(self._feed_forward, Branches):
            self._ffn_norm = _unchanged  # both branches norm the residual themselves
        has_norm = self._ffn_norm is not _unchanged and not self._is_shared
        self._norm_of_sum = self._ffn_norm if has_norm else None
        assert plan.connection is None or _adds_plainly(plan), "streams of a layer with other residuals"
        self._ngrams = _ngrams(plan, weights, self._operations, kernels)
        self._read = {
            role: self._operations.connection(plan.connection, tensors, self._norm_of_streams(role))
            for role, tensors in weights.streams.items()
            if plan.connection is not None
        }

    def _norm_of_streams(self, role: TensorRole) -> RowNorm | None:
        """Norm of what the sub-layer reads; None without."""
        norm = self._mixer_norm if role is TensorRole.MIXER_STREAMS else self._ffn_norm
        return None if norm is _unchanged else norm

    @property
    def num_memories(self) -> int:
        """How many parts of it mix tokens, and need memory for that."""
        return (self._mix is not None) + (self._beside is not None)

    def forward(self, hidden: Tensor, *memories: LayerMemory) -> Tensor:
        """Return the layer's output for `hidden` [m, residual_width], which is not modified.

        `m` is at least the step's number of tokens: further rows are computed without attention. A mixer
        beside attention has the second of the `memories`.
        """
        if self._ngrams is not None:
            assert isinstance(memories[0], LayerStates), "memory of another kind"
            hidden = self._ngrams(hidden, memories[0])
        output = self._output_of_streams(hidden, *memories) if self._read else self._output(hidden, *memories)
        return output if self._scale is None else output.mul_(self._scale)

    def _output_of_streams(self, hidden: Tensor, memory: LayerMemory) -> Tensor:
        """`forward` of several residual streams [m, num_streams * hidden_size]."""
        streams = hidden
        if self._mix is not None and self._o is not None:
            x, weights = self._read[TensorRole.MIXER_STREAMS](streams)
            mixed = self._o(self._mix(x, memory))
            streams = self._operations.written(streams, mixed, weights)
        if self._feed_forward is not None:
            x, weights = self._read[TensorRole.FFN_STREAMS](streams)
            feed_forward = self._feed_forward_in(memory.step)
            assert feed_forward is not None, "a layer without a feed-forward"
            fed = feed_forward(x, memory.step.num_tokens)
            is_own = streams is not hidden
            streams = self._operations.written(streams, fed, weights, in_place=is_own)
        return streams

    def _output(self, hidden: Tensor, memory: LayerMemory, *beside: LayerMemory) -> Tensor:
        """`forward` without the scale of the layer, as a new tensor."""
        step, feed_forward = memory.step, self._feed_forward_in(memory.step)
        if self._mix is None or self._o is None:
            assert feed_forward is not None, "a layer of nothing"
            fed = feed_forward(self._ffn_norm(hidden), step.num_tokens)
            return self._added(hidden, fed, self._ffn_out_norm, None)[0]
        normed = self._mixer_norm(hidden)
        mixed = self._mix(normed, memory)
        if self._adds_mixed:
            hidden = self._o.added_to(hidden, mixed)
            of_sum = hidden if self._norm_of_sum is None else self._norm_of_sum(hidden)
        else:
            output = self._o(mixed)
            if self._beside is not None:
                output = self._beside.added_to(output, normed, *beside)
            hidden, of_sum = self._added(hidden, output, self._mixer_out_norm, self._norm_of_sum)
        if not self._is_shared:
            normed = of_sum
        if feed_forward is None:
            return hidden
        if self._adds_fed:
            return feed_forward.added_to(hidden, normed, step.num_tokens)
        return self._added(hidden, feed_forward(normed, step.num_tokens), self._ffn_out_norm, None)[0]

    def _feed_forward_in(self, step: StepLayout) -> FeedForward | None:
        """The feed-forward for the tokens of a step, which may choose its experts."""
        if not self._is_hashed:
            return self._feed_forward
        assert isinstance(self._feed_forward, ExpertMixture), "a hashed layer of another kind"
        return self._feed_forward.of_tokens(step.token_ids)

    def _added(
        self, residual: Tensor, x: Tensor, out_norm: RowNorm | None, norm: RowNorm | None
    ) -> tuple[Tensor, Tensor]:
        return self._operations.add_and_norm(residual, x, out_norm, self._residual_scale, norm)
