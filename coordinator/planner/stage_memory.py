"""Memory and cost of the stages of a model, from which plans are made.

Activation memory, with s bytes per element, T tokens and S sequences in the largest step, K tokens of KV, and
a longest sequence of C = min(max_sequence_tokens, K) tokens:

* T * `_token_bytes`: the residual stream with its normed copy (2 * hidden * s); float32 copies of both in the
  norm (2 * hidden * 4); q, k, v before and after rotation (2 * (q + 2 * kv) * s) and the attention output
  (q * s); gate, up and their product (3 * intermediate * s); one received and one sent frame
  (2 * hidden * s). Layers run one after the other and reuse this memory; the largest one of the model counts.
  A mixture of E experts instead has the router's logits, scores and order (E * 20), and for each expert that
  a token chooses its row, gate, up and their product, its result before and after sorting
  ((3 * hidden + 3 * width) * s), and the latter in float32 with its weight (8 * hidden). By transformers'
  layers it has its row, gate and up, biases of both, and up to five rows between them
  ((hidden + 7 * width) * s, and 2 * width * s of biases), or its result as above, whichever is more.
* Latent attention has instead of q, k, v: latents before and after their norms, queries before and after
  rotation, in the width of latents, mixed latents, and the attention output twice; and, for a prompt, keys
  and values of some heads for C tokens, with a float32 copy of the keys.
* An indexer has queries and a key of each token, in the run dtype and queries in float32, too; and if C is
  above its top_k, its keys of all gathered tokens with a float32 copy, scores of some heads, their sum with
  copies while tokens are chosen, and T * top_k numbers of chosen tokens (4). An indexer of blocks likewise
  has scores of blocks, and two masks of tokens (4 each) with a temporary (1) for the queries of a step's
  decodes, or of a block of a prompt. Kernels of GPUs that choose blocks have no masks: the keys of all
  blocks, and scores, choices and results of parts of keys of a group of queries at a time.
* N-grams have for each token three numbers of each head (8), their rows twice, and of all residual streams
  eight times their width in the run dtype, and twice in float32.
* Compressed attention reads the keys of windows, pools entries, and reads entries of all gathered tokens, or
  their keys and the entries that an indexer chooses, with float32 copies, and scores of all heads; see
  `planner.compressed_memory`. What it computes of a token is counted as in latent attention, with its output
  in float32 twice, while parts of its keys are joined. Kernels of GPUs attend to keys and entries in place.
* min(S * C, K) tokens of K and V gathered from the pages of one layer (2 * kv * s each): one more layer of
  KV. Padding of sequences that are gathered together, and copies of shared prefixes, are not counted.
* T * C * `_mask_bytes` for prefill: for every distinct window of the layers, the mask as bool and its
  temporary (2), in the run dtype and aligned for a kernel (2 * s). Scores are not counted: the fused kernels
  of scaled_dot_product_attention do not store them.
* S recurrent states of one layer, gathered, their changes, and as they are written; and products between
  the tokens of a chunk of a prompt, for every head.
* with the head, min(S, T) rows of logits: in the run dtype (s), for sampling in float32 with a filtered copy
  (8), sorted with ids (12), and in float64 scaled, as probabilities, summed and cut (48).

The process itself is not part of the budget (see `WorkerCapacity`).

On a GPU whose kernels attend to pages in place, there are no gathered keys and values and no masks, except
in layers with latent attention and in those by transformers, and recurrent states are not copied. Instead,
results of parts of keys are kept in float32, with two more numbers per head, until they are merged: a decode
has one per `KEY_SPLIT` keys, a query of a short slice of a prompt one per `CHUNK_SPLIT`. With torch's
operators on a GPU, gathered keys and values are copied once more, into the order of heads. Any GPU has
staging memory (`wire.staging`), tables of rotary angles for twice the longest sequence or `KEPT_POSITIONS`
(2 * head_dim * s for cos and sin, and while they are computed, before the layers, 22 * head_dim + 8), for
every kind of heads and for every block of the longest sequence that an indexer may choose, and
`GPU_OVERHEAD_BYTES`; one with these kernels has CUDA graphs (`checkpoint.step_graphs`).

The cost of a stage is the bytes of weights that one decode step reads: its layers, and on the last stage the
final norm and the output head. Of a layer's E experts, a step of B sequences reads on average
E * (1 - (1 - k / E)^B), if each sequence chooses k; of a table of n-grams it reads a few rows, which count
nothing. B is max_step_sequences / stages, so that all sequences
are evenly spread. Decoding is bound by memory bandwidth, because at small batch sizes every
weight is read once per step, so time is proportional to cost. In prefill, which is bound by compute, work has
the same proportion: one multiplication per weight element and token. The embedding is a lookup of a few rows
and costs nothing.

Workers count as equally fast, unless all of them tell rates, and these differ (see `planner.rates`). Then
the cost of a layer on a worker is its time in that decode step, in picoseconds: the longer one of reading its
bytes, and of two operations for each element and sequence that is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import mul

from checkpoint import (
    EXPANDED_ELEMENTS,
    INDEX_ELEMENTS,
    Attention,
    Blueprint,
    Compressed,
    DType,
    Experts,
    Latent,
    LayerPlan,
    Mixer,
    NoFeedForward,
    Opaque,
    Pageless,
    ScaledDType,
    cached_bytes_per_token,
    entry_bytes_per_block,
    expert_weight_bytes,
    head_bytes,
    held_expert_bytes,
    kv_bytes_per_token,
    layer_sizes,
    layer_weight_bytes,
    stage_weight_bytes,
    state_bytes,
)
from checkpoint.block_indexer import BlockIndexer
from checkpoint.choices import block_indexer_of, no_choice_kernels_because, top_k_of
from checkpoint.devices import no_kernels_because
from checkpoint.held import stage_table_bytes, table_bytes
from checkpoint.implementation import Implementation
from checkpoint.step_graphs import graph_bytes
from checkpoint.step_sizes import (
    BLOCK_SCORES,
    CHUNK_SPLIT,
    FEWEST_QUERIES,
    KEPT_POSITIONS,
    KEY_SPLIT,
    SHORT_CHUNK,
)
from coordinator.planner.choice_memory import block_choice_bytes, block_mask_bytes, group_elements
from coordinator.planner.compressed_memory import CompressedStep
from coordinator.planner.mixer_sizes import (
    RotaryTables,
    chunk_bytes,
    mixer_elements,
    recurrent_elements,
    rotary_tables,
    stream_bytes,
)
from coordinator.planner.plan import DeviceKind, StepLimits
from kvcache import KvGroup, KvWindow, group_windows
from wire.device_rates import DeviceRates
from wire.ids import StageRole
from wire.staging import StagingSizes, hop_segment_bytes
from wire.tensors import WireDType, payload_bytes

GPU_OVERHEAD_BYTES = 384 * 1024 * 1024
"""Memory of a GPU that a stage takes beside its tensors, after the context exists. Estimated, not measured:
workspaces of cuBLAS and cuBLASLt (32 MiB each on Hopper), modules that libraries load with their first use
(some 150 MiB), and the rest of the 2 MiB and 20 MiB segments in which torch's allocator takes memory.
"""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of the stages of one model under one set of limits, in bytes.

    Layers may differ. Activations count the largest layer of the model. Unless `shares_memory`, hidden states
    do not travel in shared memory on any hop.
    """

    config: Blueprint
    dtype: DType
    limits: StepLimits
    block_size: int
    num_stages: int
    kv_dtype: ScaledDType | None = None
    wire_dtype: WireDType | None = None
    num_states: int = 0
    implementation: Implementation = Implementation.NATIVE
    shares_memory: bool = True

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of the weights of each layer."""
        return layer_sizes(self.config, self.dtype)

    def layer_costs(self) -> tuple[int, ...]:
        """Bytes of weights of each layer that a decode step reads."""
        return tuple(size - self._unread_bytes(layer) for layer, size in enumerate(self.layer_bytes))

    def step_ps(self, rates: DeviceRates) -> tuple[int, ...]:
        """Picoseconds of each layer in a decode step on a device."""
        costs, products = self.layer_costs(), self._layer_products()
        return tuple(_step_ps(rates, *work) for work in zip(costs, products, strict=True))

    def head_ps(self, rates: DeviceRates) -> int:
        """Picoseconds of the head in a decode step on a device."""
        return _step_ps(rates, self.head_cost, self.head_cost / self.dtype.size_bytes * self.step_sequences)

    def _layer_products(self) -> list[float]:
        """Multiplications of each layer in a decode step: elements that each of its sequences meets."""
        hidden_size, size = self.config.hidden_size, self.dtype.size_bytes
        met: dict[LayerPlan, float] = {}
        for kind in self.config.kinds:
            inner, num_bytes = (
                kind.feed_forward,
                layer_weight_bytes(hidden_size, replace(kind, weights=None), self.dtype),
            )
            if isinstance(inner, Experts):
                of_experts = expert_weight_bytes(hidden_size, kind, self.dtype)
                num_bytes -= round(of_experts * (1.0 - inner.per_token / inner.count))
            num_bytes -= table_bytes(kind, self.dtype)
            met[kind] = num_bytes / size * self.step_sequences
        return [met[layer] for layer in self.config.layers]

    @property
    def step_sequences(self) -> float:
        """Sequences of an average step, if all sequences are evenly spread over the stages; at least one."""
        return max(1.0, self.limits.max_step_sequences / self.num_stages)

    @cached_property
    def _of_experts(self) -> dict[int, tuple[float, int]]:
        """Layers with experts: probability that a token does not choose a given one, and bytes of all."""
        return {
            index: (
                1.0 - layer.feed_forward.per_token / layer.feed_forward.count,
                held_expert_bytes(self.config, index, self.dtype),
            )
            for index, layer in enumerate(self.config.layers)
            if isinstance(layer.feed_forward, Experts)
        }

    def _unread_bytes(self, layer: int) -> int:
        """Bytes of a layer's experts that no sequence of an average step chooses, and of tables."""
        of_tables: int = table_bytes(self.config.layers[layer], self.dtype)
        if layer not in self._of_experts:
            return of_tables
        unchosen, num_bytes = self._of_experts[layer]
        unread: float = unchosen**self.step_sequences
        return of_tables + round(num_bytes * unread)

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block in each layer."""
        sizes = (
            cached_bytes_per_token(layer.mixer, self.dtype, self.kv_dtype) for layer in self.config.layers
        )
        return tuple(self.block_size * size for size in sizes)

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of one recurrent state in each layer, 0 in layers without."""
        return tuple(state_bytes(layer.state_parts, self.dtype) for layer in self.config.layers)

    @cached_property
    def entry_bytes(self) -> tuple[int, ...]:
        """Bytes of the entries of one block in each layer; they are in the first block group."""
        layers = self.config.layers
        return tuple(entry_bytes_per_block(layer.mixer, self.block_size, self.dtype) for layer in layers)

    def states_bytes(self, layer_begin: int, layer_end: int) -> int:
        """Recurrent states of a stage, in all its slots."""
        return self.num_states * sum(self.state_bytes[layer_begin:layer_end])

    @property
    def head_cost(self) -> int:
        """Cost of the head in a decode step: final norm and output matrix, tied or not."""
        return head_bytes(self.config, self.dtype)

    def cost(self, role: StageRole, layer_begin: int, layer_end: int) -> int:
        """Cost of a decode step on a stage."""
        unread = sum(self._unread_bytes(layer) for layer in range(layer_begin, layer_end))
        return (
            sum(self.layer_bytes[layer_begin:layer_end]) - unread + (self.head_cost if role.has_head else 0)
        )

    def weight_bytes(
        self, role: StageRole, layer_begin: int, layer_end: int, device: DeviceKind = DeviceKind.HOST
    ) -> int:
        """Weights of a stage on its device: its layers, and the embeddings and head of its role."""
        weights = self.outside_bytes(role) + sum(self.layer_bytes[layer_begin:layer_end])
        return weights - self.host_table_bytes(layer_begin, layer_end, device)

    def host_table_bytes(self, begin: int, end: int, device: DeviceKind) -> int:
        """Tables of layers [begin, end) that a GPU reads on its host; 0 on a CPU, where they are weights."""
        return 0 if device is DeviceKind.HOST else stage_table_bytes(self.config, self.dtype, begin, end)

    def outside_bytes(self, role: StageRole) -> int:
        """Weights of a role besides its layers. FIRST and LAST both hold tied embeddings, ONLY once."""
        return self._outside_bytes[role]

    @cached_property
    def _outside_bytes(self) -> Mapping[StageRole, int]:
        """By role; a search of a split asks hundreds of times."""
        one_layer = partial(stage_weight_bytes, self.config, self.dtype, 0, 1)
        return {
            role: one_layer(has_embeddings=role.has_embeddings, has_head=role.has_head) - self.layer_bytes[0]
            for role in StageRole
        }

    @cached_property
    def windows(self) -> tuple[KvWindow | None, ...]:
        """Window of each block group, in the order of the groups."""
        widths = group_windows(self.config.cache_windows)
        return tuple(KvWindow.of(width, self.limits.max_step_tokens) for width in widths)

    @cached_property
    def _layer_windows(self) -> tuple[KvWindow | None, ...]:
        max_step_tokens = self.limits.max_step_tokens
        return tuple(KvWindow.of(width, max_step_tokens) for width in self.config.layer_windows)

    def block_limits(self, most: int) -> tuple[int, ...]:
        """Blocks that each layer needs at most, if the first block group has up to `most`."""
        limits = {window: self.block_limit(window, most) for window in self.windows}
        return tuple(limits[window] for window in self._layer_windows)

    def block_limit(self, window: KvWindow | None, most: int) -> int:
        """Blocks that the group of `window` needs at most: `most` in the first group.

        Other groups hold the window and one step for every sequence in flight.
        """
        if window is None or window == self.windows[0]:
            return most
        return min(most, self.num_in_flight * window.num_blocks(self.block_size))

    def other_groups(self, num_blocks: int) -> tuple[KvGroup, ...]:
        """The block groups after the first, which has `num_blocks`."""
        return tuple(KvGroup(self.block_limit(window, num_blocks), window) for window in self.windows[1:])

    @property
    def num_in_flight(self) -> int:
        """Sequences in all steps: one step per stage and one that waits."""
        return (self.num_stages + 1) * self.limits.max_step_sequences

    def kv_bytes(self, layer_begin: int, layer_end: int, num_blocks: int) -> int:
        """KV pages and entries of a stage, with `num_blocks` blocks in the first block group, and recurrent
        states.
        """
        counts = self.block_limits(num_blocks)[layer_begin:layer_end]
        pages: int = sum(map(mul, counts, self.block_bytes[layer_begin:layer_end]))
        entries = num_blocks * sum(self.entry_bytes[layer_begin:layer_end])
        return pages + entries + self.states_bytes(layer_begin, layer_end)

    def activation_bytes(self, role: StageRole, num_blocks: int, device: DeviceKind = DeviceKind.HOST) -> int:
        """Activation memory of the largest step with `num_blocks` blocks in the cache."""
        longest = self._longest(num_blocks)
        gathered = min(self.limits.max_step_sequences * longest, num_blocks * self.block_size)
        is_in_place = self._computes_in_place(device)
        if is_in_place and (top_k := self._chosen_in_place()) is not None:
            return self._choosing_bytes(role, longest, top_k)
        blocks = self._blocks_in_place() if is_in_place else None
        gathers = [not (is_in_place and self._attends_in_place(kind)) for kind in self.config.kinds]
        num_copies = 1 if device is DeviceKind.HOST else 2
        size = self.limits.max_step_tokens * longest * self._mask_bytes() if any(gathers) else 0
        size += max(
            self.limits.max_step_tokens * self._token_bytes(kind, is_in_place=is_in_place)
            + (
                gathered * num_copies * self._gathered_bytes(kind)
                if copies
                else self._in_place_bytes(kind.mixer, *self._read_whole(blocks, longest, gathered))
            )
            for kind, copies in zip(self.config.kinds, gathers, strict=True)
        )
        mixers = [kind.mixer for kind in self.config.kinds]
        size += max((self._expanded_bytes(mixer, longest) for mixer in mixers), default=0)
        size += max((self._index_bytes(mixer, longest, gathered, blocks) for mixer in mixers), default=0)
        if not is_in_place:
            of_entries = [self._compressed(mixer) for mixer in mixers if isinstance(mixer, Compressed)]
            size += max((step.num_bytes(longest, gathered) for step in of_entries), default=0)
            size += self.limits.max_step_sequences * 3 * max(self.state_bytes)
            size += max(chunk_bytes(kind, self.limits.max_step_tokens) for kind in self.config.kinds)
        size += self._logits_bytes() if role.has_head else 0
        return size if device is DeviceKind.HOST else self._with_rotary_bytes(size, longest)

    def _computes_in_place(self, device: DeviceKind) -> bool:
        """Whether kernels of a GPU compute the model, and not torch's operators."""
        if device is not DeviceKind.GPU_IN_PLACE:
            return False
        return no_kernels_because(self.config.kinds, is_float32=self.dtype is DType.F32) is None

    def _chosen_in_place(self) -> int | None:
        """Tokens that kernels of a GPU choose in all layers with pages; None if they do not."""
        kinds = self.config.kinds
        is_native = self.implementation is Implementation.NATIVE and self.dtype is not DType.F32
        are_opaque = any(isinstance(kind.feed_forward, Opaque) for kind in kinds)
        if not is_native or are_opaque or no_choice_kernels_because(kinds) is not None:
            return None
        return top_k_of(kinds)

    def _blocks_in_place(self) -> BlockIndexer | None:
        """The indexer of blocks, if kernels of a GPU choose them in all layers with pages."""
        kinds = self.config.kinds
        are_native = all(isinstance(kind.mixer, Pageless) or self._attends_in_place(kind) for kind in kinds)
        return block_indexer_of(kinds) if are_native and no_choice_kernels_because(kinds) is None else None

    def _read_whole(self, blocks: BlockIndexer | None, longest: int, gathered: int) -> tuple[int, int]:
        """Tokens of the longest sequence, and of all, which queries read without a choice among `blocks`."""
        most = longest if blocks is None else min(longest, (blocks.top_blocks + 1) * blocks.block_size - 1)
        return most, min(gathered, self.limits.max_step_sequences * most)

    def _choosing_bytes(self, role: StageRole, longest: int, top_k: int) -> int:
        """`activation_bytes` on a GPU whose kernels choose `top_k` tokens of each query that sees more.

        Prompts of up to `top_k` tokens have masks, and gather and expand the latents of one sequence. Of all
        others, a group of queries has scores, choices of parts, and results of parts of keys at a time.
        """
        limits, dense = self.limits, min(longest, top_k)
        latents = {kind.mixer for kind in self.config.kinds if isinstance(kind.mixer, Latent)}
        widest = max(latents, key=lambda mixer: mixer.num_heads * mixer.kv_rank)
        size = limits.max_step_tokens * max(
            self._token_bytes(kind, is_in_place=True) for kind in self.config.kinds
        )
        size += limits.max_step_tokens * dense * self._mask_bytes()
        size += max(2 * dense * self._gathered_bytes(kind) for kind in self.config.kinds)
        size += self._expanded_bytes(widest, dense)
        parts = -(-dense // KEY_SPLIT)
        if parts > 1:
            size += limits.max_step_sequences * parts * widest.num_heads * (widest.kv_rank + 2) * 4
        if longest > top_k:
            size += 4 * (limits.max_step_tokens * top_k + group_elements(self.limits, longest, top_k))
        size += self._logits_bytes() if role.has_head else 0
        return self._with_rotary_bytes(size, longest)

    def _with_rotary_bytes(self, step_bytes: int, longest: int) -> int:
        """The memory of a step with its tables of rotary angles, or while the largest one is computed."""
        mixers = [kind.mixer for kind in self.config.kinds if not isinstance(kind.mixer, Pageless)]
        tables = {table for mixer in mixers for table in rotary_tables(mixer)}
        num_positions, of_element = min(KEPT_POSITIONS, 2 * longest), 2 * self.dtype.size_bytes
        rows = {table: self._rotary_rows(table, longest) for table in tables}
        kept = of_element * sum((num_positions + rows[table]) * table.width for table in tables)
        computed = max(max(num_positions, rows[table]) * (22 * table.width + 8) for table in tables)
        return kept + max(step_bytes, computed)

    def _rotary_rows(self, table: RotaryTables, longest: int) -> int:
        """Positions that a step has angles for."""
        if table.stride is not None:
            return -(-longest // table.stride)
        return self.limits.max_step_tokens * (2 if table.has_entries else 1)

    def buffer_bytes(self, role: StageRole, num_blocks: int, device: DeviceKind) -> int:
        """Memory of a device for copies from and to the host, which has as much for them."""
        if device is DeviceKind.HOST:
            return 0
        bounded = self.limits.max_sequence_tokens if self.windows[0] else self._longest(num_blocks)
        sizes = StagingSizes.of(
            max_step_tokens=self.limits.max_step_tokens,
            max_step_sequences=self.limits.max_step_sequences,
            max_sequence_tokens=bounded,
            block_size=self.block_size,
            num_groups=len(self.windows),
            has_head=role.has_head,
            boundary=self.config.boundary,
            dtypes=(self.dtype, self.wire_dtype or self.dtype),
        )
        return sizes.total_bytes

    def segment_bytes(self, role: StageRole) -> int:
        """Memory of the host for payloads to a next stage on it, and as much of a GPU for those that stay."""
        if role.has_head or not self.shares_memory:
            return 0
        tokens, dtype = self.limits.max_step_tokens, self.wire_dtype or self.dtype
        largest = (payload_bytes(part.dtype or dtype, (tokens, part.width)) for part in self.config.boundary)
        return hop_segment_bytes(sum(largest))

    def overhead_bytes(self, role: StageRole, device: DeviceKind) -> int:
        """Memory of a device beside the tensors of a step: workspaces and CUDA graphs."""
        return 0 if device is DeviceKind.HOST else GPU_OVERHEAD_BYTES + self.graph_bytes(role, device)

    def graph_bytes(self, role: StageRole, device: DeviceKind) -> int:
        """Memory of CUDA graphs, which stages have whose kernels attend in place."""
        if not self._computes_in_place(device):
            return 0
        return graph_bytes(
            self.config.kinds,
            self.config.hidden_size,
            self.dtype,
            max_step_tokens=self.limits.max_step_tokens,
            max_step_sequences=self.limits.max_step_sequences,
            sampled_tokens=self.config.vocab_size if role.has_head else 0,
        )

    def step_bytes(self, role: StageRole, num_blocks: int, device: DeviceKind) -> int:
        """What a stage holds beside weights and KV pages."""
        buffers = self.buffer_bytes(role, num_blocks, device) + self.overhead_bytes(role, device)
        return buffers + self.activation_bytes(role, num_blocks, device)

    def total_bytes(
        self,
        role: StageRole,
        layer_begin: int,
        layer_end: int,
        num_blocks: int,
        device: DeviceKind = DeviceKind.HOST,
    ) -> int:
        """Weights, KV pages, activations, buffers and workspaces of a stage."""
        weights = self.weight_bytes(role, layer_begin, layer_end, device)
        kv = self.kv_bytes(layer_begin, layer_end, num_blocks)
        return weights + kv + self.step_bytes(role, num_blocks, device)

    def _longest(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that a step attends to."""
        return min(self.limits.max_sequence_tokens, num_blocks * self.block_size)

    def _in_place_bytes(self, mixer: Mixer, longest: int, read: int) -> int:
        """What kernels need that attend in place, see `_partial_bytes` and `CompressedStep`."""
        if not isinstance(mixer, Compressed):
            return self._partial_bytes(mixer, longest, read)
        compressor, of_group = mixer.compressor, 0
        if compressor is not None and compressor.indexer is not None:
            num_entries, chosen = longest // compressor.ratio, compressor.indexer.num_chosen
            of_group = group_elements(self.limits, num_entries, chosen)
        return self._compressed(mixer).in_place_bytes(longest, read, of_group)

    def _partial_bytes(self, mixer: Mixer, longest: int, read: int) -> int:
        """Results of parts of keys, of a step whose sequences have `read` tokens, `longest` at most.

        A row has a result of every head, and its highest score and sum of weights.
        """
        if isinstance(mixer, Pageless):
            return 0
        assert isinstance(mixer, Attention), "in place are layers with keys and values of their own"
        limits, rows = self.limits, 0
        if longest > KEY_SPLIT:
            rows = read // KEY_SPLIT + limits.max_step_sequences
        if longest > CHUNK_SPLIT:
            of_chunks = limits.max_step_tokens * -(-longest // CHUNK_SPLIT)
            rows = min(rows + of_chunks, read * SHORT_CHUNK // CHUNK_SPLIT + limits.max_step_tokens)
        return rows * mixer.num_heads * (mixer.head_dim + 2) * 4

    def _attends_in_place(self, layer: LayerPlan) -> bool:
        """Whether kernels of a GPU read the memory of all slices of a layer, if it has any, in place."""
        is_native = self.implementation is Implementation.NATIVE and not isinstance(
            layer.feed_forward, Opaque
        )
        return is_native and isinstance(layer.mixer, Attention | Compressed | Pageless)

    def _gathered_bytes(self, layer: LayerPlan) -> int:
        """Keys and values of one token that attention reads, and while they are read from rows with scales:
        these rows, and keys or values before their product with the scales.
        """
        if isinstance(layer.mixer, Compressed):
            return 0  # see `CompressedStep`
        size = kv_bytes_per_token(layer.mixer, self.dtype)
        if self.kv_dtype is None:
            return size
        return size + size // 2 + kv_bytes_per_token(layer.mixer, self.kv_dtype)

    def _expanded_bytes(self, mixer: Mixer, num_keys: int) -> int:
        """Keys and values that are expanded from latents at once, and their copies for products."""
        if not isinstance(mixer, Latent):
            return 0
        of_a_head = num_keys * (mixer.query_dim + mixer.value_dim)
        num_elements = max(of_a_head, min(EXPANDED_ELEMENTS, mixer.num_heads * of_a_head))
        return num_elements * (3 * self.dtype.size_bytes + 4)

    def _compressed(self, mixer: Compressed) -> CompressedStep:
        return CompressedStep(mixer, self.dtype, self.limits, self.block_size)

    def _index_bytes(
        self, mixer: Mixer, longest: int, gathered: int, in_place: BlockIndexer | None = None
    ) -> int:
        """An indexer's scores, the keys that they are computed from, and the choice for all queries.

        There are keys of `gathered` tokens, with a float32 copy. Scores of some heads are computed at once,
        or of one; their sum has four copies while tokens are chosen, one of 8 bytes. Kernels of a GPU choose
        blocks `in_place`.
        """
        if isinstance(mixer, Attention) and in_place is not None:
            return block_choice_bytes(mixer, in_place, self.dtype, self.limits, longest, gathered)
        if isinstance(mixer, Attention) and mixer.indexer is not None:
            return block_mask_bytes(mixer.indexer, self.dtype, longest, gathered)
        if not isinstance(mixer, Latent) or mixer.top_k is None or longest <= mixer.top_k:
            return 0
        choice = self.limits.max_step_tokens * mixer.top_k * 4
        if mixer.indexer is None:
            return choice
        keys = gathered * mixer.index_width * (self.dtype.size_bytes + 4)
        pairs = max(gathered, BLOCK_SCORES, FEWEST_QUERIES * longest)
        return choice + keys + (max(INDEX_ELEMENTS, pairs) + 5 * pairs) * 4

    def _ngram_bytes(self, layer: LayerPlan) -> int:
        """Bytes of one token while embeddings of n-grams are added."""
        if (ngrams := layer.ngrams) is None:
            return 0
        size = self.dtype.size_bytes
        return ngrams.num_heads * 3 * 8 + 2 * ngrams.width * size + ngrams.channels * (8 * size + 2 * 4)

    def _token_bytes(self, layer: LayerPlan, *, is_in_place: bool) -> int:
        hidden_size, size = self.config.hidden_size, self.dtype.size_bytes
        of_streams = stream_bytes(layer.connection, hidden_size, self.dtype, is_in_place=is_in_place)
        residual = hidden_size * (2 * size + 2 * 4) + of_streams
        beside = 0 if layer.beside is None else recurrent_elements(layer.beside) + hidden_size
        attention = (mixer_elements(layer.mixer, is_in_place=is_in_place) + beside) * size
        inner = self._inner_bytes(layer) + self._ngram_bytes(layer)
        frames = 2 * self.config.residual_width * size
        return residual + attention + inner + frames

    def _inner_bytes(self, layer: LayerPlan) -> int:
        """Bytes of one token within a feed-forward."""
        inner, hidden_size, size = layer.feed_forward, self.config.hidden_size, self.dtype.size_bytes
        if isinstance(inner, NoFeedForward):
            return 0
        if isinstance(inner, Opaque):
            return inner.inner_elements * size
        if not isinstance(inner, Experts):
            return 3 * inner.width * size
        shared = 0 if inner.shared is None else 3 * inner.shared.width * size
        of_a_choice = 3 * (hidden_size + inner.width) * size + 8 * hidden_size
        if self.implementation is Implementation.TRANSFORMERS:
            between = hidden_size + (9 if inner.has_bias else 7) * inner.width
            of_a_choice = max(of_a_choice, between * size)
        return 20 * inner.count + inner.per_token * of_a_choice + shared

    def _mask_bytes(self) -> int:
        return len(set(self.config.layer_windows)) * (2 + 2 * self.dtype.size_bytes)

    def _logits_bytes(self) -> int:
        rows = min(self.limits.max_step_sequences, self.limits.max_step_tokens)
        return rows * self.config.vocab_size * (self.dtype.size_bytes + 8 + 12 + 48)


def _step_ps(rates: DeviceRates, num_bytes: float, products: float) -> int:
    """Picoseconds to read `num_bytes`, or to multiply and add `products` times; at least one."""
    seconds = max(num_bytes / rates.bytes_per_s, 2.0 * products / rates.operations_per_s)
    return max(1, round(seconds * 1e12))
