"""The indexer of attention to chosen blocks of tokens: its description, and its fields in config.json."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.config_fields import RawConfig, positive_int
from checkpoint.errors import BadConfig, UnsupportedModel
from checkpoint.rope_config import FULL

_INDEXED = "indexed_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexer:
    """Scores of blocks of tokens; those with the highest are the ones that a query attends to.

    A token has a key of `head_dim` elements, projected from the layer's input. The keys of `block_size`
    tokens, from a multiple of that on, are averaged in float32; the mean is rounded, scaled to unit mean
    square plus `norm_eps` and by 1 + a weight, and rotated like the first of them. A query has `num_heads`
    queries of the same width, projected from the same input, normed alike and rotated. As many leading
    elements are rotated as of attention's keys. The score of a block is the sum over the heads of
    max(0, query * key).

    A query attends to the `top_blocks` best of the blocks that it sees all of, and to the tokens after them.

    Source: transformers' Qwen4ExpTextQSAIndexer, whose constant factor is left out: it does not change the
    order.
    """

    num_heads: int
    head_dim: int
    block_size: int
    top_blocks: int
    norm_eps: float

    @property
    def num_rows(self) -> int:
        """Rows of the projection: queries of all heads, and a key."""
        return (self.num_heads + 1) * self.head_dim


def parse_block_indexer(raw: RawConfig, eps: float, *, rotated: int) -> BlockIndexer:
    """The indexer of layers whose heads rotate `rotated` elements; `eps` belongs to its norms.

    Raises BadConfig, and UnsupportedModel for several keys a token.
    """
    if (num_keys := positive_int(raw, "indexer_kv_heads")) != 1:
        raise UnsupportedModel(f"config field 'indexer_kv_heads' = {num_keys} is not supported, only 1 is")
    head_dim = positive_int(raw, "indexer_head_dim")
    size, budget = positive_int(raw, "indexer_compress_ratio"), positive_int(raw, "indexer_budget")
    if budget % size:
        raise BadConfig(
            f"config field 'indexer_budget' is {budget} tokens, not a multiple of the blocks of {size}"
            " (indexer_compress_ratio)"
        )
    if head_dim < rotated or head_dim % 2:
        raise BadConfig(
            f"config field 'indexer_head_dim' is {head_dim}: it must be even, and at least the {rotated}"
            " elements that attention rotates"
        )
    return BlockIndexer(
        num_heads=positive_int(raw, "indexer_n_heads"),
        head_dim=head_dim,
        block_size=size,
        top_blocks=budget // size,
        norm_eps=eps,
    )


def without_indexed(layer_types: object) -> object:
    """`layer_types` with the usual name of attention: all layers that have attention have an indexer."""
    if not isinstance(layer_types, list):
        return layer_types
    return [FULL if name == _INDEXED else name for name in layer_types]
