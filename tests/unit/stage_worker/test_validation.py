"""A stage counts its sequences by itself, and takes nothing that disagrees."""

from dataclasses import replace

import pytest

from checkpoint import DType
from checkpoint.boundary import BoundaryTensor
from stage_worker import validation
from stage_worker.validation import StageSequences, StepRules
from wire.errors import StepFault, StepFaultKind
from wire.ids import RequestId, SequenceKey
from wire.sampling import StepSampling
from wire.steps import Decode, EndRecord, Prefill, StartRecord, StepSlice, identity_of

GREEDY = StepSampling(temperature=0.0)
KEY = SequenceKey(RequestId(bytes(16)), 0)
OTHER = SequenceKey(RequestId(bytes(16)), 1)
TOKENS = tuple(range(100, 110))


def rules(max_sequence_tokens: int) -> StepRules:
    return StepRules(
        takes_hidden=True,
        boundary=(BoundaryTensor(name="hidden_states", width=4),),
        vocab_size=200,
        dtype=DType.F32,
        block_size=8,
        max_step_tokens=64,
        max_step_sequences=8,
        max_sequence_tokens=max_sequence_tokens,
    )


def start(restart_count: int = 0, key: SequenceKey = KEY) -> StartRecord:
    return StartRecord(key, restart_count, len(TOKENS), TOKENS, GREEDY)


def chunk(begin: int, end: int, *, restart_count: int = 0) -> StepSlice:
    return StepSlice(KEY, restart_count, TOKENS[begin:end], Prefill(begin, end - begin, len(TOKENS)))


def decode(position: int, *, restart_count: int = 0) -> StepSlice:
    return StepSlice(KEY, restart_count, (5,), Decode(position))


def started(restart_count: int = 0) -> StageSequences:
    states = StageSequences()
    states.start(start(restart_count))
    return states


def take(states: StageSequences, part: StepSlice, *, valid_until: int = 0) -> None:
    state = states.get(part.sequence)
    state.check(part, valid_until=valid_until)
    state.advance(part)


def refused(states: StageSequences, part: StepSlice, *, valid_until: int = 0) -> StepFault:
    with pytest.raises(StepFault) as fault:
        take(states, part, valid_until=valid_until)
    return fault.value


def test_chunks_and_decodes_follow_each_other() -> None:
    states = started()
    for part in (chunk(0, 4), chunk(4, 8), chunk(8, 10), decode(10), decode(11)):
        take(states, part)


@pytest.mark.parametrize("first", [0, 3, 8])
def test_a_fresh_sequence_begins_anywhere_inside_its_cached_tokens(first: int) -> None:
    states = started()
    take(states, chunk(first, 10), valid_until=8)
    take(states, decode(10), valid_until=8)


def test_a_fresh_sequence_may_not_begin_after_its_cached_tokens() -> None:
    fault = refused(started(), chunk(9, 10), valid_until=8)
    assert fault.kind is StepFaultKind.POSITION
    assert "position 9" in fault.message
    assert "end at 8" in fault.message


@pytest.mark.parametrize("first", [0, 3, 5, 8])
def test_cached_tokens_do_not_excuse_a_gap_or_a_repeat_later_on(first: int) -> None:
    states = started()
    take(states, chunk(0, 4), valid_until=8)
    assert refused(states, chunk(first, 10), valid_until=8).kind is StepFaultKind.POSITION


@pytest.mark.parametrize("position", [0, 9, 11])
def test_a_decode_at_another_position_is_rejected(position: int) -> None:
    states = started()
    take(states, chunk(0, 10))
    fault = refused(states, decode(position))
    assert fault.kind is StepFaultKind.POSITION
    assert "computed 10" in fault.message


def test_a_decode_before_the_prefill_is_done_is_rejected() -> None:
    states = started()
    assert refused(states, decode(0)).kind is StepFaultKind.SLICE_SET
    take(states, chunk(0, 4))
    assert refused(states, decode(4)).kind is StepFaultKind.SLICE_SET


