"""Block groups: their order, and hits that all of them can serve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import KvWindow, combined_digest, first_needed_block, group_windows, longest_hit


def windows_of(*widths: int | None) -> list[KvWindow | None]:
    return [KvWindow.of(width, 8) for width in widths]


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ((None, None), (None,)),
        ((4, 4), (4,)),
        ((4, None, 9, 4), (None, 9, 4)),
        ((5, 9, 7), (9, 7, 5)),
    ],
)
def test_groups_are_the_distinct_windows_widest_first(
    layers: tuple[int | None, ...], groups: tuple[int | None, ...]
) -> None:
    assert group_windows(layers) == groups


def test_missing_blocks_outside_of_the_window_do_not_end_a_hit() -> None:
    twelve = [True] * 12
    hole = [True] * 3 + [False] + [True] * 8
    assert longest_hit([twelve, hole], windows_of(None, 8), block_size=4, max_tokens=99) == 48
    assert longest_hit([hole, twelve], windows_of(None, 8), block_size=4, max_tokens=99) == 12
    assert longest_hit([hole], windows_of(8), block_size=4, max_tokens=99) == 48


def test_the_longest_common_hit_may_be_shorter_than_that_of_every_group() -> None:
    full, windowed = [True] * 4 + [False], [True, True, False, False, True]
    assert longest_hit([full], windows_of(None), block_size=4, max_tokens=99) == 16
    assert longest_hit([windowed], windows_of(5), block_size=4, max_tokens=99) == 20
    assert longest_hit([full, windowed], windows_of(None, 5), block_size=4, max_tokens=99) == 8


def test_the_last_token_is_never_a_hit() -> None:
    assert longest_hit([[True, True]], windows_of(None), block_size=4, max_tokens=7) == 7
    assert longest_hit([[]], windows_of(None), block_size=4, max_tokens=2) == 0


@given(
    flags=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3),
    widths=st.lists(st.none() | st.integers(1, 20), min_size=3, max_size=3),
    block_size=st.integers(1, 4),
    num_rest=st.integers(0, 3),
)
def test_a_hit_is_the_longest_one_whose_visible_blocks_are_cached(
    flags: list[list[bool]], widths: list[int | None], block_size: int, num_rest: int
) -> None:
    windows = windows_of(*widths[: len(flags)])
    max_tokens = 6 * block_size + num_rest - 1
    possible = [0]
    for num_blocks in range(1, 7):
        end = min(num_blocks * block_size, max_tokens)
        seen = [
            range(0 if window is None else max(0, min(end - window.num_tokens + 1, end - 1)), end)
            for window in windows
        ]
        held = [{*(position // block_size for position in positions), num_blocks - 1} for positions in seen]
        if end > 0 and all(cached[i] for cached, blocks in zip(flags, held, strict=True) for i in blocks):
            possible.append(end)
    hit = longest_hit(flags, windows, block_size=block_size, max_tokens=max_tokens)
    assert hit == max(possible)
    for window in windows:
        first = first_needed_block(window, hit, block_size)
        assert first == 0 or (window is not None and first * block_size <= window.first_visible(hit))


def test_the_digest_of_one_group_is_that_of_its_pool() -> None:
    assert combined_digest([7]) == 7
    assert len({combined_digest([7, 8]), combined_digest([8, 7]), combined_digest([7, 9])}) == 3
