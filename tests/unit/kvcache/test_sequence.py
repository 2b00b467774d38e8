from itertools import count

import pytest

from kvcache import (
    ActiveSequence,
    Deref,
    Destroy,
    FullBlock,
    NothingToPop,
    OutputLimitExceeded,
    PartialBlock,
    Promote,
    Use,
    block_hash,
    salt_of,
    sequence_hash,
)


def sequence(
    num_tokens: int, *, block_size: int = 4, max_output_tokens: int = 100, prefix_caching: bool = True
) -> ActiveSequence:
    return ActiveSequence(
        range(num_tokens),
        block_size=block_size,
        max_output_tokens=max_output_tokens,
        prefix_caching=prefix_caching,
        new_id=count().__next__,
    )


def allocated(num_tokens: int, *, block_size: int = 4, prefix_caching: bool = True) -> ActiveSequence:
    made = sequence(num_tokens, block_size=block_size, prefix_caching=prefix_caching)
    made.commit(num_tokens)
    return made


def test_a_salt_prevents_sharing() -> None:
    assert block_hash([1, 2, 3, 4], salt_of("tenant a")) != block_hash([1, 2, 3, 4], salt_of("tenant b"))
    assert salt_of("tenant a") == salt_of("tenant a")


def test_tokens_beyond_32_bits_are_rejected_before_anything_changes() -> None:
    for token in (-1, 1 << 32):
        with pytest.raises(ValueError, match="token ids"):
            block_hash([token])
        with pytest.raises(ValueError, match="token ids"):
            ActiveSequence([token], block_size=4, max_output_tokens=1, new_id=count().__next__)
        made = allocated(3)
        with pytest.raises(ValueError, match="token ids"):
            made.push(token)
        assert len(made) == 3


def test_the_output_limit_is_a_number_in_the_error() -> None:
    made = sequence(4, max_output_tokens=2)
    made.commit(4)
    made.push(1)
    made.push(2)
    with pytest.raises(OutputLimitExceeded, match="2 output tokens"):
        made.push(3)
    assert made.num_generated_tokens == 2


def test_a_chunk_must_end_on_a_boundary_or_with_the_last_token() -> None:
    made = sequence(10)
    for num_tokens in (3, 9, 11, -1):
        with pytest.raises(ValueError, match=str(num_tokens)):
            made.prepare(num_tokens)
        with pytest.raises(ValueError, match=str(num_tokens)):
            made.commit(num_tokens)
    assert made.prepare(0) is None


def test_prepare_repeats_itself_exactly_until_it_is_committed() -> None:
    made = sequence(6)
    first = made.prepare(6)
    assert made.blocks == made.blocks
    assert made.prepare(6) == first
    made.commit(6)
    assert made.prepare(6) is None
    assert first is not None
    assert made.held_blocks == first.blocks


def test_a_chunk_is_chained_to_the_one_before() -> None:
    made = sequence(10)
    made.commit(4)
    use = made.prepare(10)
    assert use is not None
    assert use.parent == made.blocks[0].sequence_hash  # type: ignore[union-attr]
    assert len(use.block_hashes) == 1
    assert made.num_committed_tokens == 4


def test_a_block_completed_by_push_stays_partial_until_the_next_push() -> None:
    made = allocated(3)
    assert made.push(3) == []
    assert made.blocks == (PartialBlock(0),)
    assert made.free_signals() == [Destroy(PartialBlock(0))]
    promote, use = made.push(4)
    name = block_hash([0, 1, 2, 3])
    assert promote == Promote(PartialBlock(0), name, None, name)
    assert use == Use((PartialBlock(1),), (), name)


def test_blocks_of_one_token_are_promoted_one_push_later() -> None:
    made = allocated(1, block_size=1)
    name = block_hash([0])
    assert made.push(7) == [Use((PartialBlock(0),), (), name)]
    promote, _ = made.push(8)
    second = block_hash([7])
    assert promote == Promote(PartialBlock(0), sequence_hash(name, second), name, second)
    made.pop()
    assert made.push(8) == [Use((PartialBlock(2),), (), sequence_hash(name, second))]