def test_a_chunk_of_other_tokens_is_rejected() -> None:
    states = started()
    assert refused(states, replace(chunk(0, 2), tokens=(1, 2))).kind is StepFaultKind.SLICE_SET


def test_a_chunk_of_another_prefill_is_rejected() -> None:
    longer = StepSlice(KEY, 0, TOKENS[:4], Prefill(0, 4, 11))
    fault = refused(started(), longer)
    assert (fault.kind, "11" in fault.message) == (StepFaultKind.SLICE_SET, True)


@pytest.mark.parametrize("limit", [24, 29])
def test_a_further_block_extends_the_positions_that_decodes_may_use(limit: int) -> None:
    states = started()
    state, identity = states.get(KEY), identity_of(KEY, 0)
    assert states.grown(identity, rules(limit)) == KEY
    assert state.decode_end == 0  # its first decode looks at its blocks
    state.decode_end = 16
    for end in (24, limit):
        assert states.grown(identity, rules(limit)) == KEY
        assert state.decode_end == end


def test_a_further_block_of_another_start_is_looked_at() -> None:
    states = started(restart_count=1)
    states.get(KEY).decode_end = 16
    assert states.grown(identity_of(KEY, 0), rules(64)) == KEY
    assert states.get(KEY).decode_end == 0
    assert states.grown(identity_of(OTHER, 3), rules(64)) == OTHER


@pytest.mark.parametrize("restart_count", [0, 2])
def test_a_slice_of_another_restart_count_is_rejected(restart_count: int) -> None:
    fault = refused(started(1), chunk(0, 4, restart_count=restart_count))
    assert fault.kind is StepFaultKind.SLICE_SET


def test_a_slice_of_a_sequence_that_has_ended_is_rejected() -> None:
    states = started()
    take(states, chunk(0, 10))
    states.end(EndRecord(KEY, 0))
    assert refused(states, decode(10)).kind is StepFaultKind.SLICE_SET


def test_the_choices_of_a_request_are_sequences_of_their_own() -> None:
    states = started()
    other = SequenceKey(KEY.request_id, 1)
    states.start(start(key=other))
    states.end(EndRecord(other, 0))
    take(states, chunk(0, 4))


@pytest.mark.parametrize("restart_count", [0, 1])
def test_a_start_of_a_live_sequence_is_rejected(restart_count: int) -> None:
    with pytest.raises(StepFault, match=r"RECORD.*restart count 0 is live"):
        started().start(start(restart_count))


def test_a_second_start_with_a_restart_count_that_has_ended_is_rejected() -> None:
    states = started()
    states.end(EndRecord(KEY, 0))
    with pytest.raises(StepFault, match=r"RECORD.*ended already"):
        states.start(start(0))
    states.start(start(1))


def test_the_memory_of_ended_sequences_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "ENDED_REMEMBERED", 2)
    states = StageSequences()
    for restart_count in range(4):
        states.start(start(restart_count))
        states.end(EndRecord(KEY, restart_count))
    states.start(start(1))
    states.end(EndRecord(KEY, 1))
    with pytest.raises(StepFault, match="ended already"):
        states.start(start(3))


@pytest.mark.parametrize("restart_count", [1, 2])
def test_an_end_of_an_unknown_sequence_is_rejected(restart_count: int) -> None:
    states = started()
    with pytest.raises(StepFault, match="RECORD"):
        states.end(EndRecord(KEY, restart_count))
    states.end(EndRecord(KEY, 0))
    with pytest.raises(StepFault, match="RECORD"):
        states.end(EndRecord(KEY, 0))


@pytest.mark.parametrize("num_prompt_tokens", [0, 11])
def test_a_start_record_that_contradicts_itself_is_rejected(num_prompt_tokens: int) -> None:
    record = replace(start(), num_prompt_tokens=num_prompt_tokens)
    with pytest.raises(StepFault, match="RECORD"):
        StageSequences().start(record)
