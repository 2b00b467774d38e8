"""Literal constants of the hash dialect: with another salt or seed, KV-aware routers find no hits."""

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
from xxhash import xxh3_64_intdigest

from kvcache import (
    DEFAULT_SALT,
    BlockPool,
    Deref,
    Destroy,
    FullBlock,
    PartialBlock,
    Promote,
    Signal,
    Use,
    block_hash,
    salt_of,
    sequence_hash,
)


def test_block_hashes_equal_those_of_nvidia_dynamo() -> None:
    assert DEFAULT_SALT == 1337
    assert block_hash([1, 2, 3, 4]) == 14643705804678351452
    assert block_hash([1, 2, 3, 4], 0) == 8052976908588476977
    assert block_hash([5, 6, 7, 8]) == 16777012769546811212


def test_sequence_hashes_chain_the_parent_with_the_seed_1337_for_any_salt() -> None:
    assert sequence_hash(None, 14643705804678351452) == 14643705804678351452
    assert sequence_hash(14643705804678351452, 16777012769546811212) == 4945711292740353085
    assert sequence_hash(6783181932379417241, 6775162198134867605) == 4501072020146958228


def test_the_salt_of_a_text_has_the_seed_0() -> None:
    # XXH3-64 of nothing, as the reference implementation of xxHash documents it.
    assert salt_of("") == 0x2D06800538D394C2
    assert salt_of("tenant") == 11514568216865584292


def use(*names: int, parent: int | None = None) -> Use:
    return Use(tuple(FullBlock(name) for name in names), tuple(100 + name for name in names), parent)


_HISTORY: list[Signal] = [
    use(1, 2, 3),
    Use((PartialBlock(1),), (), 3),
    Promote(PartialBlock(1), 4, 3, 104),
    use(1, 2, 5),
    Deref(FullBlock(3)),
    Deref(FullBlock(5)),
    Use((PartialBlock(2),), (), 4),
    Destroy(PartialBlock(2)),
]


def digest_of(signals: Sequence[Signal]) -> int:
    pool = BlockPool(8)
    for signal in signals:
        pool.apply(signal)
    return pool.digest


def pool_after(signals: Sequence[Signal], num_blocks: int = 8) -> BlockPool:
    pool = BlockPool(num_blocks)
    for signal in signals:
        pool.apply(signal)
    return pool


def test_equal_histories_have_equal_digests_that_every_signal_changes() -> None:
    digests = [digest_of(_HISTORY[:length]) for length in range(len(_HISTORY) + 1)]
    assert digests == [digest_of(_HISTORY[:length]) for length in range(len(_HISTORY) + 1)]
    assert len(set(digests)) == len(digests)


def folded(*words: int) -> int:
    return xxh3_64_intdigest(struct.pack(f"<{len(words)}Q", *words), 1337)


def test_the_digest_is_the_documented_function_of_the_history() -> None:
    """Workers of other builds compare digests: a change here is a protocol change."""
    pool = BlockPool(2)
    assert pool.digest == 0
    owners, entered, full = 4, 2, 1
    pool.apply(Use((FullBlock(11), PartialBlock(12)), (111,), 10))
    digest = folded(0, 1, 1, 10, 2, 1, 11, 12, 111, owners | entered | full, owners | entered)
    assert pool.digest == digest
    pool.apply(Promote(PartialBlock(12), 11, None, 111))
    digest = folded(digest, 2, 0, 0, 12, 11, 111, 2 * owners | full)
    assert pool.digest == digest
    for num_left in (1, 0):
        pool.apply(Deref(FullBlock(11)))
        digest = folded(digest, 3, 0, 11, num_left)
        assert pool.digest == digest
    pool.apply(use(13, 14))
    digest = folded(digest, 1, 0, 0, 2, 2, 13, 14, 113, 114, *[owners | entered | full] * 2, 11)
    assert pool.digest == digest
    pool.apply(Destroy(FullBlock(13)))
    assert pool.digest == folded(digest, 4, 0, 13, 0)


