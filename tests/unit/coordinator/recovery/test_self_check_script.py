"""Steps of a self-check: valid for every plan, with the features used in serving."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoint.boundary import BoundaryTensor
from coordinator.planner.plan import Plan, StepLimits, WorkerCapacity
from coordinator.recovery.self_check_script import Script, parts_for, texts_for, write_script
from coordinator.scheduler.kv_manager import KvCacheManager
from kvcache import (
    DEFAULT_SALT,
    ActiveSequence,
    BlockTables,
    CopyState,
    FreeState,
    KvWindow,
    LiveState,
    Removed,
    SavedState,
    StateTable,
    TakeState,
    combined_digest,
)
from stage_worker.validation import StageSequences, StepRules, check_limits, check_slices
from tests.unit.coordinator.cluster.cluster_driver import plan_of
from wire.ids import CHECK_REQUEST, SequenceKey, new_request_id, parse_request_id
from wire.steps import Decode, Prefill

VOCAB_SIZE = 100


def plan(
    *,
    block_size: int = 16,
    num_blocks: int = 64,
    max_step_tokens: int = 64,
    max_step_sequences: int = 16,
    max_sequence_tokens: int = 512,
) -> Plan:
    made = plan_of([WorkerCapacity(name="a", memory_bytes=1)], needed_bytes=0)
    limits = StepLimits(
        max_step_tokens=max_step_tokens,
        max_step_sequences=max_step_sequences,
        max_sequence_tokens=max_sequence_tokens,
    )
    return replace(made, limits=limits, num_blocks=num_blocks, block_size=block_size)


def script_for(made: Plan, *, window: int | None = None, first_step_id: int = 0) -> Script:
    kv = KvCacheManager(
        num_blocks=made.num_blocks,
        block_size=made.block_size,
        window=(window and KvWindow(window, made.limits.max_step_tokens)) or None,
        num_states=made.num_states,
    )
    script = write_script(made, 7, texts_for(made, VOCAB_SIZE), kv, first_step_id=first_step_id)
    kv.check_integrity([])
    assert not kv.has_pending and kv.num_active == 0
    return script


def replay(script: Script, made: Plan) -> None:
    """Applies a step as every stage does before computing."""
    rules = StepRules(
        takes_hidden=False,
        boundary=(BoundaryTensor(name="hidden_states", width=1),),
        vocab_size=VOCAB_SIZE,
        dtype=made.dtype,
        block_size=made.block_size,
        max_step_tokens=made.limits.max_step_tokens,
        max_step_sequences=made.limits.max_step_sequences,
        max_sequence_tokens=made.max_sequence_tokens,
    )
    tables, sequences = BlockTables(made.num_blocks, block_size=made.block_size), StageSequences()
    states = StateTable(made.num_states) if made.num_states else None
    for step in (scripted.step for scripted in script.steps):
        check_limits(step, rules)
        for end in step.ends:
            sequences.end(end)
        for start in step.starts:
            sequences.start(start)
        for entry in step.signals:
            if isinstance(entry.signal, TakeState | CopyState | FreeState):
                assert states is not None
                states.apply(entry.sequence, entry.signal)
            else:
                tables.apply(entry.sequence, entry.signal)
        assert combined_digest([tables.digest, *([] if states is None else [states.digest])]) == step.digest
        for end in step.ends:
            tables.drop(end.sequence)
        check_slices(step, sequences, [tables], rules, states).advance(sequences)
    assert len(sequences) == 0 and tables.pool.num_active == 0
    tables.check_integrity()


def test_the_script_covers_every_serving_path() -> None:
    made = plan()
    script = script_for(made)
    replay(script, made)
    slices = [part for scripted in script.steps for part in scripted.step.slices]
    decodes = [part.first_position for part in slices if isinstance(part.inference_step, Decode)]
    assert min(decodes) < 15 and max(decodes) > 16, "decodes on both sides of a block's boundary"
    assert any(
        len({part.first_position for part in scripted.step.slices if isinstance(part.inference_step, Decode)})
        > 1
        and any(isinstance(part.inference_step, Prefill) for part in scripted.step.slices)
        for scripted in script.steps
    ), "decodes of several lengths beside a chunk"
    chunks = [part for part in slices if isinstance(part.inference_step, Prefill)]
    assert any(part.first_position == 16 and part.sequence.choice == 2 for part in chunks), "a second chunk"
    first_positions = {part.sequence: part.first_position for part in reversed(slices)}
    assert sorted(first_positions.values()) == [0, 0, 0, 16, 16], "two begin behind a cached block"
    assert not script.left_out
    assert script.num_rows > 40


def test_no_step_waits_for_a_sampled_token() -> None:
    """The input tokens are those of the texts."""
    script = script_for(plan())
    for scripted in script.steps:
        for part, checked in zip(scripted.step.slices, scripted.slices, strict=True):
            text = script.texts[checked.text]
            assert part.tokens == text[checked.first : checked.first + checked.num_tokens]


def test_nothing_stays_cached_and_step_ids_follow() -> None:
    made = plan(num_blocks=8)
    kv = KvCacheManager(num_blocks=8, block_size=16)
    texts = texts_for(made, VOCAB_SIZE)
    first = write_script(made, 7, texts, kv)
    assert kv.num_inactive == 0
    second = write_script(made, 7, texts, kv, first_step_id=len(first.steps))
    ids = [scripted.step.step_id for script in (first, second) for scripted in script.steps]
    assert ids == list(range(len(ids)))
    assert len(first.steps) == len(second.steps)
    replay(Script(first.texts, first.steps + second.steps, ()), made)


def test_subscribers_learn_of_evicted_blocks_and_of_no_block_of_a_check() -> None:
    made = plan(num_blocks=8)
    kv = KvCacheManager(num_blocks=8, block_size=16)
    key = SequenceKey(new_request_id(), 0)
    cached = ActiveSequence(range(7 * 16), block_size=16, max_output_tokens=1, salt=DEFAULT_SALT, new_id=int)
    kv.allocate(key, cached, len(cached))
    kv.release(key, cached, keep_content=True)
    kv.take_events()
    kv.take_pending()
    before = {block.sequence_hash for block in kv.cached_blocks()}

    script = write_script(made, 7, texts_for(made, VOCAB_SIZE), kv)

    events = [event for event, _ in kv.take_events()]
    evicted = {name for event in events if isinstance(event, Removed) for name in event.block_hashes}
    assert all(isinstance(event, Removed) for event in events) and evicted
    assert {block.sequence_hash for block in kv.cached_blocks()} == before - evicted
    first_positions = [part.first_position for scripted in script.steps for part in scripted.step.slices]
    assert 16 in first_positions, "a prefix hit"


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16, 64, 128, 300])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_every_plan_has_a_script(block_size: int, num_blocks: int, window: int | None) -> None:
    made = plan(block_size=block_size, num_blocks=num_blocks, max_step_tokens=max(block_size, 8))
    script = script_for(made, window=window)
    replay(script, made)
    assert script.num_rows > 0


@pytest.mark.parametrize("max_step_tokens", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("max_step_sequences", [1, 2, 3])
@pytest.mark.parametrize("max_sequence_tokens", [1, 2, 16, 17, 18])
def test_every_limit_is_kept(max_step_tokens: int, max_step_sequences: int, max_sequence_tokens: int) -> None:
    made = plan(
        max_step_tokens=max_step_tokens,
        max_step_sequences=max_step_sequences,
        max_sequence_tokens=max_sequence_tokens,
    )
    script = script_for(made)
    replay(script, made)
    assert script.num_rows > 0


def test_cases_without_room_are_skipped_and_named() -> None:
    assert parts_for(plan(), 16)[1] == ["sequences of 16 tokens do not leave a block of 16"]
    assert parts_for(plan(max_step_tokens=8), 20)[1] == ["a step of 8 tokens does not hold a block of 16"]
    assert script_for(plan(num_blocks=2)).left_out == ()
    assert script_for(plan(num_blocks=1)).left_out


def test_the_request_id_of_a_check_is_unique() -> None:
    with pytest.raises(ValueError, match="expected version 7"):
        parse_request_id("00000000-0000-0000-0000-000000000000")
    assert {
        part.sequence.request_id for scripted in script_for(plan()).steps for part in scripted.step.slices
    } == {CHECK_REQUEST}


@pytest.mark.parametrize("num_states", [2, 3, 4, 64])
def test_states_are_saved_and_restored_in_every_plan_with_states(num_states: int) -> None:
    made = replace(plan(), num_states=num_states)
    script = script_for(made)
    replay(script, made)
    slices = [part for scripted in script.steps for part in scripted.step.slices]
    assert {isinstance(part.inference_step, Decode) for part in slices} == {True, False}
    copies = [
        (type(entry.signal.source), type(entry.signal.target), entry.signal.position)
        for scripted in script.steps
        for entry in scripted.step.signals
        if isinstance(entry.signal, CopyState)
    ]
    assert copies == [(LiveState, SavedState, 16)] + 2 * [(SavedState, LiveState, 16)]
    first_positions = {part.sequence: part.first_position for part in reversed(slices)}
    assert sorted(first_positions.values()) == [0, 0, 0, 16, 16], "two begin with a restored state"
    assert script.left_out == ()


def test_no_state_of_a_check_stays_saved() -> None:
    made = replace(plan(), num_states=8)
    kv = KvCacheManager(num_blocks=64, block_size=16, num_states=8)
    script = write_script(made, 7, texts_for(made, VOCAB_SIZE), kv)
    table = StateTable(8)
    for scripted in script.steps:
        for entry in scripted.step.signals:
            if isinstance(entry.signal, TakeState | CopyState | FreeState):
                table.apply(entry.sequence, entry.signal)
        for part in scripted.step.slices:
            table.advance(part.sequence, part.first_position + len(part.tokens))
    assert (table.pool.num_live, table.pool.num_snapshots) == (0, 0)


def test_blocks_that_suffice_without_states_suffice_with_them() -> None:
    assert script_for(replace(plan(num_blocks=2), num_states=8)).left_out == ()
