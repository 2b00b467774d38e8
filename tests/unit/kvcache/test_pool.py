import re
import sys
from copy import deepcopy

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache import (
    Block,
    BlockNotActive,
    BlockPool,
    BlockShared,
    Deref,
    Destroy,
    Event,
    FullBlock,
    Grow,
    IntegrityBroken,
    InvalidSignal,
    KvCacheError,
    OutOfBlocks,
    PartialBlock,
    Promote,
    Signal,
    Use,
)
from tests.properties import examples
from tests.unit.kvcache.naive_pool import NaivePool, Refused


def use(*names: int, parent: int | None = None) -> Use:
    return Use(tuple(FullBlock(name) for name in names), tuple(100 + name for name in names), parent)


_full = st.builds(FullBlock, st.integers(0, 7))
_partial = st.builds(PartialBlock, st.integers(0, 3))
_block: st.SearchStrategy[Block] = st.one_of(_full, _partial)


@st.composite
def _uses(draw: st.DrawFn) -> Use:
    blocks = tuple(draw(st.lists(_block, min_size=1, max_size=5)))
    hashes = tuple(100 + block.sequence_hash for block in blocks if isinstance(block, FullBlock))
    return Use(blocks, hashes, draw(st.one_of(st.none(), st.integers(20, 22))))


_promotes = st.builds(Promote, _partial, st.integers(0, 7), st.none(), st.just(5))
_signals: st.SearchStrategy[Signal] = st.one_of(
    _uses(), _promotes, st.builds(Deref, _full), st.builds(Destroy, _block), st.builds(Deref, _block)
)


@settings(max_examples=examples(7))
@given(st.integers(1, 6), st.lists(_signals, min_size=5, max_size=40))
def test_any_stream_of_signals_matches_the_reference_pool(capacity: int, signals: list[Signal]) -> None:
    pool, replica, model = BlockPool(capacity), BlockPool(capacity), NaivePool(capacity)
    for signal in signals:
        try:
            expected = tuple(model.apply(signal))
        except Refused:
            digest = pool.digest
            with pytest.raises(KvCacheError):
                pool.apply(signal)
            assert pool.digest == digest
        else:
            assert pool.apply(signal) == expected
            replica.apply(signal)
        assert pool.inactive == tuple(block.sequence_hash for block in model.inactive)
        assert pool.num_free == capacity - len(model.refcounts) - len(model.inactive)
        # The replica did not get the rejected signals and is still equal, pages included.
        assert pool.digest == replica.digest
        assert all(
            pool.page_of(block) == replica.page_of(block) for block in (*model.refcounts, *model.inactive)
        )
        pool.check_integrity(block for block, count in model.refcounts.items() for _ in range(count))


_BLOCKS = (*map(FullBlock, range(8)), *map(PartialBlock, range(4)))


def _apply(pool: BlockPool, signals: tuple[Signal, ...]) -> tuple[Event, ...]:
    return tuple(event for signal in signals for event in pool.apply(signal))


_id, _name = st.integers(0, 3), st.integers(0, 7)
_grows = st.builds(Grow, _id, _name, st.integers(20, 22), st.just(5), _id)


@settings(max_examples=examples(7))
@example(2, [use(0), Use((PartialBlock(0),)), Grow(0, 1, 20, 5, 0), Deref(FullBlock(0))])
@given(st.integers(1, 6), st.lists(st.one_of(_signals, _grows, _grows), min_size=5, max_size=40))
def test_a_grow_equals_its_two_signals(capacity: int, items: list[Signal | Grow]) -> None:
    pool, other = BlockPool(capacity), BlockPool(capacity)
    for item in items:
        signals = item.signals if isinstance(item, Grow) else (item,)
        try:
            events = pool.grow(item) if isinstance(item, Grow) else pool.apply(item)
        except KvCacheError as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                _apply(deepcopy(other), signals)
        else:
            assert events == _apply(other, signals)
        assert pool.digest == other.digest
        assert (pool.inactive, pool.num_free) == (other.inactive, other.num_free)
        assert all(pool.pages_of([block]) == other.pages_of([block]) for block in _BLOCKS)
        pool.check_integrity()


