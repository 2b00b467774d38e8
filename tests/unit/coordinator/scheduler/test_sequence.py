"""Every pair of states: what the design allows is legal, everything else raises."""

from __future__ import annotations

from bisect import insort
from collections import deque
from itertools import accumulate, count, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.scheduler import sequence as module
from coordinator.scheduler.sequence import (
    FinishReason,
    IllegalTransition,
    Priority,
    QueueOrder,
    Sequence,
    SequenceState,
    check_transition,
    queue_order,
)
from kvcache import ActiveSequence
from tests.properties import examples
from tests.unit.coordinator.scheduler.pipeline_model import GREEDY, key_of
from wire.errors import InvariantBroken
from wire.ids import RequestId, SequenceKey
from wire.steps import EndRecord, Prefill, StartRecord, TokenLogprobs

KEY = SequenceKey(RequestId(bytes(range(16))), 2)

W, P, D, R = SequenceState.WAITING, SequenceState.PREFILL, SequenceState.DECODE, SequenceState.PREEMPTED
F, C, X = SequenceState.FINISHED, SequenceState.CANCELLED, SequenceState.FAILED

LEGAL = {
    *((W, P), (P, D), (D, F)),
    (P, F),  # scoring, or max_tokens reached by the first token
    *((P, R), (D, R), (R, P)),
    (R, F),  # it made way for a suspect with the token whose text ends it
    *((W, C), (P, C), (D, C), (R, C)),
    *((W, X), (P, X), (D, X), (R, X)),
}


def test_the_design_names_all_states() -> None:
    assert set(SequenceState) == {W, P, D, R, F, C, X}


@pytest.mark.parametrize(("current", "wanted"), sorted(product(SequenceState, repeat=2), key=str))
def test_exactly_the_transitions_of_the_design_are_legal(
    current: SequenceState, wanted: SequenceState
) -> None:
    if (current, wanted) in LEGAL:
        check_transition(KEY, current, wanted)
        return
    with pytest.raises(IllegalTransition) as caught:
        check_transition(KEY, current, wanted)
    error = caught.value
    assert (error.sequence, error.current, error.wanted) == (KEY, current, wanted)
    assert str(error) == f"sequence {KEY} cannot go from {current.name} to {wanted.name}"
    assert "00010203-0405-0607-0809-0a0b0c0d0e0f/2" in str(error)


def test_live_and_queued_states() -> None:
    assert {state for state in SequenceState if state.is_live} == {W, P, D, R}
    assert {state for state in SequenceState if state.is_queued} == {W, R}
    assert {current for current, _ in LEGAL} == {state for state in SequenceState if state.is_live}


def decode(sequence: Sequence) -> int:
    """Take the newest token for a step, with a slot for it."""
    sequence.kv.push(sequence.newest_token)
    sequence.kv_end = sequence.num_tokens
    assert Sequence.take_decodes([sequence]) == ([sequence.newest_token], [sequence.num_tokens - 1])
    return sequence.newest_token


AGE_S = 10.0
NORMAL, HIGH = Priority.NORMAL, Priority.HIGH
CLASSES = st.sampled_from(Priority)


def order(priority: Priority, arrived_s: float, *, arrival: int, choice: int = 0) -> QueueOrder:
    return queue_order(priority, arrived_s=arrived_s, arrival=arrival, choice=choice, age_s=AGE_S)


def comes_first(late: Priority, early: Priority, after_s: float) -> bool:
    """Whether a request that comes `after_s` later overtakes one that waits."""
    return order(late, 100.0 + after_s, arrival=1) < order(early, 100.0, arrival=0)


@given(st.lists(st.tuples(CLASSES, st.floats(0, 20)), max_size=40))
def test_within_a_class_they_are_served_as_they_came(gaps: list[tuple[Priority, float]]) -> None:
    now_s, queue = 0.0, list[tuple[QueueOrder, Priority]]()
    for arrival, (priority, gap_s) in enumerate(gaps):
        now_s += gap_s
        insort(queue, (order(priority, now_s, arrival=arrival), priority))
    for priority in Priority:
        arrivals = [order.arrival for order, its_class in queue if its_class is priority]
        assert arrivals == sorted(arrivals)


