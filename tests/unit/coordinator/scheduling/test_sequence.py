"""A sequence keeps its counts, whatever happens to it, in every order that is legal."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.scheduling.lifecycle import IllegalTransition, SequenceState
from coordinator.scheduling.order import QueueOrder
from coordinator.scheduling.sequence import FinishReason, Sequence
from kvcache import ActiveSequence, Deref, Destroy
from tests.unit.coordinator.scheduling.pipeline_model import GREEDY, key_of
from wire.steps import EndRecord, StartRecord

BLOCK_SIZE = 4
STOP_TOKEN = 9


def new_sequence(prompt: tuple[int, ...] = (1, 2, 3), *, max_tokens: int = 4) -> Sequence:
    return Sequence(
        key_of(1),
        prompt,
        max_tokens=max_tokens,
        sampling=GREEDY,
        stop_token_ids=frozenset({STOP_TOKEN}),
        order=QueueOrder(0.0, 0),
    )


def new_kv(sequence: Sequence) -> ActiveSequence:
    ids = count(1)
    return ActiveSequence(
        sequence.all_tokens,
        block_size=BLOCK_SIZE,
        max_output_tokens=sequence.num_tokens_to_generate,
        new_id=lambda: next(ids),
    )


def begin(sequence: Sequence, *, num_cached_tokens: int = 0) -> ActiveSequence:
    kv = new_kv(sequence)
    sequence.begin_prefill(kv, num_cached_tokens=num_cached_tokens)
    return kv


def prefill(sequence: Sequence) -> None:
    """All of it, in one chunk."""
    kv = begin(sequence)
    sequence.take_start_record()
    kv.commit(sequence.num_tokens)
    sequence.take_chunk(sequence.num_uncomputed_prefill_tokens)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text"),
    [((), 1, "at least one token"), ((1,), 0, "at least 1, got 0"), ((1,), -1, "got -1")],
)
def test_a_sequence_without_prompt_or_tokens_to_make_is_refused(
    prompt: tuple[int, ...], max_tokens: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        new_sequence(prompt, max_tokens=max_tokens)


def test_the_first_token_enters_decode_and_the_last_one_finishes() -> None:
    sequence = new_sequence(max_tokens=2)
    prefill(sequence)
    assert sequence.accept_token(5) is None
    assert sequence.state is SequenceState.DECODE
    assert sequence.take_decode_token() == 5
    assert sequence.accept_token(6) is FinishReason.LENGTH
    assert sequence.state is SequenceState.FINISHED
    assert sequence.generated_tokens == (5, 6)
    assert sequence.all_tokens == (1, 2, 3, 5, 6)


def test_a_single_token_goes_from_prefill_to_finished() -> None:
    sequence = new_sequence(max_tokens=1)
    prefill(sequence)
    assert sequence.accept_token(5) is FinishReason.LENGTH
    assert sequence.state is SequenceState.FINISHED


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_stop_token_counts_as_stop_also_at_the_last_position(max_tokens: int) -> None:
    sequence = new_sequence(max_tokens=max_tokens)
    prefill(sequence)
    for _ in range(max_tokens - 1):
        assert sequence.accept_token(5) is None
        sequence.take_decode_token()
    assert sequence.accept_token(STOP_TOKEN) is FinishReason.STOP
    assert sequence.generated_tokens[-1] == STOP_TOKEN


def test_a_stop_token_in_the_prompt_does_not_stop() -> None:
    sequence = new_sequence((STOP_TOKEN, 1))
    prefill(sequence)
    assert sequence.accept_token(1) is None


def test_cached_tokens_are_those_of_the_first_start() -> None:
    sequence = new_sequence(tuple(range(9)))
    begin(sequence, num_cached_tokens=4)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (4, 4)
    assert sequence.num_uncomputed_prefill_tokens == 5
    sequence.preempt()
    begin(sequence, num_cached_tokens=8)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (8, 4)


def test_no_token_is_accepted_that_is_not_due() -> None:
    sequence = new_sequence()
    begin(sequence)
    with pytest.raises(AssertionError):
        sequence.accept_token(5)
    sequence.take_chunk(2)
    with pytest.raises(AssertionError):
        sequence.accept_token(5)
    sequence.take_chunk(1)
    sequence.accept_token(5)
    with pytest.raises(AssertionError):
        sequence.accept_token(5)


def test_a_chunk_cannot_pass_the_end_of_the_prefill() -> None:
    sequence = new_sequence()
    begin(sequence)
    with pytest.raises(AssertionError):
        sequence.take_chunk(4)
    with pytest.raises(AssertionError):
        sequence.take_chunk(0)


def test_the_newest_token_is_handed_out_once() -> None:
    sequence = new_sequence()
    prefill(sequence)
    assert not sequence.can_decode
    sequence.accept_token(5)
    sequence.take_decode_token()
    assert not sequence.can_decode
    with pytest.raises(AssertionError):
        sequence.take_decode_token()


def test_a_queued_sequence_has_no_blocks_to_ask_for() -> None:
    sequence = new_sequence()
    with pytest.raises(AssertionError, match="holds no blocks in state WAITING"):
        _ = sequence.kv


@pytest.mark.parametrize("keep_content", [True, False])
def test_release_gives_up_blocks_and_stage_state_once(keep_content: bool) -> None:
    sequence = new_sequence((1, 2, 3, 4, 5))
    kv = begin(sequence)
    kv.commit(5)
    sequence.take_start_record()
    release = sequence.release(keep_content=keep_content)
    assert release.key == sequence.key
    assert release.end == EndRecord(sequence.key, 0)
    assert release.active is kv
    assert [type(signal) for signal in release.signals] == [Destroy, Deref if keep_content else Destroy]
    again = sequence.release()
    assert (again.end, again.active, again.signals) == (None, None, [])


def test_no_end_record_without_a_start_record() -> None:
    sequence = new_sequence()
    begin(sequence)
    assert sequence.release().end is None


@pytest.mark.parametrize("state", [SequenceState.CANCELLED, SequenceState.FAILED])
def test_an_end_is_final(state: SequenceState) -> None:
    sequence = new_sequence()
    sequence.end(state)
    for wanted in (SequenceState.CANCELLED, SequenceState.FAILED):
        with pytest.raises(IllegalTransition):
            sequence.end(wanted)
    with pytest.raises(IllegalTransition):
        sequence.preempt()
    with pytest.raises(IllegalTransition):
        begin(sequence)


class AnySequence(RuleBasedStateMachine):
    """Does to one sequence whatever the scheduler may do, in any order."""

    @initialize(
        prompt=st.lists(st.integers(0, 8), min_size=1, max_size=10).map(tuple), max_tokens=st.integers(1, 6)
    )
    def arrive(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.sequence = new_sequence(prompt, max_tokens=max_tokens)
        self.prompt = prompt
        self.accepted: list[int] = []
        self.generation = 0
        self.has_start = False
        self.reason: FinishReason | None = None

    @precondition(lambda self: self.sequence.state.is_queued)
    @rule(data=st.data())
    def begin_prefill(self, data: st.DataObject) -> None:
        num_cached = data.draw(st.integers(0, self.sequence.num_tokens - 1))
        begin(self.sequence, num_cached_tokens=num_cached)
        self.has_start = False
        assert self.sequence.num_prefill_tokens == len(self.prompt) + len(self.accepted)
        assert self.sequence.num_computed_tokens == num_cached

    @precondition(lambda self: self.sequence.can_prefill)
    @rule(data=st.data())
    def take_chunk(self, data: st.DataObject) -> None:
        sequence = self.sequence
        size = data.draw(st.integers(1, sequence.num_uncomputed_prefill_tokens))
        start = sequence.num_computed_tokens
        record = sequence.take_start_record()
        if self.has_start:
            assert record is None
        else:
            tokens = (*self.prompt, *self.accepted)
            assert record == StartRecord(sequence.key, self.generation, len(self.prompt), tokens, GREEDY)
        self.has_start = True
        assert sequence.take_chunk(size) == sequence.all_tokens[start : start + size]

    @precondition(lambda self: self.sequence.can_decode)
    @rule()
    def take_decode_token(self) -> None:
        sequence = self.sequence
        assert sequence.num_computed_tokens == sequence.num_tokens - 1
        assert sequence.take_start_record() is None
        assert sequence.take_decode_token() == sequence.newest_token == self.accepted[-1]
        assert sequence.num_computed_tokens == sequence.num_tokens

    @precondition(lambda self: self.is_token_due)
    @rule(token=st.integers(0, STOP_TOKEN))
    def accept_token(self, token: int) -> None:
        self.reason = self.sequence.accept_token(token)
        self.accepted.append(token)
        is_full = len(self.accepted) == self.sequence.max_tokens
        if token == STOP_TOKEN:
            assert self.reason is FinishReason.STOP
        else:
            assert self.reason is (FinishReason.LENGTH if is_full else None)

    @precondition(lambda self: self.sequence.state in (SequenceState.PREFILL, SequenceState.DECODE))
    @rule()
    def preempt(self) -> None:
        release = self.sequence.preempt()
        assert release.end == (EndRecord(self.sequence.key, self.generation) if self.has_start else None)
        self.generation += 1
        self.has_start = False

    @precondition(lambda self: self.sequence.state.is_live)
    @rule(state=st.sampled_from([SequenceState.CANCELLED, SequenceState.FAILED]), chance=st.integers(0, 9))
    def end(self, state: SequenceState, chance: int) -> None:
        if chance == 0:
            self.sequence.end(state)

    @precondition(lambda self: not self.sequence.state.is_live)
    @rule(state=st.sampled_from([SequenceState.CANCELLED, SequenceState.FAILED]))
    def refuse_what_comes_after_the_end(self, state: SequenceState) -> None:
        for act in (lambda: self.sequence.end(state), self.sequence.preempt, lambda: begin(self.sequence)):
            with pytest.raises(IllegalTransition):
                act()

    @property
    def is_token_due(self) -> bool:
        sequence = self.sequence
        is_running = sequence.state in (SequenceState.PREFILL, SequenceState.DECODE)
        return is_running and sequence.num_computed_tokens == sequence.num_tokens

    @invariant()
    def counts_agree(self) -> None:
        sequence = self.sequence
        assert sequence.all_tokens == (*self.prompt, *self.accepted)
        assert sequence.generated_tokens == tuple(self.accepted)
        assert sequence.num_generated_tokens + sequence.num_tokens_to_generate == sequence.max_tokens
        assert 0 <= sequence.num_computed_tokens <= sequence.num_tokens
        assert sequence.generation == self.generation
        assert (sequence.state is SequenceState.FINISHED) == (self.reason is not None)
        assert sequence.num_cached_tokens < len(self.prompt)

    @invariant()
    def exactly_one_thing_comes_next(self) -> None:
        sequence = self.sequence
        assert not (sequence.can_prefill and sequence.can_decode)
        if sequence.state in (SequenceState.PREFILL, SequenceState.DECODE):
            assert sequence.can_prefill + sequence.can_decode + self.is_token_due == 1
        else:
            assert not (sequence.can_prefill or sequence.can_decode)
        if sequence.can_decode:
            assert sequence.num_computed_tokens == sequence.num_tokens - 1


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
