"""Slots for recurrent states: which states exist, the signals that change them, and the slot of each.

A state is what layers without keys and values keep of all tokens of a sequence so far, whatever their number.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from kvcache.errors import IntegrityBroken, InvalidSignal, OutOfStates, StateNotHeld, StateTaken
from kvcache.hashing import StreamDigest


@dataclass(slots=True, unsafe_hash=True)
class LiveState:
    """The state of one sequence, which advances with its tokens; the id is unique within an epoch."""

    id: int


@dataclass(slots=True, unsafe_hash=True)
class SavedState:
    """The state after the full block `sequence_hash`, which never changes."""

    sequence_hash: int


State = LiveState | SavedState


@dataclass(slots=True, unsafe_hash=True)
class TakeState:
    """`state` begins, with zeros: its sequence starts at position 0."""

    state: LiveState


@dataclass(slots=True, unsafe_hash=True)
class CopyState:
    """`target` begins as a copy of `source`, the state after `position` tokens.

    A snapshot is saved from a live state, and restored to one; a live state forks to another.
    """

    source: State
    target: State
    position: int


@dataclass(slots=True, unsafe_hash=True)
class FreeState:
    """`state` ends; its slot is free."""

    state: State


StateSignal = TakeState | CopyState | FreeState


class SlotChange(NamedTuple):
    """Slot `target` becomes a copy of slot `source`, or zeros (None)."""

    target: int
    source: int | None


class _Slot:
    """A slot: its number, and the number of tokens that its state has seen."""

    __slots__ = ("number", "position")

    def __init__(self, number: int) -> None:
        self.number = number
        self.position = 0


class StatePool:
    """`num_states` slots and the states in them.

    A snapshot is evicted, the least recently saved or restored one first, where a state begins and no slot is
    free; a live state never is. Pools that apply the same signals in the same order stay equal, slots
    included; `digest` proves it. An `apply` that raises has changed nothing.
    """

    def __init__(self, num_states: int) -> None:
        if num_states < 0:
            raise ValueError(f"num_states must not be negative, got {num_states}")
        self.num_states = num_states
        # Like pages: the slot freed last is reused first, unused ones follow in the order 0, 1, 2, ...
        self._freed: list[_Slot] = []
        self._num_made = 0
        self._live: dict[int, _Slot] = {}
        self._snapshots: OrderedDict[int, _Slot] = OrderedDict()
        self._digest = StreamDigest()

    @property
    def num_live(self) -> int:
        """States of sequences."""
        return len(self._live)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_free(self) -> int:
        return len(self._freed) + self.num_states - self._num_made

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Sequence hashes of the snapshots, least recently used first."""
        return tuple(self._snapshots)

    @property
    def digest(self) -> int:
        """64-bit digest of all signals applied so far and their outcomes (see `kvcache.hashing`)."""
        return self._digest.value

    def __contains__(self, state: State) -> bool:
        return self._find(state) is not None

    def slot_of(self, state: State) -> int:
        """Return the slot, 0..num_states-1. Raises StateNotHeld."""
        return self._held(state).number

    def position_of(self, state: State) -> int:
        """Return the number of tokens that `state` has seen, of a live one by `advance`."""
        return self._held(state).position

    def advance(self, state: LiveState, position: int) -> None:
        """Record that `state` has seen the tokens before `position`."""
        self._held(state).position = position

    def has_room(self, *, besides: SavedState | None = None) -> bool:
        """Whether another state can begin, without eviction of the snapshot `besides`."""
        is_kept = besides is not None and besides in self
        return self.num_free + self.num_snapshots - is_kept > 0

    def apply(self, signal: StateSignal) -> SlotChange | None:
        """Apply a signal and return how a slot's content changes; None for a state that ends.

        Raises OutOfStates or StateTaken (a state cannot begin), StateNotHeld, or InvalidSignal.
        """
        match signal:
            case TakeState():
                return self._take(signal)
            case CopyState():
                return self._copy(signal)
            case FreeState():
                self._free(signal)
                return None
        assert_never(signal)

    def check_integrity(self, owned: Iterable[LiveState] | None = None) -> None:
        """Check that every slot has one use, and that `owned` are all live states. Raises IntegrityBroken."""
        slots = [*self._freed, *self._live.values(), *self._snapshots.values()]
        if sorted(slot.number for slot in slots) != list(range(self._num_made)):
            raise IntegrityBroken(f"{len(slots)} slots in use or freed, {self._num_made} were made")
        if self._num_made > self.num_states:
            raise IntegrityBroken(f"{self._num_made} slots were made of {self.num_states}")
        if owned is None:
            return
        ids = [state.id for state in owned]
        if len(set(ids)) < len(ids) or set(ids) != self._live.keys():
            raise IntegrityBroken(f"{len(self._live)} live states, sequences own {len(ids)}")

    def _find(self, state: State) -> _Slot | None:
        if isinstance(state, LiveState):
            return self._live.get(state.id)
        return self._snapshots.get(state.sequence_hash)

    def _held(self, state: State) -> _Slot:
        slot = self._find(state)
        if slot is None:
            raise StateNotHeld(f"{state} is not in the pool")
        return slot

    def _take(self, take: TakeState) -> SlotChange:
        words = self._digest.begin_states(_TAKE, (*_words(take.state), 0))
        self._check_begin(take.state, None)
        slot, evicted = self._new_slot()
        self._put(take.state, slot, 0)
        self._digest.finish(words, evicted)
        return SlotChange(slot.number, None)

    def _copy(self, copy: CopyState) -> SlotChange:
        fields = (*_words(copy.source), *_words(copy.target), copy.position)
        words = self._digest.begin_states(_COPY, fields)
        source = self._held(copy.source)
        self._check_begin(copy.target, copy.source)
        if isinstance(copy.source, SavedState):
            self._snapshots.move_to_end(copy.source.sequence_hash)
        slot, evicted = self._new_slot()
        self._put(copy.target, slot, copy.position)
        self._digest.finish(words, evicted)
        return SlotChange(slot.number, source.number)

    def _free(self, free: FreeState) -> None:
        words = self._digest.begin_states(_FREE, _words(free.state))
        slot = self._held(free.state)
        if isinstance(free.state, LiveState):
            del self._live[free.state.id]
        else:
            del self._snapshots[free.state.sequence_hash]
        self._freed.append(slot)
        self._digest.finish(words, [])

    def _check_begin(self, state: State, source: State | None) -> None:
        if state in self:
            raise StateTaken(f"{state} is in the pool already")
        if not self.has_room(besides=source if isinstance(source, SavedState) else None):
            raise OutOfStates(self.num_states)

    def _new_slot(self) -> tuple[_Slot, list[int]]:
        """A slot, and the snapshot that was evicted for it, if any."""
        if self._freed:
            return self._freed.pop(), []
        if self._num_made < self.num_states:
            self._num_made += 1
            return _Slot(self._num_made - 1), []
        sequence_hash, slot = self._snapshots.popitem(last=False)
        return slot, [sequence_hash]

    def _put(self, state: State, slot: _Slot, position: int) -> None:
        slot.position = position
        if isinstance(state, LiveState):
            self._live[state.id] = slot
        else:
            self._snapshots[state.sequence_hash] = slot


_TAKE, _COPY, _FREE = 5, 6, 7
"""Kinds of signals in the digest, after the kinds of `kvcache.hashing`."""


def _words(state: State) -> tuple[int, int]:
    if isinstance(state, LiveState):
        return 0, state.id
    return 1, state.sequence_hash


def check_position(position: int, expected: int, signal: StateSignal) -> None:
    """Raise InvalidSignal for a copy of a state that has seen another number of tokens."""
    if position != expected:
        raise InvalidSignal(f"{signal}: the state has seen {expected} tokens")
