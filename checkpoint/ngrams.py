"""Embeddings of n-grams of tokens by their hashes: pure descriptions, and sizes of tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from math import isqrt

from checkpoint.names import TensorRole
from checkpoint.recurrent import StatePart

HASH_KINDS = MULTIPLIERS_KIND, SIZES_KIND, OFFSETS_KIND = (
    *("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"),
)
"""Kinds of tensors of `TensorRole.NGRAM_HASH`, int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramEmbedding:
    """What a layer adds to its residual streams before all else: embeddings of the n-grams that end with a
    token, of 2 to `size` tokens.

    Each n-gram has `heads_per_size` heads, with a table of `head_dim` elements a row; the tables of all heads
    lie one after the other in one of `num_rows`, which files have in `num_shards` parts. A row is chosen by a
    hash: the tokens, each times a multiplier of its distance to the last, are combined by exclusive or,
    modulo the rows of the head. Multipliers, sizes and offsets of heads are integers in files. Tokens before
    the beginning count as `separator`, and so do those up to the last separator before the n-gram's end.

    The rows of all heads side by side are projected to a value of `hidden_size` elements, and to a key for
    each of `num_streams`. A stream's gate is the sigmoid of the signed root of key * stream / sqrt(hidden
    size), both normalised. The values times the gates are normalised and pass a causal convolution of
    `kernel_size` tokens per channel, each `size` tokens after the one before, and SiLU. It is added to the
    values times the gates.

    The state has the inputs of the convolution that later tokens need, and the last `size` - 1 token ids as
    differences from `separator`: a state of zeros is the beginning of a sequence. They are float32, which
    holds integers below 2^24.

    Source: Qwen4-Exp in transformers, Qwen4ExpTextPLELayer (per-layer embeddings).
    """

    size: int
    heads_per_size: int
    head_dim: int
    num_rows: int
    num_shards: int
    kernel_size: int
    separator: int
    hidden_size: int
    num_streams: int
    norm_eps: float

    @property
    def num_heads(self) -> int:
        """Heads of all sizes, the shortest n-grams' first."""
        return (self.size - 1) * self.heads_per_size

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Elements of all streams."""
        return self.num_streams * self.hidden_size

    @property
    def reach(self) -> int:
        """Tokens before one that its convolution reads."""
        return (self.kernel_size - 1) * self.size

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What a layer keeps of a sequence beside its mixer's state: inputs, and token ids."""
        return StatePart((self.channels, self.reach)), StatePart((self.size - 1,), is_wide=True)

    @property
    def shapes(self) -> dict[tuple[TensorRole, str], tuple[int, ...]]:
        """Shape of each tensor, by role and kind."""
        norms = (TensorRole.NGRAM_KEY_NORM, TensorRole.NGRAM_STREAM_NORM, TensorRole.NGRAM_CONV_NORM)
        return {
            (TensorRole.NGRAM_HASH, MULTIPLIERS_KIND): (self.size,),
            (TensorRole.NGRAM_HASH, SIZES_KIND): (self.num_heads,),
            (TensorRole.NGRAM_HASH, OFFSETS_KIND): (self.num_heads,),
            (TensorRole.NGRAM_TABLE, "weight"): (self.num_rows, self.head_dim),
            (TensorRole.NGRAM_KEY, "weight"): (self.channels, self.width),
            (TensorRole.NGRAM_VALUE, "weight"): (self.hidden_size, self.width),
            (TensorRole.NGRAM_CONV, "weight"): (self.channels, 1, self.kernel_size),
        } | {(role, "weight"): (self.channels,) for role in norms}

    @property
    def shards(self) -> tuple[range, ...]:
        """Rows of each part of the table in files: equal ones but for the last."""
        rows = -(-self.num_rows // self.num_shards)
        return tuple(
            range(begin, min(begin + rows, self.num_rows)) for begin in range(0, self.num_rows, rows)
        )


def table_rows(*, base: int, first_head: int, num_heads: int, multiple: int) -> int:
    """Rows of a table of `num_heads` heads, after `first_head` heads of earlier layers.

    The k-th head of all layers has as many rows as the k-th prime from `base` on; the sum is rounded up to a
    `multiple`.
    """
    return -(-sum(_primes(base, first_head + num_heads)[first_head:]) // multiple) * multiple


@cache
def _primes(base: int, count: int) -> tuple[int, ...]:
    """The first `count` primes from `base` on."""
    return tuple(islice(_primes_from(base), count))


def _primes_from(base: int) -> Iterator[int]:
    number = max(base, 2)
    while True:
        if number == 2 or (number % 2 and all(number % odd for odd in range(3, isqrt(number) + 1, 2))):
            yield number
        number += 1
