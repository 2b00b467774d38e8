"""Memory of the self-check's reference, which streams weights block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence

from checkpoint import (
    Checkpoint,
    Compressed,
    Dense,
    DType,
    Latent,
    LayerPlan,
    Mixer,
    NoFeedForward,
    NoMixer,
    Recurrent,
)
from stage_worker.loading.reference_copies import NUM_COPIES
from stage_worker.model.weight_reads import WINDOW_BYTES
from stage_worker.model.weights import UNPACKING_WINDOWS

BLOCK_ELEMENTS = 1 << 22
_ROUNDING_BYTES = 16
"""Memory for one element while it is rounded to a weight format."""


def reference_bytes(checkpoint: Checkpoint, dtype: DType, lengths: Sequence[int]) -> int:
    """Upper bound, of a block of weights (as read and float32), a file window, and activations of the
    tokens.
    """
    config = checkpoint.config
    kinds = config.kinds
    widest = max(max(_inner_size(kind), kind.mixer.q_size, _expanded_size(kind.mixer)) for kind in kinds)
    width = max(config.hidden_size, widest)
    shapes = [entry.shape for entry in checkpoint.tensors.values()]
    shapes += [matrix.shape for matrix in checkpoint.packed.values()]
    largest = max(math.prod(shape) for shape in shapes)
    block = min(largest, max(BLOCK_ELEMENTS, width))
    of_streams = 6 * config.residual_width if config.num_streams > 1 else 0
    of_mixers = 3 * max(
        kind.mixer.q_size + _expanded_size(kind.mixer) + _beside_size(kind) + _inner_size(kind)
        for kind in kinds
    )
    of_a_layer = 6 * config.hidden_size + of_streams + max(map(_ngram_size, kinds)) + of_mixers
    of_the_head = (
        6 * config.hidden_size + of_streams + 10 * min(config.vocab_size, rows_per_block(config.hidden_size))
    )
    of_scores = 3 * max(kind.mixer.num_heads for kind in kinds) * max(lengths) ** 2
    of_tokens = sum(lengths) * max(of_a_layer, of_the_head) + of_scores
    of_unpacking = UNPACKING_WINDOWS * WINDOW_BYTES if checkpoint.packed else 0
    of_rounding = block * _ROUNDING_BYTES if config.weight_format is not None else 0
    return block * (8 + dtype.size_bytes) + of_unpacking + of_rounding + 4 * NUM_COPIES * of_tokens


def _ngram_size(plan: LayerPlan) -> int:
    """Elements of one token while embeddings of n-grams are added: rows, and values in all streams."""
    return 0 if plan.ngrams is None else 2 * plan.ngrams.width + 8 * plan.ngrams.channels


def _inner_size(plan: LayerPlan) -> int:
    """Elements of one token between the matrices of a feed-forward, of one expert at a time."""
    inner = plan.known_feed_forward
    if isinstance(inner, NoFeedForward):
        return 0
    if isinstance(inner, Dense):
        return inner.width
    shared = 0 if inner.shared is None else inner.shared.width
    return max(inner.width, shared) + 3 * inner.count


def _beside_size(plan: LayerPlan) -> int:
    return 0 if plan.beside is None else _expanded_size(plan.beside)


def _expanded_size(mixer: Mixer) -> int:
    """Elements of the keys and values of one token, or of its inputs of a recurrent layer and of a state."""
    if isinstance(mixer, Recurrent):
        of_state = max(math.prod(part.shape) for part in mixer.state_parts)
        return 2 * (mixer.conv_size + mixer.o_size) + of_state
    if isinstance(mixer, NoMixer):
        return 0
    if isinstance(mixer, Compressed):
        return 2 * mixer.head_dim + mixer.pending_width + mixer.o_size
    if isinstance(mixer, Latent):
        return mixer.num_heads * (mixer.query_dim + mixer.value_dim) + mixer.page_shape.width
    return 2 * mixer.kv_size


def rows_per_block(width: int) -> int:
    """Rows per block of a matrix with rows of `width` elements."""
    return max(1, BLOCK_ELEMENTS // width)
