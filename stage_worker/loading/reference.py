"""Reference outputs for self-checks, computed from checkpoint files row by row.

An independent implementation: it shares only the plan and the rotary frequencies with the stages, and holds
`BLOCK_ELEMENTS` weights in memory at a time, whatever the model's size. It computes in float32 on the CPU,
so that it is valid for every device, takes no GPU memory, and is unaffected by faults of a device or its
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from checkpoint import (
    Checkpoint,
    CheckpointError,
    Compressed,
    DType,
    GatedDelta,
    KimiDelta,
    Latent,
    LayerPlan,
    Mamba2,
    Mixer,
    NoFeedForward,
    NoMixer,
    Norm,
    RopeConfig,
    ScaledDType,
    WeightFormat,
)
from checkpoint.blueprint import Attention, NormKind, NormSpan, Placement, QkNorm
from checkpoint.names import TensorRole
from checkpoint.recurrent import GateNorm
from checkpoint.streams import GatedConnection, HyperConnection
from checkpoint.tensors import (
    DECAY_KIND,
    DT_KIND,
    LAYER_SCALE_KIND,
    SINKS_KIND,
    RolePlaces,
    RoleRows,
    final_norm_tensors,
    head_tensor,
    rows_of_roles,
)
from kvcache.scaled_pages import scaled_rows, unscaled_rows
from stage_worker.assignment import ReferenceRequest
from stage_worker.backends.backend import LoadProgress, StageLoadError
from stage_worker.backends.tensor_views import ELEMENTS, as_array, from_wire, project, to_wire
from stage_worker.loading.head_summary import HeadSummary, NonFiniteReference
from stage_worker.loading.reference_copies import (
    EXACT,
    NUM_COPIES,
    ROUNDED,
    relative_changes,
    round_copies,
    roundings_of,
    routed,
)
from stage_worker.loading.reference_memory import reference_bytes, rows_per_block
from stage_worker.loading.stage_loader import fingerprint_mismatch
from stage_worker.loading.streamed_blocks import hidden_blocks
from stage_worker.loading.streamed_compressed import StreamedCompressed
from stage_worker.loading.streamed_delta import delta_inputs, kimi_delta
from stage_worker.loading.streamed_feed_forward import StreamedFeedForward
from stage_worker.loading.streamed_mamba import EXACT_VECTORS, MambaVectors
from stage_worker.loading.streamed_ngrams import with_ngrams
from stage_worker.loading.streamed_streams import (
    StreamedConnection,
    StreamedGates,
    collapsed,
    connected,
)
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.model.quantize import rounded_to
from stage_worker.model.rope import rotated_pairs
from stage_worker.model.weights import load_rows
from wire.errors import HandshakeMismatch, InvalidRequest, Overloaded, StaleStream
from wire.reference import LayerReference, Reference
from wire.tensors import WireDType

_Masks = list[Tensor | None]


class StreamedModel:
    """Computes several texts in one pass over the weights, without a KV cache, on the CPU.

    Hidden states are [copies, n, width] for the n tokens of all texts in order; see `reference_copies`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: DType,
        *,
        wire_dtype: WireDType | None = None,
        kv_dtype: ScaledDType | None = None,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`on_progress` receives the fraction of computed layers per matrix or more often; may raise."""
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._dtype = TORCH_DTYPES[dtype]
        self._wire_dtype = None if wire_dtype is dtype else wire_dtype
        self._kv_element = None if kv_dtype is None else ELEMENTS[kv_dtype]
        self._on_progress = on_progress
        self._fraction = 0.0
        self.tokens = torch.empty(0, dtype=torch.int64)  # of all texts
        self.not_chosen: _Masks = []  # of each text, by the last layer with an indexer
        # Reused by all blocks: freed ones of megabytes stay with the allocator, which then holds several.
        self._stored_block = torch.empty(0, dtype=self._dtype)
        self._block = torch.empty(0)

    def hidden_states(self, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield the hidden states [copies, n, width] after each layer. Raises like `load_tensors`."""
        config, lengths = self._config, [len(text) for text in texts]
        self.tokens = torch.tensor([token for text in texts for token in text])
        name = config.names.embeddings
        embedded = torch.cat([self._rows(name, token, token + 1) for text in texts for token in text])
        scale = torch.tensor(config.embedding_scale, dtype=self._dtype).float()
        hidden = self.rounded(embedded.expand(NUM_COPIES, -1, -1) * scale).repeat(1, 1, config.num_streams)
        for index, plan in enumerate(config.layers):
            self._fraction = index / config.num_layers
            layer = StreamedLayer(self, plan, rows_of_roles(config, index))
            hidden = self._as_sent(layer.output(hidden, lengths))
            yield hidden

    def logits(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (first token, logits float32 [copies, n, m]) per block of m tokens."""
        config = self._config
        if config.collapse is not None:
            hidden = collapsed(self, config.collapse, self._of_collapse, hidden)
        rows = [self._rows(name, 0, config.hidden_size) for name in final_norm_tensors(config)]
        normed = hidden if config.final_norm is None else self.normed(hidden, config.final_norm, *rows)
        head = RoleRows(head_tensor(config), 0, config.vocab_size)
        for first, block in self._blocks(head):
            logits = self.rounded(linear(normed, block)) * config.logit_scale
            yield first, logits if config.logit_softcap is None else _limited(logits, config.logit_softcap)

    def _of_collapse(self, kind: str) -> RoleRows:
        config = self._config
        name = config.names.of_collapse(kind)
        return RoleRows(name, 0, self._checkpoint.shape_of(name)[0])

    def _as_sent(self, hidden: Tensor) -> Tensor:
        if self._wire_dtype is not None:
            for rounded in hidden[ROUNDED:]:
                sent = to_wire(rounded, self._wire_dtype)
                rounded.copy_(from_wire(sent, device=hidden.device, dtype=self._dtype))
        return hidden

    def cached(self, x: Tensor) -> Tensor:
        """Round keys or values `x` [copies, n, kv_heads, width], or latents, as pages do."""
        if self._kv_element is not None:
            elements, scales = scaled_rows(x[ROUNDED:], self._kv_element)
            x[ROUNDED:] = unscaled_rows(elements, scales, self._kv_element, self._dtype)
        return x

    def normed(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Norm `x` [copies, ..., width]."""
        is_offset = norm.kind in (NormKind.RMS_OFFSET, NormKind.LAYER_OFFSET)
        if norm.kind in (NormKind.LAYER, NormKind.LAYER_OFFSET):
            x = x - x.mean(dim=-1, keepdim=True)
        scaled = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps)
        if norm.kind is NormKind.RMS:
            scaled = self.rounded(scaled)
        scaled = scaled * (1 + weight if is_offset else weight)
        return self.rounded(scaled if bias is None else scaled + bias)

    def vector(self, rows: RoleRows) -> Tensor:
        """A norm's weight, or a bias."""
        found = self._rows(rows.name, rows.begin, rows.end)
        return found.flatten()[rows.first :: rows.step] if rows.is_across else found

    def kernel(self, rows: RoleRows) -> Tensor:
        """Weights [channels, 1, kernel size] of a convolution of each channel alone."""
        shape = (rows.end - rows.begin, self._checkpoint.shape_of(rows.name)[-1])
        return self._load(rows.name, 0, torch.empty(shape, dtype=self._dtype)).float()[:, None]

    def exact(self, rows: RoleRows) -> Tensor:
        """A whole vector that stages keep in float32, whatever the number of its dimensions."""
        shape = self._checkpoint.shape_of(rows.name)
        stored = torch.empty(shape) if len(shape) == 1 else torch.empty(shape).view(-1, shape[-1])
        return self._load(rows.name, 0, stored).flatten()

    def table(self, rows: RoleRows, dtype: torch.dtype) -> Tensor:
        """A whole tensor of several rows that stages keep as it is, or in float32."""
        return self._load(rows.name, 0, torch.empty(self._checkpoint.shape_of(rows.name), dtype=dtype))

    def row(self, table: RoleRows, number: int) -> Tensor:
        """Row `number` of what a tensor has of a table."""
        return self._rows(table.name, number, number + 1)

    def exact_products(self, x: Tensor, matrix: RoleRows) -> Tensor:
        """Products with a matrix that stages keep in float32, or multiply by in float32."""
        width, end, products = x.shape[-1], matrix.end, []
        for first in range(matrix.begin, end, rows_per_block(width)):
            rows = torch.empty(min(rows_per_block(width), end - first), width)
            products.append(linear(x, self._load(matrix.name, first, rows)))
        return torch.cat(products, dim=-1)

    def projected(self, x: Tensor, weight: RoleRows, bias: RoleRows | None) -> Tensor:
        """[copies, n, out] for x [copies, n, in]."""
        blocks = self._blocks(weight, self._config.weight_format)
        if weight.is_across:
            product = self._across(x, weight, blocks)
        else:
            parts = [
                linear(x, block[(weight.first - at) % weight.step :: weight.step]) for at, block in blocks
            ]
            product = torch.cat(parts, dim=-1)
        return self.rounded(product if bias is None else product + self.vector(bias))

    def _across(self, x: Tensor, weight: RoleRows, blocks: Iterator[tuple[int, Tensor]]) -> Tensor:
        """Product with a transposed matrix, of which `blocks` have some of the inputs."""
        total = torch.zeros(())
        for first, block in blocks:
            total = total + x[..., first : first + len(block)] @ block[:, weight.first :: weight.step]
        return total

    def _blocks(self, matrix: RoleRows, weights: WeightFormat | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) per block of a matrix in the format `weights`.

        The next block overwrites the rows.
        """
        num_rows, width = matrix.end - matrix.begin, self._checkpoint.shape_of(matrix.name)[-1]
        step = min(rows_per_block(width), num_rows)
        if self._block.numel() < step * width:
            self._stored_block = torch.empty(step * width, dtype=self._dtype)
            self._block = torch.empty(step * width)
        for first in range(0, num_rows, step):
            shape = (min(step, num_rows - first), width)
            size = math.prod(shape)
            rows = self._block[:size].view(shape)
            stored = self._stored_block[:size].view(shape)
            self._load(matrix.name, matrix.begin + first, stored)
            yield first, rows.copy_(stored if weights is None else rounded_to(weights, stored))

    def _rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a tensor, rounded to the run dtype, in float32."""
        shape = (end - begin, *self._checkpoint.shape_of(name)[1:])
        return self._load(name, begin, torch.empty(shape, dtype=self._dtype)).float()

    def _load(self, name: str, first_row: int, rows: Tensor) -> Tensor:
        self._on_progress(self._fraction)
        load_rows(self._checkpoint, name, rows, first_row=first_row)
        return rows

    def rounded(self, x: Tensor) -> Tensor:
        """Round the copies of `x` [copies, ...] but the exact one, in place."""
        return round_copies(x, self._dtype)


