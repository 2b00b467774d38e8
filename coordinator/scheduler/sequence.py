"""A sequence: queue order, states with their transition table, tokens, progress and blocks. Pure."""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import NamedTuple

from kvcache import ActiveSequence
from wire.errors import InvariantBroken
from wire.ids import SequenceKey
from wire.sampling import StepSampling
from wire.steps import EndRecord, Prefill, StartRecord, TokenLogprobs, identity_of


class SequenceState(Enum):
    """Lifecycle states of a sequence."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    PREEMPTED = auto()
    FINISHED = auto()
    CANCELLED = auto()
    FAILED = auto()

    @property
    def is_live(self) -> bool:
        return self in _LIVE

    @property
    def is_queued(self) -> bool:
        """Waits for its (next) prefill without blocks."""
        return self in (SequenceState.WAITING, SequenceState.PREEMPTED)


_LIVE = frozenset(
    {SequenceState.WAITING, SequenceState.PREFILL, SequenceState.DECODE, SequenceState.PREEMPTED}
)

_RUNNING = (SequenceState.DECODE, SequenceState.PREFILL)
_DECODE = SequenceState.DECODE

LEGAL_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILL, SequenceState.CANCELLED, SequenceState.FAILED}),
    SequenceState.PREFILL: frozenset(
        {
            SequenceState.DECODE,
            SequenceState.FINISHED,
            SequenceState.PREEMPTED,
            SequenceState.CANCELLED,
            SequenceState.FAILED,
        }
    ),
    SequenceState.DECODE: frozenset(
        {SequenceState.FINISHED, SequenceState.PREEMPTED, SequenceState.CANCELLED, SequenceState.FAILED}
    ),
    SequenceState.PREEMPTED: frozenset(
        {
            SequenceState.PREFILL,
            # A stop string was found in its text after it was requeued for a suspect.
            SequenceState.FINISHED,
            SequenceState.CANCELLED,
            SequenceState.FAILED,
        }
    ),
    SequenceState.FINISHED: frozenset(),
    SequenceState.CANCELLED: frozenset(),
    SequenceState.FAILED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A transition that `LEGAL_TRANSITIONS` does not have: a defect."""

    def __init__(self, sequence: SequenceKey, current: SequenceState, wanted: SequenceState) -> None:
        super().__init__(f"sequence {sequence} cannot go from {current.name} to {wanted.name}")
        self.sequence = sequence
        self.current = current
        self.wanted = wanted


def check_transition(sequence: SequenceKey, current: SequenceState, wanted: SequenceState) -> None:
    """Raise IllegalTransition unless the table has `current` -> `wanted`."""
    if wanted not in LEGAL_TRANSITIONS[current]:
        raise IllegalTransition(sequence, current, wanted)


class Priority(IntEnum):
    """Priority classes; the value times `age_s` is subtracted from the arrival time (`queue_order`)."""

    LOW = -1
    NORMAL = 0
    HIGH = 1


class QueueOrder(NamedTuple):
    """Sort key: of one client and class the smallest is served first, and the largest preempted first.

    `due_s` is the arrival time shifted by priority. So the order of two sequences never changes while they
    wait. Clients take turns within a class; see `SequenceQueue.fairest`.
    """

    due_s: float
    arrival: int
    choice: int = 0
    priority: Priority = Priority.NORMAL


def queue_order(
    priority: Priority, *, arrived_s: float, arrival: int, choice: int = 0, age_s: float
) -> QueueOrder:
    """`arrival` numbers requests and breaks ties; `age_s` is the shift per priority class."""
    return QueueOrder(arrived_s - priority * age_s, arrival, choice, priority)


class FinishReason(Enum):
    """Why a sequence is FINISHED."""

    STOP = auto()
    LENGTH = auto()


@dataclass(frozen=True, slots=True)
class Release:
    """End record for the stages, if the sequence was started on them, and its blocks, if any."""

    key: SequenceKey
    end: EndRecord | None
    active: ActiveSequence | None


