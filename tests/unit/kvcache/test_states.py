"""Slots of recurrent states: conformance vectors, replicas, and the ledger's decisions."""

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import (
    ActiveSequence,
    CopyState,
    FreeState,
    IntegrityBroken,
    InvalidSignal,
    KvCacheError,
    LiveState,
    OutOfStates,
    SavedState,
    SequenceHoldsState,
    SlotChange,
    State,
    StateLedger,
    StateNotHeld,
    StatePool,
    StateSignal,
    StateTable,
    StateTaken,
    TakeState,
    hashing,
)
from kvcache import errors as kv_errors
from tests.properties import examples
from tests.repository import DATA

_VECTORS: list[Any] = json.loads((DATA / "state_vectors.json").read_text())


def _state(name: str | int) -> State:
    return SavedState(name) if isinstance(name, int) else LiveState(int(name[1:]))


def _signal(op: str, args: list[Any]) -> StateSignal:
    match op:
        case "take":
            state = _state(args[0])
            assert isinstance(state, LiveState)
            return TakeState(state)
        case "copy":
            return CopyState(_state(args[0]), _state(args[1]), args[2])
        case "free":
            return FreeState(_state(args[0]))
    raise AssertionError(f"the vectors have a new operation {op!r}")


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in _VECTORS])
def test_the_pool_equals_the_vectors(case: Any) -> None:
    pool = StatePool(case["num_states"])
    for step in case["steps"]:
        signal, digest = _signal(step["op"], step["args"]), pool.digest
        if "error" in step:
            with pytest.raises(getattr(kv_errors, step["error"])):
                pool.apply(signal)
            assert pool.digest == digest
        else:
            assert pool.apply(signal) == (step["change"] and SlotChange(**step["change"]))
        pool.check_integrity()
    end = {"num_live": pool.num_live, "snapshots": list(pool.snapshots), "num_free": pool.num_free}
    assert end | {"digest": pool.digest} == case["end"]


_states = st.one_of(st.builds(LiveState, st.integers(1, 4)), st.builds(SavedState, st.integers(1, 4)))
_signals = st.one_of(
    st.builds(TakeState, st.builds(LiveState, st.integers(1, 4))),
    st.builds(CopyState, _states, _states, st.integers(0, 3)),
    st.builds(FreeState, _states),
)


@settings(max_examples=examples(2))
@given(num_states=st.integers(0, 4), signals=st.lists(_signals, max_size=20))
def test_replicas_stay_equal_and_no_slot_is_lost(num_states: int, signals: list[StateSignal]) -> None:
    one, two = StatePool(num_states), StatePool(num_states)
    for signal in signals:
        before = one.digest, one.num_live, one.snapshots, one.num_free
        try:
            change = one.apply(signal)
        except KvCacheError:
            assert (one.digest, one.num_live, one.snapshots, one.num_free) == before
            continue
        assert two.apply(signal) == change
        assert (one.digest, one.snapshots, one.num_free) == (two.digest, two.snapshots, two.num_free)
        assert one.digest != before[0]
        assert one.num_live + one.num_snapshots + one.num_free == num_states
        one.check_integrity()


def test_another_owner_of_a_live_state_breaks_the_integrity() -> None:
    pool = StatePool(2)
    pool.apply(TakeState(LiveState(1)))
    pool.check_integrity([LiveState(1)])
    for owned in ([], [LiveState(2)], [LiveState(1), LiveState(1)]):
        with pytest.raises(IntegrityBroken):
            pool.check_integrity(owned)


def test_a_table_refuses_a_second_state_and_another_sequences() -> None:
    table = StateTable(4)
    table.apply("a", TakeState(LiveState(1)))
    with pytest.raises(StateTaken):
        table.apply("a", TakeState(LiveState(2)))
    with pytest.raises(StateNotHeld):
        table.apply("b", FreeState(LiveState(1)))
    with pytest.raises(SequenceHoldsState):
        table.check_ended("a")
    table.apply("a", FreeState(LiveState(1)))
    table.check_ended("a")
    with pytest.raises(StateNotHeld):
        table.slot("a")


def test_a_table_refuses_a_copy_at_another_position_than_the_states() -> None:
    table = StateTable(4)
    table.apply("a", TakeState(LiveState(1)))
    table.advance("a", 32)
    with pytest.raises(InvalidSignal, match="has seen 32 tokens"):
        table.apply("a", CopyState(LiveState(1), SavedState(7), 16))
    table.apply("a", CopyState(LiveState(1), SavedState(7), 32))
    with pytest.raises(InvalidSignal, match="has seen 32 tokens"):
        table.apply("b", CopyState(SavedState(7), LiveState(2), 16))
    table.apply("b", CopyState(SavedState(7), LiveState(2), 32))
    assert table.position("b") == 32
    table.check_integrity()


_IDS = count(1)


