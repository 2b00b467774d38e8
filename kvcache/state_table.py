"""The recurrent states of a stage's sequences, updated by the signals that update the pool."""

from collections.abc import Hashable

from kvcache.errors import IntegrityBroken, SequenceHoldsState, StateNotHeld, StateTaken
from kvcache.states import (
    CopyState,
    FreeState,
    LiveState,
    SlotChange,
    StatePool,
    StateSignal,
    TakeState,
    check_position,
)


class StateTable:
    """The state pool of one stage, and the live state of each sequence.

    Keys identify sequences. A sequence's state begins with a `TakeState`, or a `CopyState` to a live state,
    of its key. A method that raises has changed nothing.
    """

    def __init__(self, num_states: int) -> None:
        self.pool = StatePool(num_states)
        self._states: dict[Hashable, LiveState] = {}

    @property
    def digest(self) -> int:
        """Compared with the digest in a frame after all signals of that frame."""
        return self.pool.digest

    def __contains__(self, key: Hashable) -> bool:
        return key in self._states

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, key: Hashable, signal: StateSignal) -> SlotChange | None:
        """Apply a signal of sequence `key`; return how a slot's content changes.

        Raises like `StatePool.apply`; StateNotHeld for another sequence's live state, StateTaken for a second
        one, and InvalidSignal for a copy at another position than the source's.
        """
        if isinstance(signal, FreeState):
            self._free(key, signal)
            return None
        begun = signal.state if isinstance(signal, TakeState) else signal.target
        if isinstance(begun, LiveState) and key in self._states:
            raise StateTaken(f"{signal}: sequence {key!r} has a state already")
        if isinstance(signal, CopyState):
            check_position(signal.position, self.pool.position_of(signal.source), signal)
        change = self.pool.apply(signal)
        if isinstance(begun, LiveState):
            self._states[key] = begun
        return change

    def _free(self, key: Hashable, signal: FreeState) -> None:
        is_live = isinstance(signal.state, LiveState)
        if is_live and self._states.get(key) != signal.state:
            raise StateNotHeld(f"{signal}: it is not the state of sequence {key!r}")
        self.pool.apply(signal)
        if is_live:
            del self._states[key]

    def slot(self, key: Hashable) -> int:
        """Slot of the sequence's state. Raises StateNotHeld."""
        return self.pool.slot_of(self._state(key))

    def position(self, key: Hashable) -> int:
        """Number of tokens that the sequence's state has seen. Raises StateNotHeld."""
        return self.pool.position_of(self._state(key))

    def advance(self, key: Hashable, position: int) -> None:
        """Record that the state has seen the tokens before `position`. Raises StateNotHeld."""
        self.pool.advance(self._state(key), position)

    def check_ended(self, key: Hashable) -> None:
        """Raise SequenceHoldsState if an ended sequence has a state."""
        if key in self._states:
            raise SequenceHoldsState(key)

    def check_integrity(self) -> None:
        """Check the pool, and that sequences own all live states. Raises IntegrityBroken."""
        self.pool.check_integrity(self._states.values())
        for key, state in self._states.items():
            if state not in self.pool:
                raise IntegrityBroken(f"sequence {key!r} has {state}, which has no slot")

    def _state(self, key: Hashable) -> LiveState:
        state = self._states.get(key)
        if state is None:
            raise StateNotHeld(f"sequence {key!r} has no state")
        return state
