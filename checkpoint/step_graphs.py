"""Sizes of steps that a stage on a GPU records as CUDA graphs, and the memory of these graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from checkpoint.blueprint import Attention, Experts, Latent, LayerPlan, Mixer, NoFeedForward, Opaque
from checkpoint.compressed import Compressed
from checkpoint.dtypes import DType
from checkpoint.recurrent import KimiDelta, NoMixer, Pageless, Recurrent

_MIXED_SIZES = (64, 128, 256, 512)
_FEW_SEQUENCES = (1, 2, 4)

MAX_GRAPHS = 64
"""Graphs of a stage; steps of further sizes run eagerly."""
MAX_ITEMS = 2048
"""Items of attention of a recorded step: a million keys, which take longer to read than kernels to launch."""
PARTIAL_PER_ITEM = 2
"""Partial results for each item of a step with prompts: short chunks have several queries per item."""
MAX_PARTIAL_BYTES = 128 << 20
"""Partial results of attention in a recorded step; steps with more run eagerly."""
_GRAPH_BYTES = 1 << 20
"""One graph's kernels and parameters on the GPU; an estimate, not measured."""
_CANDIDATE_BYTES = 8 * 4096
"""Of one sampled row."""
WORKSPACE_BYTES = 32 << 20
"""Workspace of cuBLAS and cuBLASLt for the products of one stream on Hopper, the largest (measured)."""


def decode_sizes(max_step_sequences: int) -> tuple[int, ...]:
    """Sequences of recorded steps of decodes: 1, 2, 4, 8, every 8 to 64, every 16 to the maximum."""
    steps = (*_FEW_SEQUENCES, *range(8, 64, 8), *range(64, max_step_sequences, 16))
    return (*(size for size in steps if size < max_step_sequences), max_step_sequences)


def mixed_sizes(max_step_tokens: int) -> tuple[int, ...]:
    """Tokens of recorded steps with prompts, within the limit of a step; longer prompts run eagerly."""
    return tuple(size for size in _MIXED_SIZES if size <= max_step_tokens)


def are_recordable(layers: Iterable[LayerPlan]) -> bool:
    """Whether graphs record layers: not those whose kernels depend on values, as with experts or indexers,
    and those with entries or with several residual streams, for which no graph has buffers.
    """
    return not any(
        layer.num_streams > 1
        or isinstance(layer.feed_forward, Experts | Opaque)
        or isinstance(layer.mixer, Compressed)
        or layer.mixer.index_width
        for layer in layers
    )


def graph_bytes(
    layers: Collection[LayerPlan],
    hidden_size: int,
    dtype: DType,
    *,
    max_step_tokens: int,
    max_step_sequences: int,
    sampled_tokens: int = 0,
) -> int:
    """Memory of all graphs of a stage of a model with `layers`, beside its weights, pages and eager steps.

    A stage with the head samples from `sampled_tokens`, the vocabulary. Intermediate results share one pool,
    of the size that the largest step needs.
    """
    if not are_recordable(layers):
        return 0
    sequences = min(max_step_sequences, max_step_tokens)
    num_tokens = max(sequences, *mixed_sizes(max_step_tokens), 0)
    kinds = set(layers)
    per_token = max(_token_elements(hidden_size, layer) for layer in kinds) * dtype.size_bytes
    most_partial = MAX_ITEMS * PARTIAL_PER_ITEM * max(partial_bytes(layer.mixer) for layer in kinds)
    partial = min(MAX_PARTIAL_BYTES, most_partial)
    # Logits of the head, in float32, and scaled; candidates of the sampler with their ids.
    per_row = sampled_tokens * (dtype.size_bytes + 8) + _CANDIDATE_BYTES if sampled_tokens else 0
    states = num_tokens * per_token + sequences * per_row
    return states + partial + WORKSPACE_BYTES + MAX_GRAPHS * _GRAPH_BYTES


def partial_bytes(mixer: Mixer) -> int:
    """Bytes of one partial result of attention: float32, with highest score and sum of weights; 0 without."""
    if isinstance(mixer, Pageless):
        return 0
    width = mixer.kv_rank if isinstance(mixer, Latent) else mixer.head_dim
    return 4 * mixer.num_heads * (width + 2)


def _token_elements(hidden_size: int, layer: LayerPlan) -> int:
    """Elements of one token: input, output, residual and norms, heads, what is beside them with an output of
    its own, and the feed-forward.
    """
    feed_forward = layer.feed_forward
    inner = 0 if isinstance(feed_forward, Experts | Opaque | NoFeedForward) else 3 * feed_forward.width
    beside = 0 if layer.beside is None else hidden_size + _mixer_elements(layer.beside)
    return 6 * hidden_size + _mixer_elements(layer.mixer) + beside + inner


def _mixer_elements(mixer: Mixer) -> int:
    if isinstance(mixer, NoMixer):
        return 0
    if isinstance(mixer, Recurrent):
        # Projection, convolution, output in the run dtype or in float32, and gated.
        of_gates = 2 * mixer.rank + mixer.q_size if isinstance(mixer, KimiDelta) else 0
        return 2 * mixer.conv_size + mixer.o_size + 2 * mixer.num_heads + of_gates + 3 * mixer.o_size
    if isinstance(mixer, Latent):
        absorbed = mixer.num_heads * (3 * mixer.kv_rank + mixer.rope_dim)
        return absorbed + (mixer.query_rank or 0) + 2 * (mixer.q_size + mixer.o_size + mixer.page_shape.width)
    assert isinstance(mixer, Attention), "no graphs of layers with entries"
    return 2 * (mixer.q_size + 2 * mixer.kv_size) + 2 * mixer.q_size
