from itertools import count

import pytest

from kvcache import (
    ActiveSequence,
    Announced,
    BlockPool,
    FullBlock,
    HashCollision,
    IntegrityBroken,
    InvalidSignal,
    Ledger,
    PartialBlock,
    Promote,
    Signal,
    Stored,
    Use,
)
from kvcache.hashing import pack_tokens

_IDS = count(1000)


def sequence(*tokens: int, salt: int = 1337) -> ActiveSequence:
    return ActiveSequence(tokens, block_size=2, max_output_tokens=20, salt=salt, new_id=_IDS.__next__)


def allocate(ledger: Ledger, made: ActiveSequence) -> Use:
    use = ledger.prepare(made, len(made))
    assert use is not None
    ledger.apply(made, use)
    made.commit(len(made))
    return use


def push(ledger: Ledger, made: ActiveSequence, token: int) -> list[Signal]:
    signals = ledger.push(made, token)
    for signal in signals:
        ledger.apply(made, signal)
    return signals


@pytest.fixture
def colliding_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that sees only the first token of a block."""
    monkeypatch.setattr("kvcache.hashing.packed_block_hash", lambda packed, salt: packed[0])


def test_equal_content_is_shared() -> None:
    ledger = Ledger(10, block_size=2)
    first, second = sequence(1, 2, 3, 4, 5), sequence(1, 2, 3, 4, 6)
    allocate(ledger, first)
    assert ledger.num_cached_tokens(second) == 4
    assert allocate(ledger, second).blocks[:2] == first.blocks[:2]
    ledger.check_integrity([first, second])
    assert ledger.pool.num_active == 4


def test_the_last_token_is_computed_even_if_everything_is_cached() -> None:
    ledger = Ledger(10, block_size=2)
    allocate(ledger, sequence(1, 2, 3, 4))
    assert ledger.num_cached_tokens(sequence(1, 2, 3, 4)) == 3
    assert ledger.num_cached_tokens(sequence()) == 0


@pytest.mark.usefixtures("colliding_hashes")
def test_a_prompt_whose_hash_is_taken_goes_private_from_that_block_on() -> None:
    ledger = Ledger(10, block_size=2)
    first, second = sequence(1, 2, 3, 4, 5, 6), sequence(1, 2, 3, 9, 5, 6)
    allocate(ledger, first)
    unresolved = second.prepare(6)
    assert unresolved is not None
    collision = ledger.collision(second, unresolved)
    assert collision is not None
    assert collision.block_index == 1
    digest = ledger.digest
    with pytest.raises(HashCollision, match="block 1"):
        ledger.apply(second, unresolved)
    assert ledger.digest == digest
    use = allocate(ledger, second)
    assert use.blocks[0] == first.blocks[0]
    assert set(use.blocks[1:]).isdisjoint(first.blocks)
    ledger.check_integrity([first, second])


@pytest.mark.usefixtures("colliding_hashes")
def test_a_promotion_whose_hash_is_taken_goes_private_with_all_that_follows() -> None:
    ledger = Ledger(10, block_size=2)
    first, second = sequence(1, 2, 3, 4), sequence(1, 2, 3)
    allocate(ledger, first)
    allocate(ledger, second)
    push(ledger, second, 9)
    promote, use = push(ledger, second, 5)
    assert isinstance(promote, Promote)
    assert isinstance(use, Use)
    private = second.blocks[1]
    assert isinstance(private, FullBlock)
    assert private != first.blocks[1]
    assert promote.sequence_hash == promote.block_hash == use.parent == private.sequence_hash
    push(ledger, second, 6)
    later, _ = push(ledger, second, 7)
    assert isinstance(later, Promote)
    assert later.parent == private.sequence_hash
    ledger.check_integrity([first, second])


@pytest.mark.usefixtures("colliding_hashes")
def test_a_salt_is_part_of_the_content() -> None:
    ledger = Ledger(10, block_size=2)
    first, second = sequence(1, 2), sequence(1, 2, salt=9)
    allocate(ledger, first)
    allocate(ledger, second)
    assert first.blocks != second.blocks


@pytest.mark.usefixtures("colliding_hashes")
def test_a_hash_is_reusable_once_its_block_is_evicted() -> None:
    ledger = Ledger(10, block_size=2)
    first, second = sequence(1, 2), sequence(1, 9)
    allocate(ledger, first)
    for signal in first.destroy_signals():
        ledger.apply(first, signal)
    allocate(ledger, second)
    assert second.blocks == first.blocks
    ledger.check_integrity([second])


@pytest.mark.usefixtures("colliding_hashes")
def test_a_block_is_not_shared_after_its_parent_hash_was_reused() -> None:
    ledger = Ledger(3, block_size=2)
    first, evicting, second, same = (
        sequence(1, 2, 3, 4),
        sequence(5, 6, 7, 8),
        sequence(1, 9, 3, 4),
        sequence(1, 2, 3, 4),
    )
    head, end = allocate(ledger, first).blocks
    for signal in first.release_before(2):
        ledger.apply(first, signal)
    allocate(ledger, evicting)
    for signal in evicting.destroy_signals():
        ledger.apply(evicting, signal)
    assert head not in ledger.pool
    assert allocate(ledger, same).blocks == (head, end)
    for signal in same.destroy_signals():
        ledger.apply(same, signal)
    assert head not in ledger.pool
    assert ledger.pool.refcount(end) == 1

    use = allocate(ledger, second)
    assert use.blocks[0] == head
    assert use.blocks[1] != end
    ledger.check_integrity([first, second])


def test_contents_are_dropped_with_their_blocks() -> None:
    ledger = Ledger(2, block_size=2)
    first, second = sequence(1, 2, 3, 4), sequence(5, 6)
    allocate(ledger, first)
    for signal in first.preempt():
        ledger.apply(first, signal)
    allocate(ledger, second)
    assert len(ledger._contents) == 2
    ledger.check_integrity([second, first])


def test_a_ledger_and_a_pool_with_the_same_signals_have_equal_digests() -> None:
    ledger, pool = Ledger(10, block_size=2), BlockPool(10)
    made = sequence(1, 2, 3)
    signals: list[Signal] = [allocate(ledger, made)]
    for token in range(4):
        signals += push(ledger, made, token)
    for signal in signals:
        pool.apply(signal)
    assert pool.digest == ledger.digest


def test_signals_of_another_owner_are_rejected() -> None:
    ledger = Ledger(10, block_size=2)
    made, other = sequence(1, 2, 3), sequence(5, 6, 7)
    use = made.prepare(3)
    assert use is not None
    with pytest.raises(InvalidSignal):
        ledger.apply(other, use)
    made.commit(3)
    with pytest.raises(InvalidSignal):
        ledger.apply(made, use)
    with pytest.raises(InvalidSignal):
        ledger.apply(made, Promote(PartialBlock(0), 3, None, 3))


def test_a_sequence_of_another_block_size_is_rejected() -> None:
    made = ActiveSequence([1, 2, 3, 4], block_size=4, max_output_tokens=1, new_id=_IDS.__next__)
    with pytest.raises(ValueError, match="4-token blocks, the ledger 2-token blocks"):
        allocate(Ledger(10, block_size=2), made)


def test_integrity_check_finds_an_owner_that_is_missing() -> None:
    ledger = Ledger(10, block_size=2)
    allocate(ledger, sequence(1, 2))
    with pytest.raises(IntegrityBroken):
        ledger.check_integrity([])
    ledger._contents.clear()
    with pytest.raises(IntegrityBroken, match="contents of 0 blocks, the pool has 1"):
        ledger.check_integrity()


@pytest.mark.parametrize("sees_cache", [True, False])
def test_blocks_that_no_other_sequence_can_use_grow_unannounced(sees_cache: bool) -> None:
    ledger = Ledger(10, block_size=2)
    made = ActiveSequence(
        (1, 2, 3), block_size=2, max_output_tokens=20, prefix_caching=sees_cache, new_id=_IDS.__next__
    )
    allocate(ledger, made)
    push(ledger, made, 4)
    announced: list[Announced] = []
    grow = ledger.grow(made, 5, announced)
    assert grow is not None
    stored = [
        Announced(Stored(grow.parent, (grow.sequence_hash,), (grow.block_hash,), 1), pack_tokens((3, 4)))
    ]
    assert announced == (stored if sees_cache else [])
    assert len(list(ledger.cached_blocks())) == (2 if sees_cache else 0)
    ledger.check_integrity([made])