def test_only_the_last_push_can_be_undone() -> None:
    made = allocated(3)
    with pytest.raises(NothingToPop):
        made.pop()
    made.push(3)
    made.push(4)
    assert made.num_allocated_blocks == 2
    made.pop()
    assert (made.num_allocated_blocks, len(made.blocks)) == (1, 1)
    with pytest.raises(NothingToPop):
        made.pop()
    made.push(4)
    made.preempt()
    with pytest.raises(NothingToPop):
        made.pop()
    assert made.tokens == [0, 1, 2, 3, 4]


def test_a_push_without_boundary_can_be_undone() -> None:
    made = allocated(5)
    made.push(5)
    made.pop()
    assert [made.push(token) for token in (5, 6, 7)] == [[], [], []]
    assert len(made.push(8)) == 2


def test_undoing_a_push_while_catching_up_forgets_the_block_it_completed() -> None:
    made = allocated(3)
    made.preempt()
    made.push(9)
    assert made.blocks == (FullBlock(block_hash([0, 1, 2, 9])),)
    made.pop()
    made.push(8)
    assert made.blocks == (FullBlock(block_hash([0, 1, 2, 8])),)


def test_preempted_sequences_recompute_all_tokens_in_chunks() -> None:
    made = allocated(6)
    for token in range(6, 9):
        made.push(token)
    assert [type(signal) for signal in made.preempt()] == [Destroy, Deref, Deref]
    assert made.held_blocks == ()
    assert made.num_committed_tokens == 0
    made.commit(8)
    assert made.held_blocks == made.blocks[:2]
    assert made.push(9) == []
    made.commit(10)
    assert made.push(10) == []
    assert made.push(11) == []
    assert len(made.push(12)) == 2


def test_without_prefix_caching_all_block_ids_are_unique() -> None:
    made = allocated(9, prefix_caching=False)
    assert made.blocks == (FullBlock(0), FullBlock(1), PartialBlock(2))
    for token in range(9, 12):
        made.push(token)
    promote, _ = made.push(12)
    assert promote == Promote(PartialBlock(2), 3, 1, 3)
    made.preempt()
    assert {block.sequence_hash for block in made.blocks[:3] if isinstance(block, FullBlock)} == {5, 6, 7}


def test_destroy_signals_leave_nothing_in_the_cache() -> None:
    made = allocated(5)
    full = FullBlock(block_hash([0, 1, 2, 3]))
    assert made.destroy_signals() == [Destroy(PartialBlock(0)), Destroy(full)]
    assert made.free_signals() == [Destroy(PartialBlock(0)), Deref(full)]


def test_a_window_never_releases_the_newest_block() -> None:
    made = allocated(8)
    assert made.release_before(3) == []
    assert made.release_before(8) == [Deref(made.blocks[0])]
    assert made.release_before(8) == []
    assert made.held_blocks == made.blocks[1:]
    assert made.num_released_blocks == 1
    assert made.free_signals() == [Deref(made.blocks[1])]
    with pytest.raises(ValueError, match="before token 9 of 8"):
        made.release_before(9)


def test_a_window_skips_unallocated_blocks() -> None:
    made = sequence(12)
    assert made.release_before(12) == []
    made.commit(8)
    assert made.release_before(12) == [Deref(made.blocks[0])]


def test_private_ids_replace_hashes_of_uncommitted_blocks() -> None:
    made = sequence(12)
    made.commit(4)
    first = made.blocks[0]
    made.make_private(1)
    assert made.blocks == (first, FullBlock(0), FullBlock(1))
    with pytest.raises(ValueError, match="block 0 cannot be renamed"):
        made.make_private(0)
    made.commit(12)
    with pytest.raises(ValueError, match="blocks before 3"):
        made.make_private(1)
    made.preempt()
    assert made.blocks == sequence(12).blocks


