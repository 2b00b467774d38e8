"""Block groups: layers of one window share blocks, and every group has a pool of its own.

The first group has the widest window (None: full attention) and decides how many tokens the cache holds. The
others follow by descending window.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from kvcache.sequence import KvWindow


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Blocks of the layers with one window; None: full attention, which releases nothing."""

    num_blocks: int
    window: KvWindow | None = None


def group_windows(layer_windows: Iterable[int | None]) -> tuple[int | None, ...]:
    """Return the window of each block group of a model, in the order of the groups."""
    distinct = set(layer_windows)
    widths = sorted((window for window in distinct if window is not None), reverse=True)
    return (None, *widths) if None in distinct else tuple(widths)


def first_needed_block(window: KvWindow | None, first_query: int, block_size: int) -> int:
    """Return the first block that a sequence needs in a group, if it is computed from `first_query` on.

    At least the block before the first query is needed, even if the window hides it.
    """
    if window is None or first_query == 0:
        return 0
    return min(window.first_visible(first_query), first_query - 1) // block_size


def longest_hit(
    cached: Sequence[Sequence[bool]],
    windows: Sequence[KvWindow | None],
    *,
    block_size: int,
    max_tokens: int,
    ends: Container[int] | None = None,
) -> int:
    """Return the most leading tokens, at most `max_tokens`, whose computation all groups can save.

    `cached` has, per group, whether each full block of a sequence is cached. A group needs only the blocks
    that the first query after the hit can see; others may be missing. With `ends`, the hit has such a number
    of blocks, all of whose tokens are within `max_tokens`.
    """
    runs = [_run_lengths(flags) for flags in cached]
    for num_blocks in range(min(len(flags) for flags in cached), 0, -1):
        num_tokens = min(num_blocks * block_size, max_tokens)
        if ends is not None and (num_blocks not in ends or num_tokens < num_blocks * block_size):
            continue
        if all(
            run[num_blocks] >= num_blocks - first_needed_block(window, num_tokens, block_size)
            for run, window in zip(runs, windows, strict=True)
        ):
            return num_tokens
    return 0


def _run_lengths(flags: Sequence[bool]) -> list[int]:
    """Return, for 0..n leading blocks, the length of the cached run at their end."""
    runs = [0]
    for flag in flags:
        runs.append(runs[-1] + 1 if flag else 0)
    return runs
