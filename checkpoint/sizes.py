"""How many bytes each part of a model takes, for the planner. All sizes are in bytes, in the run dtype."""

from __future__ import annotations

from checkpoint.config import ModelConfig
from checkpoint.dtypes import DType
from checkpoint.tensors import layer_tensor_shapes, num_elements, stage_tensor_shapes


def layer_weight_bytes(config: ModelConfig, dtype: DType) -> int:
    """Weights of one layer; all layers are alike."""
    return num_elements(layer_tensor_shapes(config)) * dtype.size_bytes


def head_bytes(config: ModelConfig, dtype: DType) -> int:
    """Final norm and output head on a stage that does not also have the embeddings.

    A tied head is a second copy of the embedding matrix there; a stage with both shares one copy, see
    `stage_weight_bytes`.
    """
    return (config.vocab_size + 1) * config.hidden_size * dtype.size_bytes


def stage_weight_bytes(
    config: ModelConfig,
    dtype: DType,
    layer_begin: int,
    layer_end: int,
    *,
    has_embeddings: bool,
    has_head: bool,
) -> int:
    """All weights of a stage with layers [layer_begin, layer_end); tied weights count once on one stage."""
    shapes = stage_tensor_shapes(
        config, layer_begin, layer_end, has_embeddings=has_embeddings, has_head=has_head
    )
    return num_elements(shapes) * dtype.size_bytes


def kv_bytes_per_token_per_layer(config: ModelConfig, dtype: DType) -> int:
    """Keys and values of one position in one layer."""
    return 2 * config.kv_size * dtype.size_bytes
