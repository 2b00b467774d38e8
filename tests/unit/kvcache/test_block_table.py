import re

import pytest

from kvcache import (
    BlockNotActive,
    BlockNotHeld,
    BlockShared,
    BlockTables,
    Deref,
    Destroy,
    FullBlock,
    Grow,
    IntegrityBroken,
    KvCacheError,
    OutOfBlocks,
    PartialBlock,
    Promote,
    SequenceHoldsBlocks,
    UnknownSequence,
    Use,
)


def use(*names: int) -> Use:
    return Use(tuple(FullBlock(name) for name in names), names)


def open_partial(number: int) -> Use:
    return Use((PartialBlock(number),))


@pytest.fixture
def tables() -> BlockTables:
    return BlockTables(8, block_size=4)


def test_use_appends_pages(tables: BlockTables) -> None:
    tables.apply("a", use(1, 2))
    tables.apply("b", use(1))
    tables.apply("a", open_partial(1))
    assert tables.pages("a") == [0, 1, 2]
    assert tables.pages("b") == [0]
    tables.pages("a").clear()
    assert tables.pages("a") == [0, 1, 2]
    tables.check_integrity()


def test_promotion_in_place_keeps_the_page(tables: BlockTables) -> None:
    tables.apply("a", open_partial(1))
    tables.apply("a", Promote(PartialBlock(1), 7, None, 7))
    assert tables.pages("a") == [tables.pool.page_of(FullBlock(7))] == [0]
    tables.check_integrity()


@pytest.mark.parametrize("twin_is_active", [True, False])
def test_promotion_onto_a_twin_moves_to_its_page(tables: BlockTables, twin_is_active: bool) -> None:
    tables.apply("a", use(7))
    tables.apply("b", open_partial(1))
    if not twin_is_active:
        tables.apply("a", Deref(FullBlock(7)))
    tables.apply("b", Promote(PartialBlock(1), 7, None, 7))
    assert tables.pages("b") == [0]
    assert tables.pool.refcount(FullBlock(7)) == 1 + twin_is_active
    tables.apply("b", open_partial(2))
    assert tables.pages("b") == [0, 1]
    tables.check_integrity()


def test_releasing_the_head_keeps_positions_absolute(tables: BlockTables) -> None:
    tables.apply("a", use(1, 2))
    tables.apply("a", open_partial(1))
    tables.apply("a", Deref(FullBlock(1)))
    assert tables.first_block("a") == 1
    assert tables.pages("a") == [1, 2]
    tables.apply("a", Promote(PartialBlock(1), 3, 2, 3))
    tables.apply("a", open_partial(2))
    assert tables.writable_runs("a", 12, 14) == [(12, 14)]
    with pytest.raises(BlockNotHeld, match=r"sequence 'a' holds tokens 4\.\.15, not all of 3\.\.4"):
        tables.writable_runs("a", 3, 5)
    tables.apply("a", Destroy(PartialBlock(2)))
    assert (tables.first_block("a"), tables.pages("a")) == (1, [1, 2])
    tables.check_integrity()


def test_after_all_is_freed_positions_start_over(tables: BlockTables) -> None:
    tables.apply("a", use(1, 2, 3))
    for name in (1, 3, 2):
        tables.apply("a", Deref(FullBlock(name)))
    assert tables.pages("a") == []
    assert (tables.first_block("a"), tables.valid_until("a")) == (0, 0)
    tables.apply("a", use(1, 9))
    assert (tables.first_block("a"), tables.valid_until("a")) == (0, 4)


def test_after_all_is_freed_hits_are_forgotten(tables: BlockTables) -> None:
    tables.apply("a", use(2))
    tables.apply("b", use(2, 1))
    tables.apply("b", Destroy(FullBlock(1)))
    tables.apply("b", Deref(FullBlock(2)))
    assert tables.valid_until("b") == 0
    tables.apply("b", use(5, 2))
    assert tables.writable_runs("b", 0, 8) == [(0, 4)]
    for name in (5, 2):
        tables.apply("b", Deref(FullBlock(name)))
    tables.apply("b", use(6, 7))
    assert tables.writable_runs("b", 0, 8) == [(0, 8)]