@pytest.mark.parametrize(("late", "early"), list(product(Priority, repeat=2)))
def test_a_higher_class_overtakes_within_its_age_limit(late: Priority, early: Priority) -> None:
    ages = late - early
    for after_s in (0.0, 1.0, 9.9, 10.0, 10.1, 19.9, 20.0, 20.1, 1000.0):
        # Who came first wins when both are due at once.
        assert comes_first(late, early, after_s) == (after_s < ages * AGE_S)


@given(CLASSES, CLASSES, st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_no_request_is_overtaken_by_one_two_ages_later(
    late: Priority, early: Priority, waited_s: float, more_s: float
) -> None:
    first = order(early, waited_s, arrival=0)
    assert first < order(late, waited_s + 2 * AGE_S + more_s, arrival=1)


@given(
    own=CLASSES,
    others=st.lists(st.tuples(CLASSES, st.floats(0.01, 5)), min_size=1, max_size=300),
    service_s=st.floats(0.01, 5),
)
def test_a_request_is_served_under_any_number_of_later_ones(
    own: Priority, others: list[tuple[Priority, float]], service_s: float
) -> None:
    """One server, which is busy when it comes, and arrivals that may come faster than it serves."""
    arrived_s = list(accumulate(gap_s for _, gap_s in others))
    coming = deque(
        order(priority, at_s, arrival=number)
        for number, ((priority, _), at_s) in enumerate(zip(others, arrived_s, strict=True), start=1)
    )
    queue, served, now_s = [order(own, 0.0, arrival=0)], 0, service_s
    while True:
        while coming and arrived_s[coming[0].arrival - 1] <= now_s:
            insort(queue, coming.popleft())
        if queue.pop(0).arrival == 0:
            break
        served += 1
        now_s += service_s
    num_overtakers = sum(at_s < (HIGH - own) * AGE_S for at_s in arrived_s)
    assert served <= num_overtakers


@given(st.lists(st.tuples(CLASSES, st.floats(0, 1000)), min_size=2, max_size=20))
def test_the_order_of_two_never_changes_and_never_ties(arrivals: list[tuple[Priority, float]]) -> None:
    """It depends on nothing that time changes, so a queue stays sorted while it waits."""
    orders = sorted(
        order(priority, at_s, arrival=number, choice=choice)
        for number, (priority, at_s) in enumerate(arrivals)
        for choice in range(2)
    )
    assert all(one < other for one, other in pairwise(orders))


def test_choices_of_a_request_stay_together_in_their_order() -> None:
    keys = list(product((3, 4), (0, 1, 2)))
    orders = {order(NORMAL, 5.0, arrival=arrival, choice=choice) for arrival, choice in keys}
    assert [(order.arrival, order.choice) for order in sorted(orders)] == keys


BLOCK_SIZE = 4
STOP_TOKEN = 9


def new_sequence(
    prompt: tuple[int, ...] = (1, 2, 3), *, max_tokens: int = 4, wants_prompt_logprobs: bool = False
) -> Sequence:
    return Sequence(
        key_of(1),
        prompt,
        max_tokens=max_tokens,
        sampling=GREEDY,
        stop_token_ids=frozenset({STOP_TOKEN}),
        order=QueueOrder(0.0, 0),
        wants_prompt_logprobs=wants_prompt_logprobs,
    )


def test_identity_is_read_only() -> None:
    sequence = new_sequence()
    with pytest.raises(AttributeError):
        sequence.identity = b"another"  # type: ignore[misc]


def test_a_restored_finished_sequence_passes_the_table_of_transitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = list[tuple[SequenceState, SequenceState]]()
    monkeypatch.setattr(module, "check_transition", lambda key, *states: passed.append(states))
    sequence = new_sequence()
    counts = {"num_cached_tokens": 0, "num_restarts": 1}
    sequence.restore_finished((5, 6), reason=FinishReason.STOP, **counts)
    assert passed == [(W, P), (P, F)]
    assert sequence.generated_tokens == (5, 6)
    with pytest.raises(InvariantBroken, match="is new"):
        sequence.restore_finished((5, 6), reason=FinishReason.STOP, **counts)


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
    [
        ((), 1, "the minimum is one token"),
        ((), 0, "the minimum is one token"),
        ((1,), -1, "must not be negative, got -1"),
    ],
)
def test_a_sequence_without_prompt_or_with_less_than_no_tokens_is_rejected(
    prompt: tuple[int, ...], max_tokens: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        new_sequence(prompt, max_tokens=max_tokens)


def test_the_first_token_enters_decode_and_the_last_one_finishes() -> None:
    sequence = new_sequence(max_tokens=2)
    prefill(sequence)
    assert sequence.accept_token(5) is None
    assert sequence.state is SequenceState.DECODE
    assert decode(sequence) == 5
    assert sequence.accept_token(6) is FinishReason.LENGTH
    assert sequence.state is SequenceState.FINISHED
    assert sequence.generated_tokens == (5, 6)
    assert sequence.all_tokens == (1, 2, 3, 5, 6)


def test_a_single_token_goes_from_prefill_to_finished() -> None:
    sequence = new_sequence(max_tokens=1)
    prefill(sequence)
    assert sequence.accept_token(5) is FinishReason.LENGTH
    assert sequence.state is SequenceState.FINISHED


@pytest.mark.parametrize("token", [5, STOP_TOKEN])
def test_without_tokens_to_generate_the_result_only_ends_the_prompt(token: int) -> None:
    sequence = new_sequence(max_tokens=0)
    prefill(sequence)
    assert sequence.accept_token(token) is FinishReason.LENGTH
    assert sequence.state is SequenceState.FINISHED
    assert (sequence.all_tokens, sequence.generated_tokens) == ((1, 2, 3), ())


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_stop_token_counts_as_stop_also_at_the_last_position(max_tokens: int) -> None:
    sequence = new_sequence(max_tokens=max_tokens)
    prefill(sequence)
    for _ in range(max_tokens - 1):
        assert sequence.accept_token(5) is None
        decode(sequence)
    assert sequence.accept_token(STOP_TOKEN) is FinishReason.STOP
    assert sequence.generated_tokens[-1] == STOP_TOKEN


def test_a_stop_token_in_the_prompt_does_not_stop() -> None:
    sequence = new_sequence((STOP_TOKEN, 1))
    prefill(sequence)
    assert sequence.accept_token(1) is None


def test_cached_tokens_are_counted_at_the_first_start() -> None:
    sequence = new_sequence(tuple(range(9)))
    begin(sequence, num_cached_tokens=4)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (4, 4)
    assert sequence.num_uncomputed_prefill_tokens == 5
    sequence.preempt()
    begin(sequence, num_cached_tokens=8)
    assert (sequence.num_computed_tokens, sequence.num_cached_tokens) == (8, 4)


def test_tokens_that_are_not_due_are_rejected() -> None:
    sequence = new_sequence()
    begin(sequence)
    with pytest.raises(InvariantBroken):
        sequence.accept_token(5)
    sequence.take_chunk(2)
    with pytest.raises(InvariantBroken):
        sequence.accept_token(5)
    sequence.take_chunk(1)
    sequence.accept_token(5)
    with pytest.raises(InvariantBroken):
        sequence.accept_token(5)


def test_a_chunk_cannot_pass_the_end_of_the_prefill() -> None:
    sequence = new_sequence()
    begin(sequence)
    with pytest.raises(InvariantBroken):
        sequence.take_chunk(4)
    with pytest.raises(InvariantBroken):
        sequence.take_chunk(0)


def test_a_token_without_a_slot_is_not_handed_out() -> None:
    sequence = new_sequence()
    prefill(sequence)
    sequence.accept_token(5)
    with pytest.raises(InvariantBroken, match="has slots for its tokens"):
        Sequence.take_decodes([sequence])


def test_the_newest_token_is_handed_out_once() -> None:
    sequence = new_sequence()
    prefill(sequence)
    assert not sequence.can_decode
    sequence.accept_token(5)
    decode(sequence)
    assert not sequence.can_decode
    sequence.kv_end += 1
    with pytest.raises(InvariantBroken, match=r"has one token to compute; .* with 4 of 4 tokens computed"):
        Sequence.take_decodes([sequence])


@pytest.mark.parametrize("state", [C, X])
def test_an_ended_sequence_hands_out_no_token(state: SequenceState) -> None:
    sequence = new_sequence()
    prefill(sequence)
    sequence.accept_token(5)
    sequence.kv_end = sequence.num_tokens
    sequence.end(state)
    with pytest.raises(InvariantBroken, match=r"has one token to compute; .* with 3 of 4 tokens computed"):
        Sequence.take_decodes([sequence])


def test_a_queued_sequence_has_no_blocks_to_ask_for() -> None:
    sequence = new_sequence()
    with pytest.raises(InvariantBroken, match="holds no blocks in state WAITING"):
        _ = sequence.kv


def test_release_gives_up_blocks_and_stage_state_once() -> None:
    sequence = new_sequence((1, 2, 3, 4, 5))
    kv = begin(sequence)
    kv.commit(5)
    sequence.take_start_record()
    release = sequence.release()
    assert release.key == sequence.key
    assert release.end == EndRecord(sequence.key, 0)
    assert release.active is kv
    again = sequence.release()
    assert (again.end, again.active) == (None, None)


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


# Scores


def scores_of(first: int, count: int) -> tuple[TokenLogprobs, ...]:
    """One per prompt token from `first` on."""
    return tuple(TokenLogprobs(token, -1.0, 1) for token in range(first, first + count))


def test_every_chunk_of_a_scored_prompt_answers_for_the_tokens_that_follow_its_own() -> None:
    sequence = new_sequence(tuple(range(9)), wants_prompt_logprobs=True)
    begin(sequence)
    assert sequence.take_chunk(4) == ((0, 1, 2, 3), Prefill(0, 4, 9, is_scored=True))
    assert sequence.take_chunk(4) == ((4, 5, 6, 7), Prefill(4, 4, 9, is_scored=True))
    # The last token's successor is generated, not scored.
    assert sequence.take_chunk(1) == ((8,), Prefill(8, 1, 9))
    assert [sequence.num_prompt_logprobs(start, 4) for start in (0, 4)] == [4, 4]
    assert sequence.accept_prompt_logprobs(0, scores_of(1, 4)) == scores_of(1, 4)
    assert sequence.needs_scoring
    assert sequence.accept_prompt_logprobs(4, scores_of(5, 4)) == scores_of(5, 4)
    assert not sequence.needs_scoring


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    sequence = new_sequence((7,), wants_prompt_logprobs=True)
    assert not sequence.needs_scoring
    begin(sequence)
    assert sequence.take_chunk(1) == ((7,), Prefill(0, 1, 1))


def test_scored_tokens_are_computed_even_if_cached() -> None:
    sequence = new_sequence(tuple(range(9)), wants_prompt_logprobs=True)
    with pytest.raises(InvariantBroken, match="is computed where it is scored"):
        begin(sequence, num_cached_tokens=4)


def test_after_a_restart_only_new_scores_count() -> None:
    sequence = new_sequence(tuple(range(9)), wants_prompt_logprobs=True)
    begin(sequence)
    sequence.take_chunk(4)
    assert len(sequence.accept_prompt_logprobs(0, scores_of(1, 4))) == 4
    sequence.preempt()
    begin(sequence)
    # This chunk has answered in full before, the next one only in part.
    assert sequence.take_chunk(4)[1] == Prefill(0, 4, 9)
    assert sequence.accept_prompt_logprobs(0, ()) == ()
    sequence.preempt()
    begin(sequence)
    assert sequence.take_chunk(9)[1] == Prefill(0, 9, 9, is_scored=True)
    assert sequence.accept_prompt_logprobs(0, scores_of(1, 8)) == scores_of(5, 4)


def test_a_prompt_that_was_scored_once_may_come_from_the_cache() -> None:
    sequence = new_sequence(tuple(range(9)), wants_prompt_logprobs=True)
    begin(sequence)
    sequence.take_chunk(9)
    sequence.accept_prompt_logprobs(0, scores_of(1, 8))
    sequence.preempt()
    begin(sequence, num_cached_tokens=8)
    assert sequence.take_chunk(1)[1] == Prefill(8, 1, 9)


class AnySequence(RuleBasedStateMachine):
    """Applies all scheduler operations to one sequence, in any order."""

    @initialize(
        prompt=st.lists(st.integers(0, 8), min_size=1, max_size=10).map(tuple),
        max_tokens=st.integers(0, 6),
        wants_prompt_logprobs=st.booleans(),
    )
    def arrive(self, prompt: tuple[int, ...], max_tokens: int, wants_prompt_logprobs: bool) -> None:
        self.sequence = new_sequence(
            prompt, max_tokens=max_tokens, wants_prompt_logprobs=wants_prompt_logprobs
        )
        self.num_to_score = len(prompt) - 1 if wants_prompt_logprobs else 0
        self.unanswered: list[Prefill] = []
        self.scored: list[TokenLogprobs] = []
        self.prompt = prompt
        self.accepted: list[int] = []
        self.restart_count = 0
        self.has_start = False
        self.reason: FinishReason | None = None

    @precondition(lambda self: self.sequence.state.is_queued)
    @rule(data=st.data())
    def begin_prefill(self, data: st.DataObject) -> None:
        most = 0 if self.sequence.needs_scoring else self.sequence.num_tokens - 1
        num_cached = data.draw(st.integers(0, most))
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
            assert record == StartRecord(sequence.key, self.restart_count, len(self.prompt), tokens, GREEDY)
        self.has_start = True
        tokens, chunk = sequence.take_chunk(size)
        assert tokens == sequence.all_tokens[start : start + size]
        wanted = range(start + 1, min(start + size, self.num_to_score) + 1)
        is_scored = bool(wanted) and wanted[-1] > len(self.scored)
        assert chunk == Prefill(start, size, sequence.num_prefill_tokens, is_scored)
        self.unanswered.append(chunk)

    @precondition(lambda self: self.unanswered)
    @rule()
    def answer_chunk(self) -> None:
        chunk, sequence = self.unanswered.pop(0), self.sequence
        if not sequence.state.is_live or not chunk.is_scored:
            return
        wanted = sequence.num_prompt_logprobs(chunk.start, chunk.num_tokens)
        assert wanted == min(chunk.start + chunk.num_tokens, self.num_to_score) - chunk.start > 0
        new = sequence.accept_prompt_logprobs(chunk.start, scores_of(chunk.start + 1, wanted))
        self.scored.extend(new)
        assert [logprob.token for logprob in self.scored] == list(range(1, len(self.scored) + 1))

    @precondition(lambda self: self.sequence.can_decode)
    @rule()
    def take_decode(self) -> None:
        sequence = self.sequence
        assert sequence.num_computed_tokens == sequence.num_tokens - 1
        assert sequence.take_start_record() is None
        assert decode(sequence) == sequence.newest_token == self.accepted[-1]
        assert sequence.num_computed_tokens == sequence.num_tokens

    @precondition(lambda self: self.is_token_due)
    @rule(token=st.integers(0, STOP_TOKEN))
    def accept_token(self, token: int) -> None:
        while self.unanswered:
            self.answer_chunk()
        self.reason = self.sequence.accept_token(token)
        if self.sequence.max_tokens == 0:
            assert self.reason is FinishReason.LENGTH
            return
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
        assert release.end == (EndRecord(self.sequence.key, self.restart_count) if self.has_start else None)
        self.restart_count += 1
        self.has_start = False
        self.unanswered.clear()

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
        assert sequence.restart_count == self.restart_count
        assert (sequence.state is SequenceState.FINISHED) == (self.reason is not None)
        assert sequence.num_cached_tokens < len(self.prompt) == sequence.num_prompt_tokens
        assert sequence.num_prompt_tokens <= sequence.num_tokens
        assert sequence.needs_scoring == (len(self.scored) < self.num_to_score)

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
TestAnySequence.settings = settings(max_examples=examples(0.75), stateful_step_count=30)
