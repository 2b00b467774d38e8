"""How much of a step a stage computes at once: plans count the memory of that."""

EXPANDED_ELEMENTS = 1 << 22
"""Elements of keys and values that a stage expands from latents at once, if they are not of one head."""
BLOCK_SCORES, FEWEST_QUERIES = 128 * 512, 16
"""Queries times keys of a prompt that torch's products compute at once: 3 MB in float32 with 12 heads, about
a cache's size; but at least that many queries."""
INDEX_ELEMENTS = 1 << 22
"""Scores of an indexer that a stage computes at once, if they are not of one head."""

CHOICE_ROWS, CHOICE_SCORES = 128, 1 << 24
"""Queries, and scores of an indexer, of which a GPU chooses tokens at once; but at least `CHOICE_QUERIES`."""
CHOICE_QUERIES = 16
"""Queries of a prompt that one program of a GPU scores."""
CHOICE_PART = 8_192
"""Scores from which one program of a GPU chooses, in its registers."""
MOST_CHOSEN = CHOICE_PART // 2
"""Tokens of a choice, at most: parts get fewer as their choices are joined."""

KEPT_POSITIONS = 16_384
"""Positions below have precomputed cos and sin: 4 MB for heads of 64 in bfloat16."""
KEY_SPLIT = 512
"""Keys of a decode that one program of a GPU reads; parts have results of their own, which are merged."""
CHUNK_SPLIT = 4096
"""As `KEY_SPLIT`, for a prompt's slice of at most `SHORT_CHUNK` queries; a longer one is not split."""
SHORT_CHUNK = 64
CHUNK_TOKENS = 64
"""Tokens of a prompt that a recurrent layer computes at once, by products of matrices."""
STREAM_SPLIT = 256
"""Elements of a token's residual streams whose products one program of a GPU adds up."""
_STREAM_LANES = 16


def stream_parts(num_weights: int, width: int) -> tuple[int, int]:
    """Parts of the products of a token's streams, `width` elements, with `num_weights` rows on a GPU, and
    numbers of each part: products and a sum of squares, up to a power of two.
    """
    return -(-width // STREAM_SPLIT), max(_STREAM_LANES, 1 << num_weights.bit_length())