def _sequence(num_tokens: int, *, prefix_caching: bool = True, first_token: int = 0) -> ActiveSequence:
    return ActiveSequence(
        range(first_token, first_token + num_tokens),
        block_size=4,
        max_output_tokens=9,
        prefix_caching=prefix_caching,
        new_id=_IDS.__next__,
    )


def _ledger(num_states: int, grid_tokens: int = 8) -> StateLedger:
    return StateLedger(num_states, block_size=4, new_id=_IDS.__next__, grid_tokens=grid_tokens)


@pytest.mark.parametrize(
    ("end", "stops"), [(3, [3]), (4, [4]), (5, [4, 5]), (9, [8, 9]), (18, [8, 16, 18]), (22, [8, 16, 20, 22])]
)
def test_prefills_stop_on_the_grid_and_before_the_last_token(end: int, stops: list[int]) -> None:
    ledger, sequence, found = _ledger(1), _sequence(end), [0]
    while found[-1] < end:
        found.append(ledger.next_stop(sequence, found[-1], end))
    assert found[1:] == stops
    assert [position for position in range(end) if ledger.is_stop(sequence, position, end)] == stops[:-1]


def test_private_content_has_no_stops() -> None:
    ledger, private, partly = _ledger(1), _sequence(22, prefix_caching=False), _sequence(22)
    assert ledger.next_stop(private, 0, 22) == 22
    assert not any(ledger.is_stop(private, position, end) for position in range(22) for end in (22, None))
    partly.make_private(3)
    assert [ledger.next_stop(partly, start, 22) for start in (0, 8)] == [8, 22]
    assert [position for position in range(22) if ledger.is_stop(partly, position, 22)] == [8]


def test_a_grid_below_a_block_is_a_block() -> None:
    assert _ledger(1, grid_tokens=1).next_stop(_sequence(99), 0, 99) == 4


def test_a_hit_needs_a_snapshot_of_the_same_content() -> None:
    ledger, first = _ledger(4), _sequence(18)
    ledger.start(first, 0)
    assert ledger.hit_blocks(first) == frozenset()
    assert len(ledger.save(first, 8, lambda name: True)) == 1
    assert ledger.save(first, 8, lambda name: True) == [], "a snapshot is saved once"
    assert ledger.hit_blocks(_sequence(9)) == {2}
    assert ledger.hit_blocks(_sequence(7)) == frozenset()
    second = _sequence(12)
    (restored,) = ledger.start(second, 8)
    assert isinstance(restored, CopyState) and restored.position == 8
    ledger.check_integrity([first, second])


def test_a_snapshot_in_the_last_slot_that_is_not_live_is_no_hit() -> None:
    ledger, first = _ledger(2), _sequence(18)
    ledger.start(first, 0)
    ledger.save(first, 8, lambda name: True)
    assert ledger.hit_blocks(_sequence(9)) == frozenset()
    ledger.end(first)
    assert ledger.hit_blocks(_sequence(9)) == {2}


def test_a_snapshot_of_other_content_with_the_same_hash_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "sequence_hash", lambda parent, block_hash: 7 if parent is None else 8)
    ledger, first, other = _ledger(4), _sequence(9), _sequence(9, first_token=50)
    ledger.start(first, 0)
    ledger.save(first, 8, lambda name: True)
    assert ledger.hit_blocks(_sequence(9)) == {2}
    assert ledger.hit_blocks(other) == frozenset()


def test_private_content_is_not_saved() -> None:
    ledger, private = _ledger(4), _sequence(18, prefix_caching=False)
    ledger.start(private, 0)
    assert ledger.save(private, 8, lambda name: True) == []


def test_a_snapshot_without_its_block_is_freed_before_others_are_evicted() -> None:
    ledger, sequence = _ledger(3), _sequence(30)
    ledger.start(sequence, 0)
    ledger.save(sequence, 8, lambda name: True)
    ledger.save(sequence, 16, lambda name: True)
    of_16 = sequence.full_block(3)[0]
    signals = ledger.save(sequence, 24, lambda name: name != of_16)
    assert signals[0] == FreeState(SavedState(of_16))
    assert ledger.hit_blocks(sequence) == {2, 6}


def test_a_failed_sequence_leaves_no_snapshot() -> None:
    ledger, sequence = _ledger(3), _sequence(30)
    ledger.start(sequence, 0)
    ledger.save(sequence, 8, lambda name: True)
    ledger.end(sequence)
    assert ledger.pool.num_snapshots == 1
    ledger.discard(sequence)
    assert ledger.pool.num_free == 3


def test_sequences_beyond_the_states_wait() -> None:
    ledger, one, two = _ledger(1), _sequence(9), _sequence(9)
    ledger.start(one, 0)
    assert not ledger.has_room(two, 0)
    with pytest.raises(OutOfStates):
        ledger.start(two, 0)
    assert two.state is None
    assert ledger.save(one, 8, lambda name: True) == [], "all slots are live"
    ledger.end(one)
    assert ledger.has_room(two, 0)