class Sequence:
    """A prompt and its generated tokens.

    The first `kv_end` tokens need no change of blocks; a longer sequence needs `KvCacheManager.append`.
    `traceparent` is the header of the request's span, empty if stages do not record spans.

    `num_computed_tokens` of `all_tokens` are in sent steps, so their KV is in the cache or will be. Between
    two decode steps, exactly the last token is not computed. Tokens are only appended.

    Sequences share cached prefixes only with sequences of the same `cache_salt`, except blocks within
    `num_public_tokens`, and with none if `shares_cache` is False. With `max_tokens` 0, the prompt is
    computed and nothing is generated. `client` is whose part of the pipeline it takes.

    Raises:
        ValueError: the prompt is empty or `max_tokens` is negative.
    """

    def __init__(
        self,
        key: SequenceKey,
        prompt: tuple[int, ...],
        *,
        max_tokens: int,
        sampling: StepSampling,
        stop_token_ids: frozenset[int],
        order: QueueOrder,
        cache_salt: str = "",
        num_public_tokens: int = 0,
        shares_cache: bool = True,
        wants_prompt_logprobs: bool = False,
    ) -> None:
        if not prompt:
            raise ValueError("prompt is empty, the minimum is one token")
        if max_tokens < 0:
            raise ValueError(f"max_tokens must not be negative, got {max_tokens}")
        self._key = key
        self._state = SequenceState.WAITING
        self._tokens = list(prompt)
        self._num_prompt_tokens = len(prompt)
        self._max_length = len(prompt) + max_tokens
        self._sampling = sampling
        self._stop_token_ids = stop_token_ids
        self.order, self.client = order, ""
        self._cache_salt, self.num_public_tokens = cache_salt, num_public_tokens
        self._shares_cache = shares_cache
        self._num_to_score = len(prompt) - 1 if wants_prompt_logprobs else 0
        self._num_scored = 0
        self._restart_count = self._first_restart_count = 0
        self._num_cached_tokens = 0
        self._kv: ActiveSequence | None = None
        self._num_computed = 0
        self._num_prefill_tokens = 0
        self._is_started = False
        self._identity = identity_of(key, 0)
        self.kv_end = 0
        self.wants_logprobs = sampling.logprobs is not None
        self.traceparent = ""

    @property
    def key(self) -> SequenceKey:
        return self._key

    @property
    def identity(self) -> bytes:
        """Name of the current start in steps and results, empty once the sequence has ended."""
        return self._identity

    @property
    def state(self) -> SequenceState:
        return self._state

    @property
    def sampling(self) -> StepSampling:
        return self._sampling

    @property
    def cache_salt(self) -> str:
        return self._cache_salt

    @property
    def shares_cache(self) -> bool:
        """Whether blocks are shared with sequences of the same salt; otherwise they are private."""
        return self._shares_cache

    @property
    def restart_count(self) -> int:
        """Number of this start, unique per key within an epoch."""
        return self._restart_count

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        return self._max_length - self._num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_generated_tokens(self) -> int:
        return len(self._tokens) - self._num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were cache hits at the first start."""
        return self._num_cached_tokens

    @property
    def needs_scoring(self) -> bool:
        """Prompt log-probabilities are missing, so the prefill computes cached tokens too."""
        return self._num_scored < self._num_to_score

    @property
    def num_restarts(self) -> int:
        """How often the sequence returned to the queue."""
        return self._restart_count - self._first_restart_count

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens after the current prefill, cached ones included."""
        return self._num_prefill_tokens

    @property
    def num_uncomputed_prefill_tokens(self) -> int:
        return self._num_prefill_tokens - self._num_computed

    @property
    def num_tokens_to_generate(self) -> int:
        return self._max_length - len(self._tokens)

    @property
    def all_tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    @property
    def generated_tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens[self._num_prompt_tokens :])

    @property
    def kv(self) -> ActiveSequence:
        """Block accounting of the current start, with all computed tokens; a queued sequence has none.

        Tokens within `kv_end` are added here, so that decode steps do not touch the accounting.
        """
        active = self._kv
        if active is None:
            raise InvariantBroken(f"sequence {self._key} holds no blocks in state {self._state.name}")
        if len(active) < self._num_computed:
            active.extend(self._tokens[len(active) : self._num_computed])
        return active

    @property
    def can_prefill(self) -> bool:
        """Has prompt chunks that were not sent."""
        return self._state is SequenceState.PREFILL and self._num_computed < self._num_prefill_tokens

    @property
    def can_decode(self) -> bool:
        """Its newest token was not sent yet."""
        return self._state is SequenceState.DECODE and self._num_computed < len(self._tokens)

    def restore(
        self, tokens: tuple[int, ...], *, num_scored: int, num_cached_tokens: int, num_restarts: int
    ) -> None:
        """Restore a new sequence from the journal; with tokens, its state is as after a preemption."""
        self._require(self._state is SequenceState.WAITING, "is new")
        self._tokens += tokens
        self._num_scored = num_scored
        self._num_cached_tokens = num_cached_tokens
        self._first_restart_count = -num_restarts
        if tokens or num_scored:
            self._first_restart_count -= 1
            self._move_to(SequenceState.PREFILL)
            self._move_to(SequenceState.PREEMPTED)

    def restore_finished(
        self, tokens: tuple[int, ...], *, num_cached_tokens: int, num_restarts: int, reason: FinishReason
    ) -> None:
        """Restore a finished sequence from the journal."""
        self._require(self._state is SequenceState.WAITING, "is new")
        self._tokens += tokens
        self._num_cached_tokens = num_cached_tokens
        self._first_restart_count = -num_restarts
        self._move_to(SequenceState.PREFILL)
        self.finish(reason)

    def start_at_restart_count(self, restart_count: int) -> None:
        """Count starts from `restart_count` on; an earlier sequence of the same key used the others."""
        self._require(self._state.is_queued, "waits")
        self._first_restart_count += restart_count - self._restart_count
        self._set_restart_count(restart_count)

    def begin_prefill(self, kv: ActiveSequence, *, num_cached_tokens: int) -> None:
        """Start or restart: compute all tokens except the leading cached ones."""
        self._require(num_cached_tokens == 0 or not self.needs_scoring, "is computed where it is scored")
        self._move_to(SequenceState.PREFILL)
        self._kv = kv
        self._num_prefill_tokens = len(self._tokens)
        self._num_computed = num_cached_tokens
        if self.num_restarts == 0:
            self._num_cached_tokens = num_cached_tokens

    def take_chunk(self, num_tokens: int) -> tuple[tuple[int, ...], Prefill]:
        """Take the next `num_tokens` tokens of the prefill for a step."""
        self._require(
            self.can_prefill and 0 < num_tokens <= self.num_uncomputed_prefill_tokens,
            f"has a chunk of {num_tokens} tokens left",
        )
        start, end = self._num_computed, self._num_computed + num_tokens
        self._num_computed = end
        # A chunk scores the tokens that follow its own, because the first prompt token has no predecessor.
        is_scored = start < self._num_to_score and min(end, self._num_to_score) > self._num_scored
        prefill = Prefill(start, num_tokens, self._num_prefill_tokens, is_scored)
        return tuple(self._tokens[start:end]), prefill

    @staticmethod
    def take_decodes(sequences: list["Sequence"]) -> tuple[list[int], list[int]]:
        """Take the newest token of each of `sequences` for a step; returns tokens and positions."""
        positions = [sequence._num_computed for sequence in sequences]
        for sequence, position in zip(sequences, positions, strict=True):
            end = sequence._num_computed = position + 1
            if end != len(sequence._tokens) or sequence._state is not _DECODE:
                sequence._num_computed = position
                raise sequence._broken("has one token to compute")
            if end > sequence.kv_end:
                sequence._num_computed = position
                raise sequence._broken(f"has slots for its tokens, not for {sequence.kv_end}")
        return [sequence._tokens[-1] for sequence in sequences], positions

    @staticmethod
    def without_slot(sequences: list["Sequence"]) -> list["Sequence"]:
        """Those of `sequences` whose newest token needs a change of blocks."""
        return [sequence for sequence in sequences if len(sequence._tokens) > sequence.kv_end]

    @property
    def newest_token(self) -> int:
        return self._tokens[-1]

    def num_prompt_logprobs(self, start: int, num_tokens: int) -> int:
        """Number of results of a scored chunk: one per token that follows its own within the prompt."""
        return min(start + num_tokens, self._num_to_score) - start

    def accept_prompt_logprobs(
        self, start: int, logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """Accept the results of a scored chunk from position `start`; return the new ones.

        After a restart, chunks score tokens again that were scored before.
        """
        if not logprobs:
            return ()
        self._require(start <= self._num_scored, "is scored in order")
        new = logprobs[self._num_scored - start :]
        self._num_scored += len(new)
        return new

    def accept_token(self, token: int) -> FinishReason | None:
        """Append a sampled token; return the finish reason, or None if the sequence continues.

        With `max_tokens` 0, the token only signals that the prompt is computed.
        """
        return self.accept_tokens([self], (token,))[0]

    @staticmethod
    def accept_tokens(sequences: list["Sequence"], tokens: tuple[int, ...]) -> list[FinishReason | None]:
        """`accept_token` for each of `sequences`."""
        reasons: list[FinishReason | None] = [None] * len(sequences)
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            own, length = sequence._tokens, sequence._num_computed + 1
            if sequence._state is _DECODE and len(own) + 1 == length < sequence._max_length:
                own.append(token)
                if token in sequence._stop_token_ids:
                    reasons[row] = sequence.finish(FinishReason.STOP)
            else:
                reasons[row] = sequence._accept_first_or_last(token)
        return reasons

    def _accept_first_or_last(self, token: int) -> FinishReason | None:
        """Accept the token after the prompt, or the one that reaches the limit."""
        if self._num_computed != len(self._tokens) or self._state not in _RUNNING:
            raise self._broken("waits for a token")
        if len(self._tokens) < self._max_length:
            self._tokens.append(token)
            if token in self._stop_token_ids:
                return self.finish(FinishReason.STOP)
        if len(self._tokens) == self._max_length:
            return self.finish(FinishReason.LENGTH)
        if self._state is SequenceState.PREFILL:
            self._move_to(SequenceState.DECODE)
        return None

    def truncate(self, num_generated: int) -> None:
        """Drop the tokens after the first `num_generated` of a finished sequence that holds no blocks."""
        self._require(not self._state.is_live and self._kv is None, "has ended")
        del self._tokens[self._num_prompt_tokens + num_generated :]

    def finish(self, reason: FinishReason) -> FinishReason:
        """Move to FINISHED and return `reason`."""
        self._move_to(SequenceState.FINISHED)
        return reason

    def take_start_record(self) -> StartRecord | None:
        """Take the start record of this start; None after the first call."""
        if self._is_started:
            return None
        self._is_started = True
        return StartRecord(
            self._key,
            self._restart_count,
            self._num_prompt_tokens,
            tuple(self._tokens),
            self._sampling,
            self.traceparent,
            self.client,
        )

    def end(self, state: SequenceState) -> None:
        """Move to CANCELLED or FAILED."""
        self._move_to(state)

    def release(self) -> Release:
        """Release blocks and stage state."""
        end = EndRecord(self._key, self._restart_count) if self._is_started else None
        active = None if self._kv is None else self.kv
        self._kv, self._is_started = None, False
        return Release(self._key, end, active)

    def preempt(self) -> Release:
        """Return to the queue with all tokens; results of steps in flight belong to an earlier start."""
        self._move_to(SequenceState.PREEMPTED)
        release = self.release()
        self._set_restart_count(self._restart_count + 1)
        self._num_computed = self.kv_end = 0
        self._num_prefill_tokens = 0
        return release

    def _set_restart_count(self, restart_count: int) -> None:
        self._restart_count = restart_count
        self._identity = identity_of(self._key, restart_count)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise self._broken(what)

    def _broken(self, what: str) -> InvariantBroken:
        return InvariantBroken(
            f"expected that sequence {self._key} {what}; it is in state {self._state.name} "
            f"with {self._num_computed} of {len(self._tokens)} tokens computed"
        )

    def _move_to(self, state: SequenceState) -> None:
        check_transition(self._key, self._state, state)
        self._state = state
        if not state.is_live:
            self._identity = b""


MAX_REMEMBERED = 8192
"""Number of ended sequences whose restart count is remembered, at some 270 bytes each.

More than a stage remembers, and more than can end while a result is in flight.
"""


class UsedRestartCounts:
    """Last restart count of each ended sequence, so that a reused request id continues with the next one.

    Results of the earlier request may still be in flight, and stages reject a second start with one count.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[SequenceKey, int] = OrderedDict()

    def first_unused(self, key: SequenceKey) -> int:
        """First unused restart count of `key`."""
        return self._last.get(key, -1) + 1

    def record_end(self, key: SequenceKey, restart_count: int) -> None:
        """Record the last restart count of an ended sequence."""
        self._last[key] = restart_count
        self._last.move_to_end(key)
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)

    def clear(self) -> None:
        """Forget all sequences, at the end of an epoch."""
        self._last.clear()