def _limited(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


class StreamedLayer:
    """One layer, whose weights are read when they are used."""

    def __init__(self, model: StreamedModel, plan: LayerPlan, places: RolePlaces) -> None:
        self.model, self.plan, self.places = model, plan, places

    def output(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states after the layer, [copies, n, width] as `hidden`, of texts of `lengths`."""
        plan = self.plan
        if plan.ngrams is not None:
            hidden = with_ngrams(self, hidden, lengths, plan.ngrams)
        if plan.connection is None:
            hidden = self._output_of_one(hidden, lengths)
        else:
            hidden = self._output_of_streams(hidden, plan.connection, lengths)
        if not plan.has_scale:
            return hidden
        scale = self.model.vector(self.places[TensorRole.LAYER_SCALE, LAYER_SCALE_KIND, None])
        return self.model.rounded(hidden * scale)

    def _output_of_one(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """One residual stream after the layer."""
        plan = self.plan
        normed = self.normed(hidden, TensorRole.MIXER_NORM)
        if not isinstance(plan.mixer, NoMixer):
            hidden = self._added(hidden, self._mixed(normed, lengths), TensorRole.MIXER_OUT_NORM)
        if plan.placement is not Placement.SHARED:
            normed = self.normed(hidden, TensorRole.FFN_NORM)
        if not isinstance(inner := plan.known_feed_forward, NoFeedForward):
            fed = StreamedFeedForward(self, inner)(normed, hidden)
            hidden = self._added(hidden, fed, TensorRole.FFN_OUT_NORM)
        return hidden

    def _output_of_streams(
        self, streams: Tensor, plan: HyperConnection | GatedConnection, lengths: Sequence[int]
    ) -> Tensor:
        """Several residual streams [copies, n, num_streams * width] after the layer."""
        if not isinstance(self.plan.mixer, NoMixer):
            connection = self._connection(TensorRole.MIXER_STREAMS, plan, streams)
            x = self.normed(connection.row(), TensorRole.MIXER_NORM)
            streams = connection.with_result(self._mixed(x, lengths))
        if not isinstance(inner := self.plan.known_feed_forward, NoFeedForward):
            connection = self._connection(TensorRole.FFN_STREAMS, plan, streams)
            row = connection.row()
            x = self.normed(row, TensorRole.FFN_NORM)
            streams = connection.with_result(StreamedFeedForward(self, inner)(x, row))
        return streams

    def _connection(
        self, role: TensorRole, plan: HyperConnection | GatedConnection, streams: Tensor
    ) -> StreamedConnection | StreamedGates:
        return connected(self.model, plan, lambda kind: self.places[role, kind, None], streams)

    def _added(self, residual: Tensor, x: Tensor, out_norm: TensorRole) -> Tensor:
        return self.model.rounded(residual + self.plan.residual_scale * self.normed(x, out_norm))

    def normed(self, x: Tensor, role: TensorRole, norm: Norm | None = None) -> Tensor:
        """`x` unchanged if the layer has no such norm."""
        if (weight := self.places.get((role, "weight", None))) is None:
            return x
        bias = self.places.get((role, "bias", None))
        vectors = [self.model.vector(rows) for rows in (weight, bias) if rows is not None]
        return self.model.normed(x, norm or self.plan.norm, *vectors)

    def projected(self, x: Tensor, role: TensorRole, expert: int | None = None) -> Tensor:
        """[copies, n, out] for `x` [copies, n, in]."""
        weight, bias = self.places[role, "weight", expert], self.places.get((role, "bias", expert))
        scales = [scale for scale in self.plan.row_scales if scale.role is role]
        if not scales:
            return self.model.projected(x, weight, bias)
        product = self.model.projected(x, weight, None)
        for scale in scales:
            product[..., scale.begin : scale.end] *= scale.weight
        if bias is not None:
            vector = self.model.vector(bias)
            for scale in scales:
                vector[scale.begin : scale.end] *= scale.bias
            product = product + vector
        return self.model.rounded(product)

    def _mixed(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        mixed = self._by(self.plan.mixer, x, lengths)
        if self.plan.beside is None:
            return mixed
        return self.model.rounded(mixed + self._by(self.plan.beside, x, lengths))

    def _by(self, mixer: Mixer, x: Tensor, lengths: Sequence[int]) -> Tensor:
        if isinstance(mixer, Latent):
            return self._latent_attention(x, lengths, mixer)
        if isinstance(mixer, Compressed):
            return StreamedCompressed(self, mixer)(x, lengths)
        if isinstance(mixer, GatedDelta):
            return self._delta(x, lengths, mixer)
        if isinstance(mixer, KimiDelta):
            return kimi_delta(self, x, lengths, mixer)
        if isinstance(mixer, Mamba2):
            return self._mamba(x, lengths, mixer)
        assert not isinstance(mixer, NoMixer), "a layer without a mixer"
        return self._attention(x, lengths, mixer)

    def _delta(self, x: Tensor, lengths: Sequence[int], mixer: GatedDelta) -> Tensor:
        """The gated delta rule, token by token."""
        model, places = self.model, self.places
        roles = (TensorRole.DELTA_QKV, TensorRole.DELTA_Z), (TensorRole.DELTA_B, TensorRole.DELTA_A)
        wide, narrow = (torch.cat([self.projected(x, role) for role in some], -1) for some in roles)
        decays = (TensorRole.STATE_DECAY, DECAY_KIND), (TensorRole.STATE_DT, DT_KIND)
        decay, dt_bias = (model.exact(places[role, kind, None]) for role, kind in decays)
        kernel = model.kernel(places[TensorRole.STATE_CONV, "weight", None])
        inputs = delta_inputs(mixer, wide, narrow)
        mixed = inputs.mixed_by(mixer, kernel, (decay, dt_bias), lengths, model.rounded)
        output = self.normed(model.rounded(mixed), TensorRole.STATE_NORM, Norm(eps=mixer.norm_eps))
        gate = inputs.gate.sigmoid() if mixer.has_sigmoid_gate else silu(inputs.gate)
        return self.projected(model.rounded(output.flatten(2) * gate), TensorRole.STATE_OUT)

    def _mamba(self, x: Tensor, lengths: Sequence[int], mixer: Mamba2) -> Tensor:
        """The state space model, token by token."""
        model, places = self.model, self.places
        bias = places.get((TensorRole.STATE_CONV, "bias", None))
        vectors = MambaVectors(
            kernel=model.kernel(places[TensorRole.STATE_CONV, "weight", None]),
            kernel_bias=None if bias is None else model.vector(bias),
            exact=[model.exact(places[role, kind, None]) for role, kind in EXACT_VECTORS],
        )
        mixed, gates = vectors.mixed(self.projected(x, TensorRole.MAMBA_IN), mixer, lengths, model.rounded)
        if mixer.gate_norm is not GateNorm.BEFORE:
            mixed = mixed * gates
        if mixer.gate_norm is not GateNorm.NONE:
            groups = torch.unflatten(mixed, -1, (mixer.num_head_groups, -1))
            mean_square = groups.square().mean(dim=-1, keepdim=True)
            weight = model.vector(places[TensorRole.STATE_NORM, "weight", None])
            mixed = (groups * torch.rsqrt(mean_square + mixer.norm_eps)).flatten(2) * weight
        if mixer.gate_norm is GateNorm.BEFORE:
            mixed = mixed * gates
        return self.projected(model.rounded(mixed), TensorRole.STATE_OUT)

    def _latent_attention(self, x: Tensor, lengths: Sequence[int], mixer: Latent) -> Tensor:
        """Expanded: each head has keys and values."""
        if mixer.query_rank is None:
            down, query = x, self.projected(x, TensorRole.Q)
        else:
            down = self.normed(self.projected(x, TensorRole.Q_DOWN), TensorRole.Q_LATENT_NORM, mixer.norm)
            query = self.projected(down, TensorRole.Q_UP)
        query = query.view(*query.shape[:2], mixer.num_heads, -1)
        if mixer.indexer is not None:
            self.model.not_chosen = self._not_chosen(x, down, lengths, mixer)
        latent, shared = self.projected(x, TensorRole.KV_DOWN).tensor_split((mixer.kv_rank,), dim=-1)
        latent = self.normed(latent, TensorRole.KV_LATENT_NORM, mixer.norm)
        mixed = []
        split = (rows.split_with_sizes(list(lengths), dim=1) for rows in (query, latent, shared))
        is_hidden = self.model.not_chosen if mixer.top_k is not None else [None] * len(lengths)
        for q, c, k, hidden in zip(*split, is_hidden, strict=True):
            plain, turning = q.split_with_sizes((mixer.nope_dim, mixer.rope_dim), dim=-1)
            q = torch.cat((plain, self._rotated(turning, mixer.rope)), dim=-1)
            kept = torch.cat((c[:, :, None], self._rotated(k[:, :, None], mixer.rope)), dim=-1)
            c, k = self.model.cached(kept).split_with_sizes((mixer.kv_rank, mixer.rope_dim), dim=-1)
            keys, values = self._expanded(c[:, :, 0], mixer)
            keys = torch.cat((keys, k.expand(-1, -1, mixer.num_heads, -1)), dim=-1)
            mixed.append(self._mix(self._grown(q, mixer), keys, values, mixer, hidden))
        output = torch.cat(mixed, 1)
        if mixer.has_output_gate:
            gate = self.model.rounded(self.projected(x, TensorRole.OUTPUT_GATE).sigmoid())
            output = self.model.rounded(output * gate)
        return self.projected(output, TensorRole.O)

    def _expanded(self, latents: Tensor, mixer: Latent) -> tuple[Tensor, Tensor]:
        """Keys and values [copies, n, heads, width] of `latents` [copies, n, kv_rank]."""
        if not mixer.is_split:
            both = self.projected(latents, TensorRole.KV_UP).view(*latents.shape[:2], mixer.num_heads, -1)
            return both[..., : mixer.nope_dim], both[..., mixer.nope_dim :]
        places, heads = self.places, range(mixer.num_heads)
        across = (replace(places[TensorRole.HEAD_KEYS, "weight", head], is_across=True) for head in heads)
        keys = [self.model.projected(latents, rows, None) for rows in across]
        values = [self.projected(latents, TensorRole.HEAD_VALUES, head) for head in heads]
        return torch.stack(keys, 2), torch.stack(values, 2)

    def _not_chosen(self, x: Tensor, latents: Tensor, lengths: Sequence[int], mixer: Latent) -> _Masks:
        """Whether each query [copies, 1, n, n] does not see a token, of each text; None if it sees all."""
        indexer, rope, count = mixer.indexer, mixer.rope, mixer.top_k
        assert indexer and rope and count, "a mixer without indexer"
        heads = self.projected(latents, TensorRole.INDEX_Q).view(*x.shape[:2], indexer.num_heads, -1)
        keys = self.normed(self.projected(x, TensorRole.INDEX_K), TensorRole.INDEX_K_NORM, indexer.norm)
        weights = self.model.exact_products(x, self.places[TensorRole.INDEX_WEIGHT, "weight", None])
        rope = replace(rope, is_interleaved=indexer.is_interleaved)
        found: _Masks = [None] * len(lengths)
        rows = (part.split_with_sizes(list(lengths), dim=1) for part in (heads, keys[:, :, None], weights))
        for index, (q, k, w) in enumerate(zip(*rows, strict=True)):
            if lengths[index] > count:
                for turning in (x[..., indexer.rotated(mixer.rope_dim)] for x in (q, k)):
                    turning.copy_(self._rotated(turning, rope))
                scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
                total = (w.transpose(1, 2)[..., None] * scores.relu()).sum(1)
                found[index] = ~routed(total + torch.full_like(total, -math.inf).triu(1), count)[:, None]
        return found

    def _attention(self, x: Tensor, lengths: Sequence[int], mixer: Attention) -> Tensor:
        source_of_values = TensorRole.K if mixer.value_is_key else TensorRole.V
        projected = (self.projected(x, role) for role in (TensorRole.Q, TensorRole.K, source_of_values))
        query, key, value = (y.view(*y.shape[:2], -1, mixer.head_dim) for y in projected)
        gate = None
        if mixer.has_output_gate:
            query, gate = query[:, :, ::2], query[:, :, 1::2].flatten(2)
        if mixer.value_norm_eps is not None:
            mean_square = value.square().mean(dim=-1, keepdim=True)
            value = self.model.rounded(value * torch.rsqrt(mean_square + mixer.value_norm_eps))
        qk_norm = mixer.qk_norm
        if qk_norm is not None and not qk_norm.is_after_rotation:
            query, key = self._normed_heads(query, key, qk_norm)
        split = (heads.split_with_sizes(list(lengths), dim=1) for heads in (query, key, value))
        mixed = []
        is_hidden = hidden_blocks(self, x, lengths, mixer)
        for q, k, v, hidden in zip(*split, is_hidden, strict=True):
            q, k = self._rotated(q, mixer.rope), self._rotated(k, mixer.rope)
            if qk_norm is not None and qk_norm.is_after_rotation:
                q, k = self._normed_heads(q, k, qk_norm)
            keys, values = self.model.cached(k), self.model.cached(v)
            mixed.append(self._mix(self._grown(q, mixer), keys, values, mixer, hidden))
        output = torch.cat(mixed, 1)
        if gate is not None:
            output = self.model.rounded(output * self.model.rounded(gate.sigmoid()))
        return self.projected(output, TensorRole.O)

    def _normed_heads(self, query: Tensor, key: Tensor, qk_norm: QkNorm) -> tuple[Tensor, Tensor]:
        pairs = ((query, TensorRole.Q_NORM), (key, TensorRole.K_NORM))
        if qk_norm.span is not NormSpan.WIDTH:
            query, key = (self.normed(x, role, qk_norm.norm) for x, role in pairs)
        else:
            query, key = (self.normed(x.flatten(2), role, qk_norm.norm).view_as(x) for x, role in pairs)
        return query, key

    def _grown(self, query: Tensor, mixer: Attention | Latent) -> Tensor:
        growth = mixer.query_growth
        if growth is None:
            return query
        turns = torch.arange(query.shape[1]) // growth.original_length
        factors = 1 + growth.beta * torch.log(1 + turns.float())
        return self.model.rounded(query * factors[:, None, None])

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mixer: Attention | Latent,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """[copies, n, heads * width] for query [copies, n, heads, head_dim], key [copies, n, kv_heads,
        head_dim] and value [copies, n, kv_heads, width]. `hidden` [copies, 1, n, n]: further tokens that a
        query does not see.
        """
        num_tokens = query.shape[1]
        queries, keys, values = (
            x.repeat_interleave(mixer.num_heads // x.shape[2], dim=2).transpose(1, 2)
            for x in (query, key, value)
        )
        positions = torch.arange(num_tokens)
        distance = positions[:, None] - positions
        is_hidden = (distance < 0) | (distance >= (mixer.window or num_tokens))
        scores = queries @ keys.transpose(2, 3) / (1 / mixer.scale)  # the rounding of recorded references
        if mixer.softcap is not None:
            scores = _limited(scores, mixer.softcap)
        scores = scores.masked_fill(is_hidden if hidden is None else is_hidden | hidden, -math.inf)
        if mixer.has_sinks:
            sinks = self.model.vector(self.places[TensorRole.SINKS, SINKS_KIND, None])
            scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
        weights = self.model.rounded(scores.softmax(dim=-1)[..., :num_tokens])
        return self.model.rounded((weights @ values).transpose(1, 2).flatten(2))

    def _rotated(self, heads: Tensor, rope: RopeConfig | None) -> Tensor:
        """Rotate the pairs of `heads` [copies, n, heads, width] in the order of the checkpoint."""
        return heads if rope is None else self.model.rounded(rotated_pairs(heads, rope))


def compute_reference(
    request: ReferenceRequest, directory: Path, *, free_bytes: int, progress: LoadProgress
) -> Reference:
    """Compute the reference of the checkpoint in `directory`, within `free_bytes`.

    Raises:
        HandshakeMismatch: The checkpoint differs, is unreadable, or has non-finite logits.
        Overloaded: The computation needs more memory.
        InvalidRequest: A token is outside the vocabulary, or the family has no row.
        StaleStream: `progress` was cancelled.
    """
    try:
        checkpoint = Checkpoint.open(directory)
        if checkpoint.fingerprint != request.fingerprint:
            raise fingerprint_mismatch(checkpoint, expected=request.fingerprint)
        if not checkpoint.config.has_row:
            raise InvalidRequest(f"{checkpoint.config.model_type!r} has no native layers to compare with")
        rounded = checkpoint.with_weights(request.weights)
        rounded = rounded.with_long_rope(is_long=request.has_long_rope)
        _check_size(request, rounded, free_bytes)
        return _compute(request, rounded, progress)
    except (CheckpointError, ValueError, OSError) as error:
        raise HandshakeMismatch(
            "checkpoint", expected="one to compute a reference from", got=f"{type(error).__name__}: {error}"
        ) from error
    except StageLoadError as error:
        raise StaleStream("the reference was cancelled") from error


def _check_size(request: ReferenceRequest, checkpoint: Checkpoint, free_bytes: int) -> None:
    vocab_size = checkpoint.config.vocab_size
    if (largest := max(map(max, request.texts))) >= vocab_size:
        raise InvalidRequest(f"token {largest} is outside the vocabulary [0, {vocab_size})")
    needed_bytes = reference_bytes(checkpoint, request.dtype, list(map(len, request.texts)))
    if needed_bytes > free_bytes:
        raise Overloaded(f"the reference needs {needed_bytes} bytes of memory, {free_bytes} are free")


@torch.inference_mode()
def _compute(request: ReferenceRequest, checkpoint: Checkpoint, progress: LoadProgress) -> Reference:
    model = StreamedModel(
        checkpoint,
        request.dtype,
        wire_dtype=request.wire_dtype,
        kv_dtype=request.kv_dtype,
        on_progress=lambda _: progress.advance(0),
    )
    layers: list[LayerReference] = []
    for hidden in model.hidden_states(request.texts):
        roundings = roundings_of(relative_changes(hidden))
        layers.append(LayerReference(as_array(project(hidden[EXACT])), roundings))
    summary = HeadSummary(request.texts, num_top=request.num_top)
    try:
        for first, logits in model.logits(hidden):
            summary.add(first, logits)
    except NonFiniteReference as error:
        raise HandshakeMismatch(
            f"logits of the checkpoint in {request.dtype.value}",
            expected="finite numbers",
            got=f"others for position {error.position} of text {error.text}",
        ) from error
    return Reference(tuple(summary.texts()), tuple(layers), summary.logit_spread)
