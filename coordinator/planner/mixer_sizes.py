"""What one token, or a chunk of tokens, takes in a mixer or in residual streams: part of a stage's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from checkpoint import (
    Attention,
    Compressed,
    DType,
    KimiDelta,
    Latent,
    LayerPlan,
    Mamba2,
    Mixer,
    NoMixer,
    Recurrent,
    RopeConfig,
)
from checkpoint.rope_config import QueryGrowth
from checkpoint.step_sizes import CHUNK_TOKENS, stream_parts
from checkpoint.streams import GatedConnection, HyperConnection


def recurrent_elements(mixer: Recurrent) -> int:
    """Elements of one token: inputs, before and after the convolution, and what is computed in float32.

    Of Gated DeltaNet these are queries, keys, values and output for every value head; of Kimi Delta Attention
    decays, too, four times while they are computed; of Mamba2 gates, channels of the convolution, inputs
    times time steps, and output before and after its norm.
    """
    inputs = 2 * mixer.conv_size + mixer.o_size
    if isinstance(mixer, Mamba2):
        return inputs + mixer.num_heads + 2 * (mixer.conv_size + 4 * mixer.o_size + 2 * mixer.num_heads)
    if isinstance(mixer, KimiDelta):
        return inputs + mixer.num_heads + 2 * mixer.rank + mixer.q_size + 2 * 9 * mixer.q_size
    return inputs + 2 * (2 * mixer.num_heads * mixer.key_dim + 3 * mixer.o_size)


def chunk_bytes(layer: LayerPlan, num_tokens: int) -> int:
    """Products between the tokens of a chunk in a recurrent layer, float32: decays, their logarithms, and
    weights of all heads. With decays per channel, keys and queries are copied with their factors, too.
    """
    if (mixer := layer.recurrent) is None:
        return 0
    chunk = min(num_tokens, CHUNK_TOKENS)
    of_channels = 0
    if isinstance(mixer, KimiDelta):
        of_channels = 8 * mixer.q_size * chunk
    return 4 * (3 * mixer.num_heads * chunk**2 + of_channels)


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """A kind of tables of rotary angles, like `stage_worker.model.rope.Rotary`: `width` elements a position.

    With `stride`, a step has a table of its multiples up to the longest sequence, and else one of its tokens;
    with `has_entries` also one of the entries that end in it.
    """

    rope: RopeConfig | None
    width: int
    growth: QueryGrowth | None
    stride: int | None = None
    has_entries: bool = False


def rotary_tables(mixer: Attention | Latent | Compressed) -> tuple[RotaryTables, ...]:
    """All that a mixer looks up."""
    if isinstance(mixer, Attention):
        own = RotaryTables(mixer.rope, mixer.head_dim, mixer.query_growth)
        if (indexer := mixer.indexer) is None:
            return (own,)
        rope = mixer.rope and replace(mixer.rope, width=mixer.rope.width or mixer.head_dim)
        of_queries = RotaryTables(rope, indexer.head_dim, None)
        return own, of_queries, replace(of_queries, stride=indexer.block_size)
    has_entries = isinstance(mixer, Compressed) and mixer.compressor is not None
    return (RotaryTables(mixer.rope, max(2, mixer.rope_dim), mixer.query_growth, has_entries=has_entries),)


def mixer_elements(mixer: Mixer, *, is_in_place: bool = False) -> int:
    """Elements of one token within a mixer; compressed attention of kernels `is_in_place` needs fewer."""
    if isinstance(mixer, NoMixer):
        return 0
    if isinstance(mixer, Recurrent):
        return recurrent_elements(mixer)
    if isinstance(mixer, Latent):
        absorbed = mixer.num_heads * (2 * mixer.kv_rank + mixer.rope_dim)
        down = 2 * (mixer.query_rank or 0) + 2 * mixer.page_shape.width
        # Queries of an indexer are in the run dtype and in float32.
        index = 0 if mixer.indexer is None else 3 * (mixer.indexer.q_size + mixer.indexer.head_dim)
        gates = 2 * mixer.o_size if mixer.has_output_gate else 0
        return down + 2 * mixer.q_size + absorbed + 2 * mixer.o_size + gates + index
    if isinstance(mixer, Compressed):
        return _compressed_elements(mixer, is_in_place=is_in_place)
    gates = mixer.q_size if mixer.has_output_gate else 0
    index = 0 if mixer.indexer is None else 3 * mixer.indexer.num_rows
    return 2 * (mixer.q_size + 2 * mixer.kv_size) + mixer.q_size + 2 * gates + index


def _compressed_elements(mixer: Compressed, *, is_in_place: bool) -> int:
    """Elements of one token: latents and keys before and after norms, what entries are pooled of, queries
    before and after norms, their output in float32 twice (while parts are joined) and rounded, and by group.

    In place, queries and their output are there once, and in the run dtype.
    """
    heads = mixer.q_size
    indexer = None if mixer.compressor is None else mixer.compressor.indexer
    index = 0 if indexer is None else 3 * (indexer.q_size + indexer.head_dim)
    rows = 2 * mixer.query_rank + 2 * mixer.head_dim + mixer.pending_width
    if is_in_place:
        return rows + 2 * heads + 2 * mixer.o_size + index
    return rows + 2 * heads + 4 * heads + heads + mixer.o_size + index


def stream_bytes(
    connection: HyperConnection | GatedConnection | None,
    hidden_size: int,
    dtype: DType,
    *,
    is_in_place: bool,
) -> int:
    """Bytes of one token while several residual streams are read and written.

    By torch's operators, the old and new ones, and both and their sum in float32. By kernels of a GPU, those
    before a layer and its own, with parts of products and weights; or, of gated streams, with normed ones and
    their gates.
    """
    if connection is None:
        return 0
    size, width = dtype.size_bytes, connection.num_streams * hidden_size
    if not is_in_place:
        return width * (2 * size + 3 * 4)
    if isinstance(connection, GatedConnection):
        return 4 * width * size
    num_weights = sum(connection.group_sizes)
    return 2 * width * size + 4 * (prod(stream_parts(num_weights, width)) + num_weights)