def test_a_freed_tail_is_writable_when_reallocated(tables: BlockTables) -> None:
    tables.apply("a", use(1, 3))
    tables.apply("b", use(1, 2, 3))
    tables.apply("b", Deref(FullBlock(3)))
    tables.apply("b", use(4))
    assert tables.writable_runs("b", 0, 12) == [(4, 12)]
    for name in (4, 2):
        tables.apply("b", Deref(FullBlock(name)))
    tables.apply("b", use(5))
    assert tables.writable_runs("b", 0, 8) == [(4, 8)]
    tables.apply("c", use(1, 3))
    tables.apply("c", Deref(FullBlock(3)))
    tables.apply("c", use(6))
    assert tables.writable_runs("c", 0, 8) == [(4, 8)]


def test_hits_are_valid_and_fresh_pages_are_not(tables: BlockTables) -> None:
    tables.apply("a", use(1, 2))
    assert tables.valid_until("a") == 0
    assert tables.writable_runs("a", 0, 8) == [(0, 8)]
    tables.apply("b", use(1, 2, 3))
    assert tables.valid_until("b") == 8
    assert tables.writable_runs("b", 7, 12) == [(8, 12)]
    assert tables.writable_runs("b", 7, 8) == []


def test_reactivated_blocks_are_valid(tables: BlockTables) -> None:
    tables.apply("a", use(1))
    tables.apply("a", Deref(FullBlock(1)))
    tables.apply("a", use(1))
    assert tables.valid_until("a") == 4


def test_hits_of_a_later_chunk_lengthen_the_valid_run(tables: BlockTables) -> None:
    tables.apply("a", use(1, 2))
    tables.apply("b", use(1))
    tables.apply("b", use(2, 3))
    assert tables.valid_until("b") == 8


def test_a_hit_behind_a_fresh_block_is_not_written_again(tables: BlockTables) -> None:
    tables.apply("a", use(2))
    tables.apply("a", use(4))
    tables.apply("b", use(1, 2, 3, 5, 4))
    assert tables.valid_until("b") == 0
    assert tables.writable_runs("b", 1, 20) == [(1, 4), (8, 16)]
    assert tables.writable_runs("b", 5, 7) == []
    assert tables.writable_runs("b", 6, 10) == [(8, 10)]


def test_a_promotion_onto_a_twin_leaves_the_open_block_writable(tables: BlockTables) -> None:
    tables.apply("a", use(7))
    tables.apply("b", open_partial(1))
    tables.apply("b", Promote(PartialBlock(1), 7, None, 7))
    tables.apply("b", open_partial(2))
    assert tables.writable_runs("b", 4, 5) == [(4, 5)]


def test_a_failed_use_creates_and_changes_no_table(tables: BlockTables) -> None:
    tables.apply("a", use(1))
    digest = tables.digest
    for key in ("a", "b"):
        with pytest.raises(OutOfBlocks):
            tables.apply(key, use(*range(10, 18)))
    assert tables.pages("a") == [0]
    assert "b" not in tables
    assert tables.digest == digest


def test_a_partial_block_belongs_to_one_sequence(tables: BlockTables) -> None:
    tables.apply("a", open_partial(1))
    digest = tables.digest
    with pytest.raises(BlockShared, match="'b'"):
        tables.apply("b", open_partial(1))
    assert tables.digest == digest
    tables.check_integrity()


@pytest.mark.parametrize(
    "signal",
    [
        Deref(FullBlock(2)),
        Destroy(FullBlock(2)),
        Deref(FullBlock(9)),
        Destroy(PartialBlock(9)),
        Promote(PartialBlock(9), 5, None, 5),
        Promote(PartialBlock(8), 5, None, 5),
    ],
)
def test_a_signal_on_a_block_that_is_not_at_an_end_of_the_table_is_rejected(
    tables: BlockTables, signal: Deref | Destroy | Promote
) -> None:
    tables.apply("a", use(1, 2, 3))
    tables.apply("b", use(9))
    tables.apply("b", open_partial(8))
    digest = tables.digest
    with pytest.raises(BlockNotHeld, match="'a'"):
        tables.apply("a", signal)
    assert tables.digest == digest
    tables.check_integrity()


def test_unknown_sequences_are_rejected(tables: BlockTables) -> None:
    for lookup in (tables.pages, tables.first_block, tables.valid_until, tables.drop):
        with pytest.raises(UnknownSequence, match="'x'"):
            lookup("x")
    with pytest.raises(UnknownSequence):
        tables.writable_runs("x", 0, 1)
    with pytest.raises(UnknownSequence):
        tables.apply("x", Deref(FullBlock(1)))


