"""The outbox holds exactly the signals of the ledger, in order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache.hashing
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.sequence import QueueOrder, Sequence
from kvcache import (
    ActiveSequence,
    BlockPool,
    Deref,
    Destroy,
    FullBlock,
    IntegrityBroken,
    KvWindow,
    OutOfBlocks,
    Promote,
    Use,
)
from kvcache.hashing import pack_tokens
from tests.step_slices import all_signals
from tests.unit.coordinator.scheduler.pipeline_model import GREEDY, key_of
from wire.steps import Step


def sequence_of(
    prompt: tuple[int, ...],
    *,
    number: int = 0,
    max_tokens: int = 50,
    is_scored: bool = False,
    shares_cache: bool = True,
) -> Sequence:
    return Sequence(
        key_of(number),
        prompt,
        max_tokens=max_tokens,
        sampling=GREEDY,
        stop_token_ids=frozenset(),
        order=QueueOrder(0.0, number),
        shares_cache=shares_cache,
        wants_prompt_logprobs=is_scored,
    )


def admitted(log: KvCacheManager, prompt: tuple[int, ...], *, number: int = 0) -> ActiveSequence:
    """The blocks of a sequence whose whole prompt is allocated."""
    return running(log, prompt, number=number).kv


def running(log: KvCacheManager, prompt: tuple[int, ...], *, number: int = 0) -> Sequence:
    """A sequence whose whole prompt is allocated and handed out."""
    sequence = sequence_of(prompt, number=number)
    active = log.plan(sequence).active
    log.allocate(key_of(number), active, len(prompt))
    sequence.begin_prefill(active, num_cached_tokens=0)
    sequence.take_chunk(len(prompt))
    return sequence


def serve(log: KvCacheManager, sequence: Sequence) -> None:
    """Allocates and frees the blocks of its prompt."""
    active = log.plan(sequence).active
    log.allocate(sequence.key, active, sequence.num_tokens)
    log.release(sequence.key, active, keep_content=True)


def append(log: KvCacheManager, sequence: Sequence, token: int) -> None:
    """`token` is sampled and handed out."""
    sequence.accept_token(token)
    log.append(sequence)
    Sequence.take_decodes([sequence])


def test_replaying_the_outbox_gives_the_same_digest_at_every_step() -> None:
    log, replica = KvCacheManager(num_blocks=4, block_size=2), BlockPool(4)
    sequence = running(log, (1, 2, 3))
    active = sequence.kv
    other = admitted(log, (1, 2, 4), number=1)
    for token in (5, 6):
        append(log, sequence, token)
    log.free(key_of(1), other, other.free_signals())
    log.free(key_of(0), active, active.free_signals())
    assert log.has_pending
    entries = log.take_pending()
    for entry in entries:
        replica.apply(entry.signal)
    assert replica.digest == log.digest != 0
    kinds = [(type(entry.signal), entry.sequence) for entry in entries]
    assert kinds[:4] == [(Use, key_of(0)), (Use, key_of(1)), (Promote, key_of(0)), (Use, key_of(0))]
    assert not log.has_pending
    assert log.take_pending() == ()


def at_block_end(log: KvCacheManager, prompt: tuple[int, ...], *, number: int) -> Sequence:
    """Its newest token, 9 as the one before, needs another block of two tokens."""
    sequence = running(log, prompt, number=number)
    if len(prompt) % 2:
        append(log, sequence, 9)
    sequence.accept_token(9)
    return sequence


def replay(replica: BlockPool, log: KvCacheManager) -> None:
    step = Step(epoch=1, step_id=0, signals=log.take_pending(), grows=log.take_grows())
    for entry in all_signals(step):
        replica.apply(entry.signal)
    assert replica.digest == log.digest


def test_grows_belong_among_the_signals_of_the_ledger() -> None:
    log, replica = KvCacheManager(num_blocks=20, block_size=2), BlockPool(20)
    grown = [at_block_end(log, (1, 2, 3), number=0), at_block_end(log, (4, 5, 6), number=1)]
    others = [at_block_end(log, (7,), number=2), at_block_end(log, (1, 2), number=3)]
    replay(replica, log)
    freed = admitted(log, (8, 8), number=4)
    log.free(key_of(4), freed, freed.free_signals())
    assert log.grow([grown[0], *others, grown[1]]) == others
    assert log.has_pending
    for sequence in others:
        log.append(sequence)
    assert [sequence.kv_end for sequence in grown] == [6, 6]
    step = Step(epoch=1, step_id=0, signals=log.take_pending(), grows=log.take_grows())
    assert [identity for identity, _ in step.grows] == [sequence.identity for sequence in grown]
    assert (step.grows.position, len(step.signals)) == (2, 5)
    for entry in all_signals(step):
        replica.apply(entry.signal)
    assert replica.digest == log.digest
    assert not log.has_pending
    log.check_integrity([sequence.kv for sequence in (*grown, *others)])


def test_equal_blocks_that_grow_together_are_shared() -> None:
    log, replica = KvCacheManager(num_blocks=20, block_size=2), BlockPool(20)
    equal = [at_block_end(log, (1, 2, 3), number=number) for number in range(2)]
    assert log.grow(equal) == []
    replay(replica, log)
    assert len({block for sequence in equal for block in sequence.kv.held_blocks}) == 4
    log.check_integrity([sequence.kv for sequence in equal])


def test_blocks_whose_hash_is_taken_grow_as_private_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcache.hashing, "packed_block_hash", lambda packed, salt: 5)
    log, replica = KvCacheManager(num_blocks=20, block_size=2), BlockPool(20)
    other = admitted(log, (1, 2, 4, 5), number=0)
    sequence = at_block_end(log, (1, 2, 3), number=1)
    assert log.grow([sequence]) == []
    assert sequence.kv.first_private_block == 1
    replay(replica, log)
    assert [event.event for event in log.take_events() if event.packed_tokens == pack_tokens((3, 9))] == []
    log.check_integrity([other, sequence.kv])


def test_nothing_grows_that_might_need_a_preemption() -> None:
    log = KvCacheManager(num_blocks=5, block_size=2)
    sequences = [at_block_end(log, (1, 2, 3), number=0), at_block_end(log, (4, 5, 6), number=1)]
    digest = log.digest
    assert log.grow(sequences) == sequences
    assert log.digest == digest
    assert log.grow(sequences[:1]) == []


def test_a_step_has_one_run_of_grows() -> None:
    log, replica = KvCacheManager(num_blocks=20, block_size=2), BlockPool(20)
    one, two = at_block_end(log, (1, 2, 3), number=0), at_block_end(log, (4, 5, 6), number=1)
    assert log.grow([one]) == []
    assert log.grow([two]) == [two]
    log.append(two)
    replay(replica, log)
    three = at_block_end(log, (7, 7, 7), number=2)
    assert log.grow([three]) == []
    replay(replica, log)


def test_with_a_window_every_sequence_releases_before_it_grows() -> None:
    log = KvCacheManager(num_blocks=20, block_size=2, window=KvWindow(2, 8))
    sequence = at_block_end(log, (1, 2, 3), number=0)
    assert log.grow([sequence]) == [sequence]


def test_planning_changes_nothing() -> None:
    log = KvCacheManager(num_blocks=4, block_size=2)
    active = admitted(log, (1, 2, 3))
    log.take_pending()
    digest = log.digest
    plan = log.plan(sequence_of((1, 2, 3, 4), number=1))
    assert (plan.num_cached_tokens, plan.num_new_blocks) == (2, 1)
    assert log.digest == digest
    assert not log.has_pending
    log.check_integrity([active])


def test_a_block_without_owner_is_cached_but_not_free_of_charge() -> None:
    log = KvCacheManager(num_blocks=3, block_size=2)
    first = admitted(log, (1, 2))
    log.free(key_of(0), first, first.free_signals())
    assert (log.num_active, log.num_inactive, log.num_free, log.num_available) == (0, 1, 2, 3)
    plan = log.plan(sequence_of((1, 2, 3, 4, 5, 6), number=1))
    assert (plan.num_cached_tokens, plan.num_new_blocks) == (2, 3)
    assert log.can_admit(plan, is_alone=True)
    assert not log.can_admit(log.plan(sequence_of((1, 2, 3, 4, 5, 6, 7), number=1)), is_alone=True)


def test_the_watermark_is_for_others_only() -> None:
    log = KvCacheManager(num_blocks=100, block_size=1)
    full, nearly = (log.plan(sequence_of(tuple(range(count)))) for count in (100, 99))
    assert log.can_admit(full, is_alone=True)
    assert not log.can_admit(full, is_alone=False)
    assert log.can_admit(nearly, is_alone=False)


@pytest.mark.parametrize(
    ("start", "end", "budget", "size"),
    [
        (0, 3, 4, 3),
        (0, 4, 4, 4),
        (0, 5, 4, 4),
        (0, 9, 7, 4),
        (0, 9, 8, 8),
        (0, 9, 3, 0),
        (8, 9, 1, 1),
        (7, 8, 1, 1),
        (8, 20, 3, 0),
        (7, 20, 3, 1),
        (0, 9, 0, 0),
    ],
)
def test_a_chunk_ends_with_the_prefill_or_on_a_block_boundary(
    start: int, end: int, budget: int, size: int
) -> None:
    log = KvCacheManager(num_blocks=1, block_size=4)
    active = log.plan(sequence_of(tuple(range(end)))).active
    assert log.chunk_size(active, start, end, budget) == size


def test_a_failed_append_keeps_the_promotion_and_can_be_tried_again() -> None:
    log = KvCacheManager(num_blocks=2, block_size=2)
    sequence, other = running(log, (1,)), admitted(log, (7,), number=1)
    active = sequence.kv
    append(log, sequence, 2)
    log.take_pending()
    with pytest.raises(OutOfBlocks):
        append(log, sequence, 3)
    assert list(active.tokens) == [1, 2]
    assert [type(entry.signal) for entry in log.take_pending()] == [Promote]
    log.check_integrity([active, other])

    log.free(key_of(1), other, other.free_signals())
    log.append(sequence)
    assert list(active.tokens) == [1, 2, 3]
    assert [type(entry.signal) for entry in log.take_pending()] == [Destroy, Use]
    log.check_integrity([active])


def test_a_failed_allocation_changes_nothing() -> None:
    log = KvCacheManager(num_blocks=2, block_size=2)
    active = log.plan(sequence_of((1, 2, 3, 4, 5))).active
    digest = log.digest
    with pytest.raises(OutOfBlocks):
        log.allocate(key_of(0), active, 5)
    assert (log.digest, log.has_pending, active.num_committed_tokens) == (digest, False, 0)
    log.allocate(key_of(0), active, 4)
    log.check_integrity([active])


def test_freed_full_blocks_stay_cached_and_destroyed_ones_do_not() -> None:
    log = KvCacheManager(num_blocks=4, block_size=2)
    one, two = admitted(log, (1, 2, 3)), admitted(log, (4, 5, 6), number=1)
    log.take_pending()
    log.free(key_of(0), one, one.free_signals())
    log.free(key_of(1), two, two.destroy_signals())
    kinds = [type(entry.signal) for entry in log.take_pending()]
    assert kinds == [Destroy, Deref, Destroy, Destroy]
    assert (log.num_active, log.num_inactive, log.num_free) == (0, 1, 3)


def test_an_unknown_owner_breaks_the_integrity() -> None:
    log = KvCacheManager(num_blocks=4, block_size=2)
    admitted(log, (1, 2, 3))
    with pytest.raises(IntegrityBroken):
        log.check_integrity([])


def test_a_prompt_with_the_hash_of_another_counts_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcache.hashing, "packed_block_hash", lambda packed, salt: 5)
    log = KvCacheManager(num_blocks=8, block_size=2)
    owner = admitted(log, (1, 2, 3))
    plan = log.plan(sequence_of((8, 9, 10), number=1))
    assert owner.blocks[0] == FullBlock(5)
    assert (plan.num_cached_tokens, plan.num_new_blocks) == (0, 2)
    same = log.plan(sequence_of((1, 2, 10), number=1))
    assert (same.num_cached_tokens, same.num_new_blocks) == (2, 1)


def test_without_prefix_caching_equal_prompts_share_nothing() -> None:
    log = KvCacheManager(num_blocks=8, block_size=2, prefix_caching=False)
    one = admitted(log, (1, 2, 3))
    plan = log.plan(sequence_of((1, 2, 3), number=1))
    assert plan.num_cached_tokens == 0
    assert not set(plan.active.blocks) & set(one.blocks)


def test_scored_prompts_leave_shared_blocks_to_others_and_read_none() -> None:
    """Six sequences in a pool too small for six more copies of the prefix."""
    log = KvCacheManager(num_blocks=12, block_size=16)
    prefix = tuple(range(64))
    first = sequence_of((*prefix, 1))
    shared_blocks = log.plan(first).active.blocks[:4]
    serve(log, first)
    for number in range(1, 7):
        scored = sequence_of((*prefix, *(100 * number,) * 17), number=number, is_scored=True)
        assert log.plan(scored).num_cached_tokens == 0
        serve(log, scored)
    assert log.plan(sequence_of((*prefix, 2), number=9)).num_cached_tokens == 64
    # The last token is always recomputed: one token of a fully cached prompt remains.
    assert log.plan(sequence_of(prefix, number=9)).num_cached_tokens == 63
    cached = {FullBlock(block.sequence_hash) for block in log.cached_blocks()}
    assert set(shared_blocks) <= cached


def test_blocks_computed_for_a_scored_prompt_are_shared() -> None:
    log = KvCacheManager(num_blocks=12, block_size=16)
    serve(log, sequence_of(tuple(range(70)), is_scored=True))
    assert log.plan(sequence_of(tuple(range(70)), number=1)).num_cached_tokens == 64


def test_private_blocks_are_freed_immediately_and_evict_none() -> None:
    log = KvCacheManager(num_blocks=4, block_size=2)
    serve(log, sequence_of((1, 2, 3, 4)))
    for number in range(1, 4):
        private = sequence_of((1, 2, 3, 4), number=number, shares_cache=False)
        assert log.plan(private).num_cached_tokens == 0
        serve(log, private)
        assert (log.num_active, log.num_inactive, log.num_free) == (0, 2, 2)


def test_a_window_destroys_private_blocks_too() -> None:
    log = KvCacheManager(num_blocks=8, block_size=2, window=KvWindow(2, 2))
    private = sequence_of(tuple(range(8)), shares_cache=False)
    active = log.plan(private).active
    for start in range(0, 8, 2):
        log.allocate(private.key, active, start + 2, first_query=start)
        assert log.num_inactive == 0
    log.release(private.key, active, keep_content=True)
    assert (log.num_active, log.num_free) == (0, 8)


@pytest.mark.parametrize(
    ("prompt", "num_appended", "num_cached"),
    [((1, 2, 3), 1, 4), ((1, 2, 3), 0, 2), ((1,), 3, 4), ((1, 2), 0, 2), ((1, 2, 3), 3, 6)],
)
def test_a_block_that_is_complete_when_its_sequence_ends_can_be_hit(
    prompt: tuple[int, ...], num_appended: int, num_cached: int
) -> None:
    log, replica = KvCacheManager(num_blocks=8, block_size=2), BlockPool(8)
    sequence = running(log, prompt)
    for token in range(50, 50 + num_appended):
        append(log, sequence, token)
    computed = tuple(sequence.kv.tokens)
    assert len(computed) == len(prompt) + num_appended
    log.release(sequence.key, sequence.kv, keep_content=True)
    assert log.plan(sequence_of((*computed, 7, 8), number=1)).num_cached_tokens == num_cached
    log.check_integrity([])
    for entry in log.take_pending():
        replica.apply(entry.signal)
    assert replica.digest == log.digest


def test_a_sequence_that_ends_with_an_error_is_not_promoted() -> None:
    log = KvCacheManager(num_blocks=8, block_size=2)
    sequence = running(log, (1, 2, 3))
    append(log, sequence, 4)
    log.release(sequence.key, sequence.kv, keep_content=False)
    assert (log.num_active, log.num_inactive) == (0, 0)


def test_the_last_block_moves_over_to_its_twin() -> None:
    log = KvCacheManager(num_blocks=8, block_size=2)
    one, two = running(log, (1,)), running(log, (1,), number=1)
    for sequence in (one, two):
        append(log, sequence, 2)
    for sequence in (one, two):
        log.release(sequence.key, sequence.kv, keep_content=True)
    assert (log.num_active, log.num_inactive, log.num_free) == (0, 1, 7)


def test_a_last_block_whose_hash_is_taken_ends_as_a_private_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcache.hashing, "packed_block_hash", lambda packed, salt: 5)
    log = KvCacheManager(num_blocks=8, block_size=2)
    admitted(log, (1, 2, 3))
    sequence = running(log, (8,), number=1)
    append(log, sequence, 9)
    log.take_events()
    log.release(sequence.key, sequence.kv, keep_content=True)
    assert (log.num_active, log.num_inactive, log.take_events()) == (2, 0, [])


@pytest.mark.matrix(6)
@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("window", range(1, 7))
def test_the_first_chunk_of_an_admissible_sequence_fits(window: int, block_size: int) -> None:
    """For any pool, step length, prompt length and cached part of it."""
    sizes = itertools.product(range(1, 7), range(block_size, 6), range(1, 10), range(4))
    for num_blocks, max_step_tokens, num_tokens, num_before in sizes:
        log = KvCacheManager(
            num_blocks=num_blocks, block_size=block_size, window=KvWindow(window, max_step_tokens)
        )
        prompt = tuple(range(num_tokens))
        if 0 < num_before * block_size <= min(num_tokens, num_blocks * block_size):
            before = admitted(log, prompt[: num_before * block_size])
            log.free(key_of(0), before, before.free_signals())
        plan = log.plan(sequence_of(prompt, number=1))
        if log.can_admit(plan, is_alone=True):
            start = plan.num_cached_tokens
            size = log.chunk_size(plan.active, start, num_tokens, max_step_tokens)
            log.allocate(key_of(1), plan.active, start + size, first_query=start)
            log.check_integrity([plan.active])


@given(
    num_prompt_tokens=st.integers(1, 9),
    num_tokens=st.integers(1, 30),
    block_size=st.integers(1, 5),
    window=st.none() | st.integers(1, 12),
    keep_content=st.booleans(),
)
def test_tokens_within_the_slots_of_a_sequence_need_no_call(
    num_prompt_tokens: int, num_tokens: int, block_size: int, window: int | None, keep_content: bool
) -> None:
    kv_window = None if window is None else KvWindow(window, max_step_tokens=64)
    logs = [KvCacheManager(num_blocks=64, block_size=block_size, window=kv_window) for _ in range(2)]
    prompt = tuple(range(num_prompt_tokens))
    eager, lazy = (running(log, prompt) for log in logs)
    num_calls = 0
    for token in range(num_tokens):
        append(logs[0], eager, token)
        lazy.accept_token(token)
        if lazy.num_tokens > lazy.kv_end:
            logs[1].append(lazy)
            num_calls += 1
        Sequence.take_decodes([lazy])
        assert logs[0].digest == logs[1].digest
    if window is None:
        assert num_calls <= 2 + num_tokens // block_size
    assert tuple(lazy.kv.tokens) == tuple(eager.kv.tokens)
    for log, sequence in zip(logs, (eager, lazy), strict=True):
        active = sequence.release().active
        assert active is not None
        log.release(sequence.key, active, keep_content=keep_content)
        log.check_integrity([])
    assert logs[0].digest == logs[1].digest
    assert [entry.signal for entry in logs[0].take_pending()] == [
        entry.signal for entry in logs[1].take_pending()
    ]
