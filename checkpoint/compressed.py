"""Attention to a window of tokens, and to entries that stand for several tokens before it: pure descriptions,
equal by value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkpoint.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class PageShape:
    """What a layer keeps of a token: in each of `parts` a row of `width` elements for each of `heads`.

    Parts are keys and values, or one part for both.
    """

    parts: int
    heads: int
    width: int

    @property
    def num_elements(self) -> int:
        """Elements of one token."""
        return self.parts * self.heads * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIndexer:
    """Choice of the `num_chosen` entries that a query attends to, if it sees more.

    Beside each entry there is a key of `head_dim` elements, pooled of the same tokens like the entry, by
    weights of its own. A query has `num_heads` queries of that width, projected from its latent. Scores are
    as in `checkpoint.blueprint.Indexer`.

    Source: transformers' DeepseekV4Indexer, whose constant factors are left out: they do not change the
    order.
    """

    num_heads: int
    head_dim: int
    num_chosen: int

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """Pools every `ratio` tokens into one entry.

    A token has a value and a gate for each element of its entry, both projected from the layer's input; gates
    have a learned bias for each place among the `ratio` tokens. The entry is the sum of the values, weighted
    by the softmax of the gates over its tokens, then normed, and rotated as the first of these tokens. With
    `has_overlap`, a token has two values and two gates: the first ones for the entry after its own, the
    second ones for its own.

    Source: transformers' DeepseekV4HCACompressor, and with overlap DeepseekV4CSACompressor.
    """

    ratio: int
    has_overlap: bool = False
    indexer: EntryIndexer | None = None

    @property
    def span(self) -> int:
        """Tokens that an entry is pooled of."""
        return self.ratio * (2 if self.has_overlap else 1)

    @property
    def num_chosen(self) -> int | None:
        """Entries that a query chooses if it sees more; None if it attends to all."""
        return None if self.indexer is None else self.indexer.num_chosen

    def rows_per_block(self, block_size: int) -> int:
        """Entries that a block of tokens has room for: those whose last token is in it."""
        return max(1, block_size // self.ratio)

    def fits(self, block_size: int) -> bool:
        """Whether blocks begin where entries do, or entries where blocks do."""
        return block_size % self.ratio == 0 or self.ratio % block_size == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """Attention with one key per token, which all heads share and which is its value, too.

    A query sees the last `window` tokens, its own included, and with `compressor` the entries of all tokens
    whose last one it does not precede, or those that the indexer chooses. Queries have `head_dim` elements;
    they are projected through a normed latent of `query_rank` elements, and scaled to unit mean square per
    head. Keys are normed. The last `rope.width` elements of queries and keys are rotated; those of the output
    are rotated back by the query's position. Each head has a learned score that takes part in the softmax and
    has no value. The output's heads are in `num_head_groups` groups, each of which is projected to
    `group_rank` elements, before a projection of all of these. Norms of latents, keys, queries and entries
    have `norm_eps`; they multiply by their weights before they round.

    A layer keeps the key of each token in the window, and what its compressor computed of it, and all
    entries, see docs/architecture.md.

    Source: transformers' DeepseekV4Attention.
    """

    num_heads: int
    head_dim: int
    query_rank: int
    rope: RopeConfig | None
    scale: float
    window: int
    norm_eps: float
    num_head_groups: int
    group_rank: int
    compressor: Compressor | None = None

    @property
    def q_size(self) -> int:
        """Width of the queries of all heads, and of their output."""
        return self.num_heads * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Rotated elements of a head, its last ones."""
        return 0 if self.rope is None else self.rope.width or self.head_dim

    @property
    def group_size(self) -> int:
        """Width of the output of the heads of a group."""
        return self.q_size // self.num_head_groups

    @property
    def o_size(self) -> int:
        """Width of all groups after their projections."""
        return self.num_head_groups * self.group_rank

    @property
    def query_growth(self) -> None:
        """Queries do not grow with their positions."""
        return None

    @property
    def softcap(self) -> None:
        """There is no limit of scores."""
        return None

    @property
    def page_shape(self) -> PageShape:
        """A key, which is the value, too."""
        return PageShape(1, 1, self.head_dim)

    @property
    def index_width(self) -> int:
        """Tokens have no keys of an indexer, entries have."""
        return 0

    @property
    def pooled_width(self) -> int:
        """Elements of values, and of gates, that the compressor and its indexer compute of a token."""
        if self.compressor is None:
            return 0
        own = self.head_dim + self.entry_index_width
        return 2 * own if self.compressor.has_overlap else own

    @property
    def pending_width(self) -> int:
        """Elements that a layer keeps of a token beside its key, until its entries are pooled."""
        return 2 * self.pooled_width

    @property
    def entry_index_width(self) -> int:
        """Elements of an entry's key of the indexer."""
        indexer = None if self.compressor is None else self.compressor.indexer
        return 0 if indexer is None else indexer.head_dim

    def entry_elements(self, block_size: int) -> int:
        """Elements of the entries of one block of tokens, with their keys of the indexer."""
        if self.compressor is None:
            return 0
        return self.compressor.rows_per_block(block_size) * (self.head_dim + self.entry_index_width)


def has_entries(mixer: object) -> bool:
    """Whether a layer keeps entries of a compressor, for all tokens of a sequence."""
    return isinstance(mixer, Compressed) and mixer.compressor is not None


def compressors_of(mixers: Iterable[object]) -> tuple[Compressor, ...]:
    """The distinct compressors of `mixers`, in order of their first use."""
    found = (mixer.compressor for mixer in mixers if isinstance(mixer, Compressed))
    return tuple(dict.fromkeys(compressor for compressor in found if compressor is not None))