def test_a_promotion_can_be_renamed_until_the_next_push() -> None:
    made = allocated(7)
    made.push(7)
    made.push(8)
    made.make_private(1)
    assert made.blocks[1:] == (FullBlock(2), PartialBlock(1))
    made.push(9)
    with pytest.raises(ValueError, match="blocks before 2"):
        made.make_private(1)


def test_impossible_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match="block_size"):
        sequence(3, block_size=0)
    with pytest.raises(ValueError, match="max_output_tokens"):
        sequence(3, max_output_tokens=-1)


def test_a_push_cannot_be_undone_after_an_earlier_block_is_released() -> None:
    made = allocated(8)
    made.push(8)
    assert made.release_before(3) == []
    assert len(made.release_before(8)) == 2
    with pytest.raises(NothingToPop):
        made.pop()


def test_the_length_of_the_prompt_is_read_only() -> None:
    sequence = ActiveSequence([1, 2], max_output_tokens=2, new_id=count().__next__)
    with pytest.raises(AttributeError):
        sequence.num_prompt_tokens = 1  # type: ignore[misc]


def test_the_tokens_of_a_sequence_are_read_only_and_follow_it() -> None:
    made = allocated(3)
    tokens = made.tokens
    made.push(7)
    assert tokens == [0, 1, 2, 7] == list(tokens)
    assert (tokens[-1], tokens[1:3], len(tokens)) == (7, (1, 2), 4)
    assert tokens != [0, 1, 2, 8]
    assert not isinstance(tokens, list)
    assert not hasattr(tokens, "append")
    with pytest.raises(TypeError):
        tokens[0] = 5  # type: ignore[index]
    assert tokens[:1] == (0,)


def test_sealing_promotes_a_complete_last_block_once() -> None:
    made = allocated(3)
    assert made.seal() == []
    made.push(3)
    name = block_hash([0, 1, 2, 3])
    assert made.seal() == [Promote(PartialBlock(0), name, None, name)]
    assert made.seal() == []
    assert made.free_signals() == [Deref(FullBlock(name))]


def test_sealing_skips_uncomputed_and_private_blocks() -> None:
    planned = sequence(4)
    planned.push(4)
    assert planned.seal() == []
    private = allocated(3, prefix_caching=False)
    private.push(3)
    assert private.seal() == []
    assert private.free_signals() == [Destroy(PartialBlock(0))]


def test_private_full_blocks_are_destroyed() -> None:
    made = allocated(9, prefix_caching=False)
    assert made.release_before(5) == [Destroy(made.blocks[0])]
    assert made.free_signals() == [Destroy(made.blocks[2]), Destroy(made.blocks[1])]
    mixed = sequence(12)
    mixed.commit(4)
    mixed.make_private(1)
    mixed.commit(12)
    assert mixed.free_signals() == [
        Destroy(mixed.blocks[2]),
        Destroy(mixed.blocks[1]),
        Deref(mixed.blocks[0]),
    ]


def test_extend_fills_the_open_block_without_signals() -> None:
    pushed, extended = (sequence(3, block_size=4, max_output_tokens=9) for _ in range(2))
    for made in (pushed, extended):
        made.commit(3)
        made.push(4)
        made.push(5)
    assert (len(extended), extended.num_slots) == (5, 8)
    assert [pushed.push(token) for token in (6, 7, 8)] == [[], [], []]
    extended.extend([6, 7])
    extended.extend([8])
    assert (tuple(extended.tokens), extended.num_slots) == (tuple(pushed.tokens), 8)
    assert extended.push(9) == pushed.push(9)
    with pytest.raises(ValueError, match="4 tokens for 3 free slots"):
        extended.extend([1, 2, 3, 4])
    extended.extend([10, 11, 12])
    with pytest.raises(ValueError, match="1 tokens for 0 free slots"):
        extended.extend([13])