def test_a_sequence_ends_only_without_blocks(tables: BlockTables) -> None:
    tables.apply("a", use(1, 2))
    with pytest.raises(SequenceHoldsBlocks, match="holds 2 blocks"):
        tables.drop("a")
    tables.apply("a", Deref(FullBlock(2)))
    tables.apply("a", Destroy(FullBlock(1)))
    with pytest.raises(BlockNotHeld):
        tables.apply("a", Deref(FullBlock(1)))
    tables.drop("a")
    assert len(tables) == 0


def test_integrity_check_compares_tables_with_the_pool(tables: BlockTables) -> None:
    tables.apply("a", use(1, 2))
    tables._tables["a"].pages[0] = 5
    with pytest.raises(IntegrityBroken, match=r"\[5, 1\]"):
        tables.check_integrity()
    tables.pool.apply(use(1))
    with pytest.raises(IntegrityBroken, match="refcount 2, 1 owners"):
        tables.check_integrity()


def test_impossible_block_size_is_rejected() -> None:
    with pytest.raises(ValueError, match="block_size"):
        BlockTables(8, block_size=0)


def test_a_table_cannot_outlive_its_pool_entries(tables: BlockTables) -> None:
    tables.apply("a", use(1))
    tables.pool.apply(Deref(FullBlock(1)))
    with pytest.raises(BlockNotActive):
        tables.apply("a", Deref(FullBlock(1)))
    assert tables.pages("a") == [0]


def test_placed_has_the_layout_of_a_slice(tables: BlockTables) -> None:
    """With a released head and cached blocks at the start and later."""
    tables.apply("a", use(1, 2, 4))
    tables.apply("b", use(1, 2, 3, 4))
    for key, start, end in (("a", 0, 12), ("b", 0, 16), ("b", 5, 11), ("b", 15, 16), ("b", 8, 8)):
        placed = tables.placed(key, start, end)
        assert placed.pages == tables.pages(key)
        assert placed.first_block == tables.first_block(key)
        assert placed.valid_until == tables.valid_until(key)
        assert placed.writable_runs == tables.writable_runs(key, start, end)
    assert tables.placed("b", 0, 16).writable_runs == [(8, 12)]
    tables.apply("b", Deref(FullBlock(1)))
    assert tables.placed("b", 4, 16).first_block == 1
    assert tables.placed("b", 3, 5).writable_runs is None
    assert tables.placed("b", 4, 17).writable_runs is None


def test_a_sequence_without_a_table_has_no_placement(tables: BlockTables) -> None:
    assert tables.placed("a", 0, 1) == ([], 0, 0, None)


def test_placed_copies_the_pages(tables: BlockTables) -> None:
    tables.apply("a", use(1))
    tables.placed("a", 0, 4).pages.clear()
    assert len(tables.pages("a")) == 1


def test_a_grow_replaces_the_last_block_and_appends_another(tables: BlockTables) -> None:
    tables.apply("a", use(1))
    tables.apply("a", open_partial(1))
    tables.apply("b", use(1, 7))
    tables.grow("a", Grow(1, 7, 1, 107, 2))
    assert tables.pages("a") == [*tables.pages("b"), 1]
    tables.grow("a", Grow(2, 8, 7, 108, 3))
    assert tables.pages("a") == [0, 2, 1, 3]
    assert tables.writable_runs("a", 8, 16) == [(8, 16)]
    tables.check_integrity()


@pytest.mark.parametrize(
    ("key", "grow", "error"),
    [
        ("c", Grow(1, 7, 1, 7, 2), UnknownSequence("sequence 'c' has no block table")),
        ("b", Grow(1, 7, 1, 7, 2), BlockNotHeld("sequence 'b' does not end in PartialBlock(id=1)")),
        ("a", Grow(3, 7, 1, 7, 2), BlockNotHeld("sequence 'a' does not end in PartialBlock(id=3)")),
        ("a", Grow(1, 7, 1, 7, 3), BlockShared("PartialBlock(id=3) of sequence 'a' already has an owner")),
        ("a", Grow(1, 7, 1, 7, 2), OutOfBlocks(1, 0)),
    ],
)
def test_an_impossible_grow_changes_nothing(key: str, grow: Grow, error: KvCacheError) -> None:
    tables = BlockTables(4, block_size=4)
    tables.apply("a", use(1))
    tables.apply("a", open_partial(1))
    tables.apply("b", use(1, 2))
    tables.apply("d", open_partial(3))
    before = tables.digest, tables.pages("a"), tables.pages("b")
    with pytest.raises(type(error), match=re.escape(str(error))):
        tables.grow(key, grow)
    assert (tables.digest, tables.pages("a"), tables.pages("b")) == before
    tables.check_integrity()
