"""Full attention and a sliding window in one model: a pool for each, one admission, one hit."""

import pytest

from coordinator.scheduler.kv_manager import KvCacheManager
from kvcache import Deref, KvGroup, KvWindow, OutOfBlocks, Use
from kvcache.hashing import pack_tokens
from tests.unit.coordinator.scheduler.test_kv_manager import append, running, sequence_of
from wire.steps import SequenceSignal

WINDOW = KvWindow(6, max_step_tokens=8)
PROMPT = tuple(range(40))


def two_groups(*, num_blocks: int = 40, num_windowed: int = 20) -> KvCacheManager:
    """Blocks of four tokens, for layers with full attention and layers that see six tokens."""
    return KvCacheManager(num_blocks=num_blocks, block_size=4, other_groups=[KvGroup(num_windowed, WINDOW)])


def prefill(log: KvCacheManager, prompt: tuple[int, ...], *, number: int = 0) -> int:
    """Allocates the prompt in chunks of eight tokens, and ends the sequence. Returns its cached tokens."""
    sequence = sequence_of(prompt, number=number)
    plan = log.plan(sequence)
    assert log.can_admit(plan, is_alone=True)
    start = plan.num_cached_tokens
    while start < len(prompt):
        size = log.chunk_size(plan.active, start, len(prompt), 8)
        start = log.allocate(sequence.key, plan.active, start + size, first_query=start)
        log.check_integrity([plan.active])
    log.release(sequence.key, plan.active, keep_content=True)
    log.check_integrity([])
    return plan.num_cached_tokens


def in_group(log: KvCacheManager, group: int) -> list[SequenceSignal]:
    return [entry for entry in log.take_pending() if entry.group == group]


def test_only_the_windowed_group_releases_blocks() -> None:
    log = two_groups()
    sequence = running(log, PROMPT[:8])
    for token in range(40):
        append(log, sequence, token)
    full, windowed = sequence.kv.groups
    assert len(full.held_blocks) == 12
    assert len(windowed.held_blocks) == 2
    assert windowed.num_released_blocks == 10
    assert log.num_active == 14
    releases = [entry for entry in log.take_pending() if isinstance(entry.signal, Deref)]
    assert len(releases) == 10
    assert {entry.group for entry in releases} == {1}
    log.release(sequence.key, sequence.kv, keep_content=True)
    assert log.num_active == 0


def test_admission_counts_the_blocks_of_each_group() -> None:
    plan = two_groups().plan(sequence_of(PROMPT))
    assert plan.num_new_blocks == 10
    assert plan.other_new_blocks == (WINDOW.num_blocks(4),) == (4,)
    for num_blocks, num_windowed, fits in ((10, 5, True), (9, 5, False), (10, 2, False)):
        log = two_groups(num_blocks=num_blocks, num_windowed=num_windowed)
        assert log.can_admit(log.plan(sequence_of(PROMPT)), is_alone=True) == fits


def test_a_hit_needs_only_the_window_in_the_windowed_group() -> None:
    """The pool of five blocks evicts the head of the prompt long before its end."""
    log = two_groups(num_windowed=5)
    assert prefill(log, PROMPT) == 0
    log.take_pending()
    assert prefill(log, (*PROMPT, 77), number=1) == 40
    (first, *_) = [entry.signal for entry in in_group(log, 1)]
    assert isinstance(first, Use)
    assert first.first_block == 8


def test_a_block_of_other_content_outside_of_the_window_does_not_void_a_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The full group must not share a block whose hash has other content; a window skips it."""
    log = KvCacheManager(num_blocks=40, block_size=4, window=WINDOW)
    assert prefill(log, PROMPT) == 0
    cached = next(iter(log.cached_blocks()))
    assert cached.packed_tokens == pack_tokens(PROMPT[:4])
    monkeypatch.setitem(log._ledger._contents, cached.sequence_hash, (None, 0, b"other", b"other"))
    plan = log.plan(sequence_of((*PROMPT, 77), number=1))
    assert plan.num_cached_tokens == 40
    full = KvCacheManager(num_blocks=40, block_size=4)
    assert prefill(full, PROMPT) == 0
    monkeypatch.setitem(full._ledger._contents, cached.sequence_hash, (None, 0, b"other", b"other"))
    assert full.plan(sequence_of((*PROMPT, 77), number=1)).num_cached_tokens == 0


def test_a_group_without_blocks_takes_none_of_the_others() -> None:
    log = two_groups(num_windowed=2)
    others = [running(log, (number,) * 4, number=number) for number in (1, 2)]
    waiting = sequence_of(PROMPT[:8], number=3)
    active = log.plan(waiting).active
    num_active, digest = log.num_active, log.digest
    with pytest.raises(OutOfBlocks):
        log.allocate(waiting.key, active, 8)
    assert (log.num_active, log.digest) == (num_active, digest)
    others[0].accept_token(9)
    with pytest.raises(OutOfBlocks):
        log.append(others[0])
    assert (log.num_active, log.digest) == (num_active, digest)
    log.check_integrity([sequence.kv for sequence in others])
    log.release(others[1].key, others[1].kv, keep_content=False)
    log.append(others[0])
    assert [len(part) for part in others[0].kv.groups] == [5, 5]


def test_events_are_those_of_the_first_group() -> None:
    log, alone = two_groups(num_windowed=5), KvCacheManager(num_blocks=40, block_size=4)
    prefill(log, PROMPT)
    prefill(alone, PROMPT)
    tokens = [event.packed_tokens for event in log.take_events()]
    assert tokens == [event.packed_tokens for event in alone.take_events()]
    assert len(list(log.cached_blocks())) == 10
