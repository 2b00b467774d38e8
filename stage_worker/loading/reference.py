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
from torch.nn.functional import gelu, linear, relu, silu

from checkpoint import (
    Checkpoint,
    CheckpointError,
    Dense,
    DType,
    Experts,
    GatedDelta,
    Latent,
    LayerPlan,
    Norm,
    RopeConfig,
    ScaledDType,
    WeightFormat,
)
from checkpoint.blueprint import (
    Activation,
    Attention,
    ClampedSwiGlu,
    GroupScore,
    NormKind,
    NormSpan,
    Placement,
    QkNorm,
    RouterScore,
)
from checkpoint.names import TensorRole
from checkpoint.tensors import (
    CHOICE_BIAS_KIND,
    DECAY_KIND,
    DT_KIND,
    EXPERT_SCALE_KIND,
    LAYER_SCALE_KIND,
    ROUTER_NORM_KIND,
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
from stage_worker.loading.head_summary import HeadSummary, NonFiniteReference, relative_rounding
from stage_worker.loading.reference_memory import reference_bytes, rows_per_block
from stage_worker.loading.stage_loader import fingerprint_mismatch
from stage_worker.loading.streamed_delta import delta_inputs
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.model.quantize import rounded_to
from stage_worker.model.rope import rotated_pairs
from stage_worker.model.weights import load_rows
from wire.errors import HandshakeMismatch, InvalidRequest, Overloaded, StaleStream
from wire.reference import LayerReference, Reference, TextReference
from wire.tensors import WireDType

_Masks = list[Tensor | None]


class StreamedModel:
    """Computes several texts in one pass over the weights, without a KV cache, on the CPU.

    Hidden states are [2, n, width] for the n tokens of all texts in order: exact, and rounded after every
    operation.
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
        self.not_chosen: _Masks = []  # of each text, by the last layer with an indexer
        # Reused by all blocks: freed ones of megabytes stay with the allocator, which then holds several.
        self._stored_block = torch.empty(0, dtype=self._dtype)
        self._block = torch.empty(0)

    def hidden_states(self, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield the hidden states [2, n, width] after each layer. Raises like `load_tensors`."""
        config, lengths = self._config, [len(text) for text in texts]
        name = config.names.embeddings
        embedded = torch.cat([self._rows(name, token, token + 1) for text in texts for token in text])
        scale = torch.tensor(config.embedding_scale, dtype=self._dtype).float()
        hidden = self.rounded(torch.stack((embedded, embedded)) * scale)
        for index, plan in enumerate(config.layers):
            self._fraction = index / config.num_layers
            layer = _StreamedLayer(self, plan, rows_of_roles(config, index))
            hidden = self._as_sent(layer.output(hidden, lengths))
            yield hidden

    def logits(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (first token, logits float32 [2, n, m]) per block of m tokens."""
        config = self._config
        rows = [self._rows(name, 0, config.hidden_size) for name in final_norm_tensors(config)]
        normed = self.normed(hidden, config.final_norm, *rows)
        head = RoleRows(head_tensor(config), 0, config.vocab_size)
        for first, block in self._blocks(head):
            logits = self.rounded(linear(normed, block)) * config.logit_scale
            yield first, logits if config.logit_softcap is None else _limited(logits, config.logit_softcap)

    def _as_sent(self, hidden: Tensor) -> Tensor:
        if self._wire_dtype is not None:
            sent = to_wire(hidden[1], self._wire_dtype)
            hidden[1] = from_wire(sent, device=hidden.device, dtype=self._dtype)
        return hidden

    def cached(self, x: Tensor) -> Tensor:
        """Round the second of keys or values `x` [2, n, kv_heads, width], or of latents, as pages do."""
        if self._kv_element is not None:
            x[1] = unscaled_rows(*scaled_rows(x[1], self._kv_element), self._kv_element, self._dtype)
        return x

    def normed(self, x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Norm `x` [2, ..., width]."""
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
        """A whole vector that stages keep in float32."""
        return self._load(rows.name, 0, torch.empty(self._checkpoint.shape_of(rows.name))).flatten()

    def exact_products(self, x: Tensor, matrix: RoleRows) -> Tensor:
        """Products with a matrix that stages keep in float32, or multiply by in float32."""
        width, end, products = x.shape[-1], matrix.end, []
        for first in range(matrix.begin, end, rows_per_block(width)):
            rows = torch.empty(min(rows_per_block(width), end - first), width)
            products.append(linear(x, self._load(matrix.name, first, rows)))
        return torch.cat(products, dim=-1)

    def projected(self, x: Tensor, weight: RoleRows, bias: RoleRows | None) -> Tensor:
        """[2, n, out] for x [2, n, in]."""
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
        """Round the second of `x` [2, ...]."""
        x[1] = x[1].to(self._dtype)
        return x


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    Activation.RELU2: lambda x: relu(x) ** 2,
}


def _limited(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


class _StreamedLayer:
    """One layer, whose weights are read when they are used."""

    def __init__(self, model: StreamedModel, plan: LayerPlan, places: RolePlaces) -> None:
        self._model, self._plan, self._places = model, plan, places

    def output(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Hidden states after the layer, [2, n, width] as `hidden`, of texts of `lengths`."""
        plan = self._plan
        normed = self._normed(hidden, TensorRole.MIXER_NORM)
        hidden = self._added(hidden, self._mixed(normed, lengths), TensorRole.MIXER_OUT_NORM)
        if plan.placement is not Placement.SHARED:
            normed = self._normed(hidden, TensorRole.FFN_NORM)
        hidden = self._added(hidden, self._feed_forward(normed, hidden), TensorRole.FFN_OUT_NORM)
        if not plan.has_scale:
            return hidden
        scale = self._model.vector(self._places[TensorRole.LAYER_SCALE, LAYER_SCALE_KIND, None])
        return self._model.rounded(hidden * scale)

    def _added(self, residual: Tensor, x: Tensor, out_norm: TensorRole) -> Tensor:
        return self._model.rounded(residual + self._plan.residual_scale * self._normed(x, out_norm))

    def _normed(self, x: Tensor, role: TensorRole, norm: Norm | None = None) -> Tensor:
        """`x` unchanged if the layer has no such norm."""
        if (weight := self._places.get((role, "weight", None))) is None:
            return x
        bias = self._places.get((role, "bias", None))
        vectors = [self._model.vector(rows) for rows in (weight, bias) if rows is not None]
        return self._model.normed(x, norm or self._plan.norm, *vectors)

    def _projected(self, x: Tensor, role: TensorRole, expert: int | None = None) -> Tensor:
        places = self._places
        return self._model.projected(x, places[role, "weight", expert], places.get((role, "bias", expert)))

    def _feed_forward(self, x: Tensor, residual: Tensor) -> Tensor:
        plan = self._plan.known_feed_forward
        if isinstance(plan, Dense):
            return self._mlp(x, plan, (TensorRole.GATE, TensorRole.UP, TensorRole.DOWN))
        if plan.branch_norm is None:
            mixed = self._chosen(x, x, plan)
        else:
            mixed = self._branch(residual, plan, plan.branch_norm)
        if plan.shared is None:
            return mixed
        roles = (TensorRole.SHARED_GATE, TensorRole.SHARED_UP, TensorRole.SHARED_DOWN)
        shared = self._normed(self._mlp(x, plan.shared, roles), TensorRole.SHARED_OUT_NORM, plan.branch_norm)
        if plan.has_shared_gate:
            weight = self._model.rounded(self._projected(x, TensorRole.SHARED_WEIGHT).sigmoid())
            shared = self._model.rounded(shared * weight)
        return self._model.rounded(mixed + shared)

    def _mlp(
        self,
        x: Tensor,
        plan: Dense | Experts,
        roles: tuple[TensorRole, TensorRole, TensorRole],
        expert: int | None = None,
    ) -> Tensor:
        """`roles` are gate, up and down, of one expert or of all tokens."""
        gate, up, down = roles
        activation, inner = plan.activation, self._projected(x, up, expert)
        if isinstance(activation, ClampedSwiGlu):
            inner = self._clamped(activation, self._projected(x, gate, expert), inner)
        elif isinstance(plan, Experts) or plan.is_gated:
            gates = _ACTIVATIONS[activation](self._projected(x, gate, expert))
            inner = self._model.rounded(gates) * inner
        else:
            inner = _ACTIVATIONS[activation](inner)
        return self._projected(self._model.rounded(inner), down, expert)

    def _clamped(self, plan: ClampedSwiGlu, gate: Tensor, up: Tensor) -> Tensor:
        rounded = self._model.rounded
        gate, up = gate.clamp(max=plan.limit), up.clamp(-plan.limit, plan.limit)
        sigmoid = rounded(rounded(plan.alpha * gate).sigmoid())
        return rounded(up + 1) * rounded(gate * sigmoid)

    def _branch(self, residual: Tensor, plan: Experts, norm: Norm) -> Tensor:
        """The experts beside an MLP."""
        rows = self._model.vector(self._places[TensorRole.ROUTER_NORM, ROUTER_NORM_KIND, None])
        routed = self._model.normed(residual, Norm(kind=NormKind.RMS, eps=norm.eps), rows)
        routed = self._model.rounded(routed * residual.shape[-1] ** -0.5)
        mixed = self._chosen(self._normed(residual, TensorRole.EXPERTS_NORM, norm), routed, plan)
        return self._normed(mixed, TensorRole.EXPERTS_OUT_NORM, norm)

    def _chosen(self, x: Tensor, routed: Tensor, plan: Experts) -> Tensor:
        """The experts' results, of tokens that one of both copies of `x` gives to them."""
        shares = self._shares(routed, plan)
        mixed = torch.zeros_like(x)
        roles = (TensorRole.EXPERT_GATE, TensorRole.EXPERT_UP, TensorRole.EXPERT_DOWN)
        for expert in range(plan.count):
            tokens = shares[..., expert].any(dim=0).nonzero()[:, 0]
            if len(tokens):
                found = self._mlp(x[:, tokens], plan, roles, expert)
                mixed[:, tokens] += found * shares[:, tokens, expert, None]
        return self._model.rounded(mixed)

    def _shares(self, x: Tensor, plan: Experts) -> Tensor:
        """Weight of each expert for each token [2, n, experts], 0 if it is not chosen."""
        router = plan.router
        if router.is_wide:
            logits = self._model.exact_products(x, self._places[TensorRole.ROUTER, "weight", None])
        else:
            logits = self._projected(x, TensorRole.ROUTER)
        scores = logits.sigmoid() if router.score is RouterScore.SIGMOID else logits.softmax(dim=-1)
        ranks = scores
        if router.has_choice_bias:
            ranks = scores + self._model.exact(self._places[TensorRole.CHOICE_BIAS, CHOICE_BIAS_KIND, None])
        if router.num_groups > 1:
            groups = ranks.view(*ranks.shape[:2], router.num_groups, -1)
            num_best = 2 if router.group_score is GroupScore.BEST_TWO else 1
            best = groups.sort(dim=-1).values[..., -num_best:].sum(dim=-1)
            is_kept = _is_among(best, router.num_kept_groups)
            ranks = groups.masked_fill(~is_kept[..., None], -math.inf).flatten(-2)
        chosen = scores.masked_fill(~_is_among(ranks, plan.per_token), 0.0)
        if router.is_normalised:
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        if router.has_expert_scale:
            chosen = chosen * self._model.vector(
                self._places[TensorRole.EXPERT_SCALE, EXPERT_SCALE_KIND, None]
            )
        return chosen * router.scaling

    def _mixed(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        mixer = self._plan.mixer
        if isinstance(mixer, Latent):
            return self._latent_attention(x, lengths, mixer)
        if isinstance(mixer, GatedDelta):
            return self._delta(x, lengths, mixer)
        return self._attention(x, lengths, mixer)

    def _delta(self, x: Tensor, lengths: Sequence[int], mixer: GatedDelta) -> Tensor:
        """The gated delta rule, token by token."""
        model, places = self._model, self._places
        decay, dt_bias = (
            model.exact(places[role, kind, None])
            for role, kind in ((TensorRole.STATE_DECAY, DECAY_KIND), (TensorRole.STATE_DT, DT_KIND))
        )
        inputs = delta_inputs(
            mixer,
            torch.cat([self._projected(x, role) for role in (TensorRole.DELTA_QKV, TensorRole.DELTA_Z)], -1),
            torch.cat([self._projected(x, role) for role in (TensorRole.DELTA_B, TensorRole.DELTA_A)], -1),
        )
        kernel = model.kernel(places[TensorRole.STATE_CONV, "weight", None])
        mixed = inputs.mixed_by(mixer, kernel, (decay, dt_bias), lengths, model.rounded)
        norm = Norm(eps=mixer.norm_eps)
        output = self._normed(model.rounded(mixed), TensorRole.STATE_NORM, norm).flatten(2)
        return self._projected(model.rounded(output * silu(inputs.gate)), TensorRole.STATE_OUT)

    def _latent_attention(self, x: Tensor, lengths: Sequence[int], mixer: Latent) -> Tensor:
        """Expanded: each head has keys and values."""
        if mixer.query_rank is None:
            down, query = x, self._projected(x, TensorRole.Q)
        else:
            down = self._normed(self._projected(x, TensorRole.Q_DOWN), TensorRole.Q_LATENT_NORM, mixer.norm)
            query = self._projected(down, TensorRole.Q_UP)
        query = query.view(*query.shape[:2], mixer.num_heads, -1)
        if mixer.indexer is not None:
            self._model.not_chosen = self._not_chosen(x, down, lengths, mixer)
        latent, shared = self._projected(x, TensorRole.KV_DOWN).tensor_split((mixer.kv_rank,), dim=-1)
        latent = self._normed(latent, TensorRole.KV_LATENT_NORM, mixer.norm)
        mixed = []
        split = (rows.split_with_sizes(list(lengths), dim=1) for rows in (query, latent, shared))
        is_hidden = self._model.not_chosen if mixer.top_k is not None else [None] * len(lengths)
        for q, c, k, hidden in zip(*split, is_hidden, strict=True):
            plain, turning = q.split_with_sizes((mixer.nope_dim, mixer.rope_dim), dim=-1)
            q = torch.cat((plain, self._rotated(turning, mixer.rope)), dim=-1)
            kept = torch.cat((c[:, :, None], self._rotated(k[:, :, None], mixer.rope)), dim=-1)
            c, k = self._model.cached(kept).split_with_sizes((mixer.kv_rank, mixer.rope_dim), dim=-1)
            keys, values = self._expanded(c[:, :, 0], mixer)
            keys = torch.cat((keys, k.expand(-1, -1, mixer.num_heads, -1)), dim=-1)
            mixed.append(self._mix(self._grown(q, mixer), keys, values, mixer, hidden))
        return self._projected(torch.cat(mixed, 1), TensorRole.O)

    def _expanded(self, latents: Tensor, mixer: Latent) -> tuple[Tensor, Tensor]:
        """Keys and values [2, n, heads, width] of `latents` [2, n, kv_rank]."""
        if not mixer.is_split:
            both = self._projected(latents, TensorRole.KV_UP).view(*latents.shape[:2], mixer.num_heads, -1)
            return both[..., : mixer.nope_dim], both[..., mixer.nope_dim :]
        places, heads = self._places, range(mixer.num_heads)
        across = (replace(places[TensorRole.HEAD_KEYS, "weight", head], is_across=True) for head in heads)
        keys = [self._model.projected(latents, rows, None) for rows in across]
        values = [self._projected(latents, TensorRole.HEAD_VALUES, head) for head in heads]
        return torch.stack(keys, 2), torch.stack(values, 2)

    def _not_chosen(self, x: Tensor, latents: Tensor, lengths: Sequence[int], mixer: Latent) -> _Masks:
        """Whether each query [2, 1, n, n] does not see a token, of each text; None if it sees all."""
        indexer, rope, count = mixer.indexer, mixer.rope, mixer.top_k
        assert indexer and rope and count, "a mixer without indexer"
        heads = self._projected(latents, TensorRole.INDEX_Q).view(*x.shape[:2], indexer.num_heads, -1)
        keys = self._normed(self._projected(x, TensorRole.INDEX_K), TensorRole.INDEX_K_NORM, indexer.norm)
        weights = self._model.exact_products(x, self._places[TensorRole.INDEX_WEIGHT, "weight", None])
        rope = replace(rope, width=mixer.rope_dim, is_interleaved=indexer.is_interleaved)
        found: _Masks = [None] * len(lengths)
        rows = (part.split_with_sizes(list(lengths), dim=1) for part in (heads, keys[:, :, None], weights))
        for index, (q, k, w) in enumerate(zip(*rows, strict=True)):
            if lengths[index] > count:
                scores = self._rotated(q, rope).transpose(1, 2) @ self._rotated(k, rope).permute(0, 2, 3, 1)
                total = (w.transpose(1, 2)[..., None] * scores.relu()).sum(1)
                found[index] = ~_is_among(total + torch.full_like(total, -math.inf).triu(1), count)[:, None]
        return found

    def _attention(self, x: Tensor, lengths: Sequence[int], mixer: Attention) -> Tensor:
        source_of_values = TensorRole.K if mixer.value_is_key else TensorRole.V
        projected = (self._projected(x, role) for role in (TensorRole.Q, TensorRole.K, source_of_values))
        query, key, value = (y.view(*y.shape[:2], -1, mixer.head_dim) for y in projected)
        gate = None
        if mixer.has_output_gate:
            query, gate = query[:, :, ::2], query[:, :, 1::2].flatten(2)
        if mixer.value_norm_eps is not None:
            mean_square = value.square().mean(dim=-1, keepdim=True)
            value = self._model.rounded(value * torch.rsqrt(mean_square + mixer.value_norm_eps))
        qk_norm = mixer.qk_norm
        if qk_norm is not None and not qk_norm.is_after_rotation:
            query, key = self._normed_heads(query, key, qk_norm)
        split = (heads.split_with_sizes(list(lengths), dim=1) for heads in (query, key, value))
        mixed = []
        for q, k, v in zip(*split, strict=True):
            q, k = self._rotated(q, mixer.rope), self._rotated(k, mixer.rope)
            if qk_norm is not None and qk_norm.is_after_rotation:
                q, k = self._normed_heads(q, k, qk_norm)
            keys, values = self._model.cached(k), self._model.cached(v)
            mixed.append(self._mix(self._grown(q, mixer), keys, values, mixer))
        output = torch.cat(mixed, 1)
        if gate is not None:
            output = self._model.rounded(output * self._model.rounded(gate.sigmoid()))
        return self._projected(output, TensorRole.O)

    def _normed_heads(self, query: Tensor, key: Tensor, qk_norm: QkNorm) -> tuple[Tensor, Tensor]:
        pairs = ((query, TensorRole.Q_NORM), (key, TensorRole.K_NORM))
        if qk_norm.span is not NormSpan.WIDTH:
            query, key = (self._normed(x, role, qk_norm.norm) for x, role in pairs)
        else:
            query, key = (self._normed(x.flatten(2), role, qk_norm.norm).view_as(x) for x, role in pairs)
        return query, key

    def _grown(self, query: Tensor, mixer: Attention | Latent) -> Tensor:
        growth = mixer.query_growth
        if growth is None:
            return query
        turns = torch.arange(query.shape[1]) // growth.original_length
        factors = 1 + growth.beta * torch.log(1 + turns.float())
        return self._model.rounded(query * factors[:, None, None])

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mixer: Attention | Latent,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """[2, n, heads * width] for query [2, n, heads, head_dim], key [2, n, kv_heads, head_dim] and value
        [2, n, kv_heads, width]. `hidden` [2, 1, n, n]: further tokens that a query does not see.
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
        if isinstance(mixer, Attention) and mixer.has_sinks:
            sinks = self._model.vector(self._places[TensorRole.SINKS, SINKS_KIND, None])
            scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
        weights = self._model.rounded(scores.softmax(dim=-1)[..., :num_tokens])
        return self._model.rounded((weights @ values).transpose(1, 2).flatten(2))

    def _rotated(self, heads: Tensor, rope: RopeConfig | None) -> Tensor:
        """Rotate the pairs of `heads` [2, n, heads, width] in the order of the checkpoint."""
        return heads if rope is None else self._model.rounded(rotated_pairs(heads, rope))


def _is_among(ranks: Tensor, count: int) -> Tensor:
    """Whether each of `ranks` [..., n] is one of the `count` highest; of equal ones, the first are."""
    places = ranks.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return places < count


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
        layers.append(LayerReference(as_array(project(hidden[0])), relative_rounding(hidden)))
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
    rows = iter(summary.rows())
    texts = tuple(TextReference(text, tuple(next(rows) for _ in text)) for text in request.texts)
    return Reference(texts, tuple(layers), summary.logit_spread, summary.rounding)
