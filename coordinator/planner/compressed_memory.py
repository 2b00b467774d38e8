"""Memory of compressed attention in the largest step, beside what it computes of each token."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint import EXPANDED_ELEMENTS, INDEX_ELEMENTS, Compressed, DType
from checkpoint.compressed import Compressor, EntryIndexer
from checkpoint.step_sizes import BLOCK_SCORES, CHUNK_SPLIT, FEWEST_QUERIES, KEY_SPLIT, SHORT_CHUNK
from coordinator.planner.plan import StepLimits


@dataclass(frozen=True, slots=True)
class CompressedStep:
    """The largest step of a layer, within `limits`, with pages of `block_size` tokens."""

    mixer: Compressed
    dtype: DType
    limits: StepLimits
    block_size: int

    def num_bytes(self, longest: int, gathered: int) -> int:
        """The most of what attention to windows, pooling and attention to entries need, one after the other.

        There are entries of `gathered` tokens; a query sees entries of `longest`.
        """
        of_windows = self._window_bytes(longest, gathered)
        if (compressor := self.mixer.compressor) is None:
            return of_windows
        of_entries = self._entry_bytes(compressor, longest, gathered)
        return max(of_windows, self._pooling_bytes(compressor), of_entries)

    def in_place_bytes(self, longest: int, gathered: int, group_elements: int) -> int:
        """What kernels of a GPU need, which attend in place: results of parts of a query's keys and entries.

        If queries choose entries, also `group_elements` of 4 bytes for scores and choices of a group of them,
        and the choices of all queries twice, while they are joined.
        """
        window, compressor = self.mixer.window, self.mixer.compressor
        if compressor is None:
            return self._partial_bytes(min(longest, window), min(gathered, self._in_windows))
        slots = 2 * 8 * self._pooled_tokens(compressor)
        read = gathered // compressor.ratio + min(gathered, self._in_windows)
        last, indexer = longest // compressor.ratio, compressor.indexer
        if indexer is None or last <= indexer.num_chosen:
            return slots + self._partial_bytes(min(longest, window) + last, read)
        choices = 2 * self.limits.max_step_tokens * indexer.num_chosen + group_elements
        return slots + 4 * choices + self._partial_bytes(min(longest, window) + indexer.num_chosen, read)

    @property
    def _in_windows(self) -> int:
        """Keys of the windows of all sequences."""
        return self.limits.max_step_sequences * self.mixer.window

    def _partial_bytes(self, longest: int, read: int) -> int:
        """Float32 results of all heads, highest scores and sums of weights of the parts of lists of keys and
        entries, `longest` at most and `read` of all sequences.
        """
        limits, rows = self.limits, 0
        if longest > KEY_SPLIT:
            rows = min(
                read // KEY_SPLIT + limits.max_step_sequences,
                limits.max_step_sequences * -(-longest // KEY_SPLIT),
            )
        if longest > CHUNK_SPLIT:
            of_chunks = limits.max_step_tokens * -(-longest // CHUNK_SPLIT)
            rows += min(of_chunks, 2 * SHORT_CHUNK * (read // CHUNK_SPLIT))
        return rows * self.mixer.num_heads * (self.mixer.head_dim + 2) * 4

    def _window_bytes(self, longest: int, gathered: int) -> int:
        limits, window = self.limits, self.mixer.window
        of_chunk, pages = window + limits.max_step_tokens, 2 * self.block_size
        in_windows = limits.max_step_sequences * (window + pages)
        most = max(BLOCK_SCORES, FEWEST_QUERIES * min(longest, of_chunk))
        pairs = max(min(most, limits.max_step_tokens * longest), min(gathered, in_windows))
        return self._attended_bytes(min(gathered, max(in_windows, of_chunk + pages)), pairs)

    def _attended_bytes(self, num_keys: int, pairs: int) -> int:
        """`num_keys` that are their values, too, with float32 copies, and three of all heads' scores."""
        of_keys = num_keys * self.mixer.head_dim * (self.dtype.size_bytes + 4)
        return of_keys + 3 * 4 * pairs * self.mixer.num_heads

    def _pooling_bytes(self, compressor: Compressor) -> int:
        """What the entries of a step are pooled of: gathered, and of an entry or its key in the run dtype,
        with its gates and their softmax in float32, weights, and products.
        """
        size, mixer, tokens = self.dtype.size_bytes, self.mixer, self._pooled_tokens(compressor)
        width = max(mixer.head_dim, mixer.entry_index_width)
        return tokens * (mixer.pending_width * size + width * (4 * size + 2 * 4) + 2 * 8)

    def _pooled_tokens(self, compressor: Compressor) -> int:
        """Tokens that the entries of a step are pooled from."""
        num_entries = self.limits.max_step_tokens // compressor.ratio + self.limits.max_step_sequences
        return num_entries * compressor.span

    def _entry_bytes(self, compressor: Compressor, longest: int, gathered: int) -> int:
        count = gathered // compressor.ratio + self.limits.max_step_sequences
        last = -(-longest // compressor.ratio)
        pairs = max(min(max(BLOCK_SCORES, last), self.limits.max_step_tokens * last), count)
        indexer = compressor.indexer
        if indexer is None or last <= indexer.num_chosen:
            return self._attended_bytes(count, pairs)
        return self._chosen_bytes(indexer, count, pairs, BLOCK_SCORES // last)

    def _chosen_bytes(self, indexer: EntryIndexer, gathered: int, pairs: int, most: int) -> int:
        """Keys of `gathered` entries, and either scores of `pairs` of queries and entries, or the entries
        that are chosen for the queries of a step's decodes, or for up to `most` queries of a prompt.

        Scores are of some heads at once; their sum has five copies while entries are chosen, one of 8 bytes.
        """
        size, decodes = self.dtype.size_bytes, self.limits.max_step_sequences
        keys = gathered * indexer.head_dim * (size + 4)
        of_heads = max(pairs, min(INDEX_ELEMENTS, pairs * indexer.num_heads))
        most = min(EXPANDED_ELEMENTS // (indexer.num_chosen * self.mixer.head_dim), most)
        chosen = max(decodes, min(most, self.limits.max_step_tokens), 1) * indexer.num_chosen
        of_chosen = self._attended_bytes(chosen, chosen) + chosen * 5 * 8
        return keys + decodes * indexer.q_size * 4 + max((of_heads + 7 * pairs) * 4, of_chosen)
