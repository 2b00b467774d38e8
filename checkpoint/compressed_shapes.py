"""Shapes of the tensors of compressed attention."""

from __future__ import annotations

from checkpoint.compressed import Compressed, Compressor
from checkpoint.names import TensorRole

_Shapes = dict[tuple[TensorRole, str], tuple[int, ...]]
_ENTRY = (TensorRole.ENTRY_VALUE, TensorRole.ENTRY_GATE)
_INDEX = (TensorRole.INDEX_VALUE, TensorRole.INDEX_GATE)
POOLED_ROLES = (*_ENTRY, *_INDEX)
"""Matrices of what entries, and their keys for the indexer, are pooled of."""
GATE_BIAS_KIND = "ape"
"""Kind of tensor of `TensorRole.ENTRY_BIAS` and `TensorRole.INDEX_BIAS`."""


def compressed_shapes(mixer: Compressed, hidden_size: int) -> _Shapes:
    """Return the shape of each tensor of a mixer but its sinks."""
    shapes: _Shapes = {
        (TensorRole.Q_DOWN, "weight"): (mixer.query_rank, hidden_size),
        (TensorRole.Q_LATENT_NORM, "weight"): (mixer.query_rank,),
        (TensorRole.Q_UP, "weight"): (mixer.q_size, mixer.query_rank),
        (TensorRole.K, "weight"): (mixer.head_dim, hidden_size),
        (TensorRole.K_NORM, "weight"): (mixer.head_dim,),
        (TensorRole.O_GROUPS, "weight"): (mixer.o_size, mixer.group_size),
        (TensorRole.O, "weight"): (hidden_size, mixer.o_size),
    }
    if mixer.compressor is not None:
        shapes |= _pooling(mixer, mixer.compressor, hidden_size)
    return shapes


def _pooling(mixer: Compressed, compressor: Compressor, hidden_size: int) -> _Shapes:
    """The compressor and its indexer."""
    pooled = [(mixer.head_dim, _ENTRY, TensorRole.ENTRY_BIAS, TensorRole.ENTRY_NORM)]
    shapes: _Shapes = {}
    if (indexer := compressor.indexer) is not None:
        pooled.append((indexer.head_dim, _INDEX, TensorRole.INDEX_BIAS, TensorRole.INDEX_NORM))
        shapes[TensorRole.INDEX_Q, "weight"] = (indexer.q_size, mixer.query_rank)
        shapes[TensorRole.INDEX_WEIGHT, "weight"] = (indexer.num_heads, hidden_size)
    for size, matrices, bias, norm in pooled:
        width = 2 * size if compressor.has_overlap else size
        shapes |= {(role, "weight"): (width, hidden_size) for role in matrices}
        shapes[bias, GATE_BIAS_KIND] = (compressor.ratio, width)
        shapes[norm, "weight"] = (size,)
    return shapes