@pytest.mark.parametrize(
    ("position", "changed"),
    [
        (0, use(1, 2, 6)),
        (0, use(2, 1, 3)),
        (0, use(1, 2, 3, parent=0)),
        (0, replace(use(1, 2, 3), block_hashes=(101, 102, 9))),
        (1, Use((PartialBlock(1),), (), None)),
        (2, Promote(PartialBlock(1), 6, 3, 104)),
        (2, Promote(PartialBlock(1), 4, 2, 104)),
        (2, Promote(PartialBlock(1), 4, 3, 105)),
        (4, Deref(FullBlock(2))),
        (4, Destroy(FullBlock(3))),
        (6, Use((FullBlock(2),), (102,), 4)),
    ],
)
def test_a_changed_signal_changes_the_digest_immediately(position: int, changed: Signal) -> None:
    assert digest_of([*_HISTORY[:position], changed]) != digest_of(_HISTORY[: position + 1])


def test_the_order_of_signals_changes_the_digest() -> None:
    first, second = Deref(FullBlock(1)), Deref(FullBlock(2))
    assert digest_of([use(1, 2), first, second]) != digest_of([use(1, 2), second, first])


def test_a_failed_use_leaves_no_trace() -> None:
    pool = BlockPool(2)
    pool.apply(use(1))
    digest = pool.digest
    with pytest.raises(Exception, match="3 blocks needed, 1 free"):
        pool.apply(use(7, 8, 9))
    assert pool.digest == digest


def test_another_eviction_order_changes_the_digest_at_the_first_eviction() -> None:
    history: list[Signal] = [use(1, 2, 3), Deref(FullBlock(3)), Deref(FullBlock(2)), Deref(FullBlock(1))]
    pool, replica = pool_after(history, 3), pool_after(history, 3)
    replica._inactive.move_to_end(3)
    assert pool.digest == replica.digest
    pool.apply(use(7))
    replica.apply(use(7))
    assert pool.digest != replica.digest


@pytest.mark.parametrize("signal", [use(1), Deref(FullBlock(1)), Destroy(FullBlock(1))])
def test_another_refcount_changes_the_digest_at_the_next_signal(signal: Signal) -> None:
    pool, replica = pool_after([use(1, 2), use(1)]), pool_after([use(1, 2), use(1)])
    replica._full[1].num_owners += 1
    assert pool.digest == replica.digest
    pool.apply(signal)
    replica.apply(signal)
    assert pool.digest != replica.digest


def test_another_refcount_changes_the_digest_at_a_promotion() -> None:
    history: list[Signal] = [use(1), Use((PartialBlock(1),))]
    pool, replica = pool_after(history), pool_after(history)
    replica._full[1].num_owners += 1
    for blocks in (pool, replica):
        blocks.apply(Promote(PartialBlock(1), 1, None, 101))
    assert pool.digest != replica.digest


def test_a_block_cached_on_one_side_changes_the_digest_at_its_use() -> None:
    history: list[Signal] = [use(1, 2), Deref(FullBlock(2))]
    pool, replica = pool_after(history), pool_after(history)
    replica._inactive[9] = replica._inactive.pop(2)
    assert pool.digest == replica.digest
    pool.apply(use(2))
    replica.apply(use(2))
    assert pool.digest != replica.digest


def test_a_smaller_pool_changes_the_digest_at_its_first_eviction() -> None:
    history: list[Signal] = [use(1, 2), Deref(FullBlock(2))]
    pool, replica = pool_after(history, 3), pool_after(history, 2)
    assert pool.digest == replica.digest
    pool.apply(use(3))
    replica.apply(use(3))
    assert pool.digest != replica.digest


def test_page_numbers_do_not_change_the_digest() -> None:
    history = [use(1, 2)]
    pool, replica = pool_after(history), pool_after(history)
    replica._num_made += 1  # a page that is skipped
    pool.apply(use(3))
    replica.apply(use(3))
    assert pool.page_of(FullBlock(3)) != replica.page_of(FullBlock(3))
    assert pool.digest == replica.digest