def test_an_invalid_grow_is_rejected_and_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.apply(Use((PartialBlock(1),)))
    digest = pool.digest
    for grow in (
        Grow(1, 1 << 64, 0, 0, 2),
        Grow(1, 5, -1, 0, 2),
        Grow(1, 5, 0, 1 << 64, 2),
        Grow(1, 5, 0, 0, -1),
    ):
        with pytest.raises(InvalidSignal, match="unsigned 64-bit"):
            pool.grow(grow)
        assert (pool.digest, pool.num_active, pool.refcount(PartialBlock(1))) == (digest, 1, 1)


def test_pages_are_handed_out_in_order_and_the_last_freed_comes_first() -> None:
    pool = BlockPool(4)
    pool.apply(use(1, 2, 3))
    assert [pool.page_of(FullBlock(name)) for name in (1, 2, 3)] == [0, 1, 2]
    pool.apply(Destroy(FullBlock(2)))
    pool.apply(use(5))
    assert pool.page_of(FullBlock(5)) == 1


def test_an_evicted_page_goes_to_the_block_that_evicts() -> None:
    pool = BlockPool(2)
    pool.apply(use(1, 2))
    pool.apply(Deref(FullBlock(1)))
    pool.apply(use(3))
    assert pool.page_of(FullBlock(3)) == 0
    with pytest.raises(BlockNotActive):
        pool.page_of(FullBlock(1))


def test_out_of_blocks_has_needed_and_available_counts() -> None:
    pool = BlockPool(3)
    pool.apply(use(1, 2, 3))
    pool.apply(Deref(FullBlock(3)))
    with pytest.raises(OutOfBlocks) as error:
        pool.apply(use(1, 7, 8))
    assert (error.value.needed, error.value.available) == (2, 1)
    # Block 3 is named, so it is no candidate for eviction.
    with pytest.raises(OutOfBlocks) as error:
        pool.apply(use(3, 7))
    assert (error.value.needed, error.value.available) == (1, 0)
    assert pool.inactive == (3,)


def test_a_partial_with_two_owners_cannot_be_promoted() -> None:
    pool = BlockPool(2)
    pool.apply(Use((PartialBlock(1),)))
    pool.apply(Use((PartialBlock(1),)))
    with pytest.raises(BlockShared):
        pool.apply(Promote(PartialBlock(1), 5, None, 5))


@pytest.mark.parametrize(
    "signal",
    [
        Use((FullBlock(9),), ()),
        Use((PartialBlock(9),), (3,)),
        Use((FullBlock(1 << 64),), (3,)),
        Use((FullBlock(9),), (-1,)),
        Use((FullBlock(9),), (3,), 1 << 64),
        Promote(PartialBlock(1), 1 << 64, None, 3),
        Deref(PartialBlock(1)),
    ],
)
def test_an_invalid_signal_is_rejected_and_changes_nothing(signal: Signal) -> None:
    pool = BlockPool(4)
    pool.apply(Use((FullBlock(1), PartialBlock(1)), (1,)))
    pool.apply(Deref(FullBlock(1)))
    digest = pool.digest
    with pytest.raises(InvalidSignal):
        pool.apply(signal)
    assert (pool.digest, pool.inactive, pool.num_active, pool.num_free) == (digest, (1,), 1, 2)
    pool.check_integrity([PartialBlock(1)])


def test_integrity_check_finds_wrong_refcounts_and_lost_pages() -> None:
    pool = BlockPool(4)
    pool.apply(use(1, 2))
    pool.check_integrity([FullBlock(1), FullBlock(2)])
    with pytest.raises(IntegrityBroken, match="refcount 1, 0 owners"):
        pool.check_integrity([FullBlock(1)])
    with pytest.raises(IntegrityBroken, match="refcount 1, 2 owners"):
        pool.check_integrity([FullBlock(1), FullBlock(1), FullBlock(2)])
    pool._num_made += 1
    with pytest.raises(IntegrityBroken, match="1 free"):
        pool.check_integrity()
    pool = BlockPool(2)
    pool.apply(use(1, 2))
    pool._num_made += 1
    with pytest.raises(IntegrityBroken, match="-1 free"):
        pool.check_integrity()


def test_integrity_check_does_not_visit_pages_that_were_never_used() -> None:
    pool = BlockPool(sys.maxsize)
    pool.check_integrity()
    pool.apply(use(1, 2))
    pool.check_integrity([FullBlock(1), FullBlock(2)])
