"""Many sequences, one ledger, one stage: all agree with a naive model, and every token is correct."""

from collections.abc import Iterator
from itertools import count
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache import ActiveSequence, Announced, BlockTables, Ledger, OutOfBlocks, Promote, Signal
from tests.properties import examples
from tests.unit.kvcache.naive_pool import NaivePool

_NUM_BLOCKS, _BLOCK_SIZE = 7, 2
_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Serving(RuleBasedStateMachine):
    """Coordinator (sequences, ledger) and stage (tables, and pages that hold tokens for keys and values)."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(_NUM_BLOCKS, block_size=_BLOCK_SIZE)
        self.ledger_without_grows = Ledger(_NUM_BLOCKS, block_size=_BLOCK_SIZE)
        self.tables = BlockTables(_NUM_BLOCKS, block_size=_BLOCK_SIZE)
        self.model = NaivePool(_NUM_BLOCKS)
        self.slots: dict[int, int] = {}
        self.sequences: dict[int, ActiveSequence] = {}
        self.new_id = count(1 << 40).__next__
        self.keys = count()

    def send(self, key: int, signal: Signal) -> None:
        """Applies a signal to ledger and stage; a failed `Use` reaches neither model nor stage."""
        events = self.ledger.apply(self.sequences[key], signal)
        assert events == self.ledger_without_grows.apply(self.sequences[key], signal)
        assert list(events) == self.model.apply(signal)
        assert events == self.tables.apply(key, signal)
        assert self.tables.digest == self.ledger.digest

    def grow(self, key: int, token: int) -> bool:
        """Grows the sequence in ledger and stage, and applies two signals elsewhere; False if it does not."""
        sequence, announced = self.sequences[key], list[Announced]()
        grow = self.ledger.grow(sequence, token, announced)
        if grow is None:
            return False
        expected, events = list[Announced](), ()
        for signal in grow.signals:
            new = self.ledger_without_grows.apply(sequence, signal)
            assert list(new) == self.model.apply(signal)
            expected += self.ledger_without_grows.announced(new)
            events += new
        assert announced == expected
        assert self.tables.grow(key, grow) == events
        assert self.tables.digest == self.ledger.digest == self.ledger_without_grows.digest
        return True

    def compute(self, key: int, start: int, end: int) -> None:
        """Writes the writable tokens of start..end-1 and checks the tokens that the sequence reads."""
        sequence = self.sequences[key]
        for first, last in self.tables.writable_runs(key, start, end):
            for position in range(first, last):
                self.slots[self.slot(key, position)] = sequence.tokens[position]
        seen = [self.slots[self.slot(key, position)] for position in self.visible(key, end)]
        assert seen == [sequence.tokens[position] for position in self.visible(key, end)]

    def slot(self, key: int, position: int) -> int:
        page = self.tables.pages(key)[position // _BLOCK_SIZE - self.tables.first_block(key)]
        return page * _BLOCK_SIZE + position % _BLOCK_SIZE

    def visible(self, key: int, end: int) -> Iterator[int]:
        return iter(range(self.tables.first_block(key) * _BLOCK_SIZE, end))

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.sequences)), label="sequence")

    @rule(
        tokens=_tokens,
        prefix_caching=st.sampled_from([True, True, True, False]),
        is_announced=st.sampled_from([True, True, False]),
    )
    def arrive(self, tokens: list[int], prefix_caching: bool, is_announced: bool) -> None:
        self.sequences[next(self.keys)] = ActiveSequence(
            tokens,
            block_size=_BLOCK_SIZE,
            max_output_tokens=1000,
            prefix_caching=prefix_caching,
            is_announced=is_announced,
            new_id=self.new_id,
        )

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def allocate_chunk(self, data: st.DataObject) -> None:
        key = self.pick(data)
        sequence = self.sequences[key]
        start, length = sequence.num_committed_tokens, len(sequence)
        ends = [end for end in range(start + 1, length + 1) if end % _BLOCK_SIZE == 0 or end == length]
        if not ends:
            return
        end = data.draw(st.sampled_from(ends), label="end of chunk")
        use = self.ledger.prepare(sequence, end)
        assert use is not None
        assert use == sequence.prepare(end)
        try:
            self.send(key, use)
        except OutOfBlocks:
            assert sequence.num_committed_tokens == start
        else:
            sequence.commit(end)
            self.compute(key, start, end)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=_tokens, grows=st.booleans())
    def push(self, data: st.DataObject, tokens: list[int], grows: bool) -> None:
        key = self.pick(data)
        sequence = self.sequences[key]
        for token in tokens:
            is_up_to_date = sequence.num_committed_tokens == len(sequence)
            if grows and self.grow(key, token):
                self.compute(key, len(sequence) - 1, len(sequence))
                continue
            signals = self.ledger.push(sequence, token)
            assert not signals or is_up_to_date
            try:
                for signal in signals:
                    self.send(key, signal)
            except OutOfBlocks:
                assert not isinstance(signal, Promote)
                sequence.pop()
                return
            if is_up_to_date:
                self.compute(key, len(sequence) - 1, len(sequence))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        key = self.pick(data)
        for signal in self.sequences[key].preempt():
            self.send(key, signal)
        if key in self.tables:
            assert self.tables.pages(key) == []

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), shares=st.booleans())
    def finish(self, data: st.DataObject, shares: bool) -> None:
        key = self.pick(data)
        sequence = self.sequences[key]
        for signal in self.ledger.seal(sequence) if shares else []:
            self.send(key, signal)
        for signal in sequence.free_signals() if shares else sequence.destroy_signals():
            self.send(key, signal)
        if key in self.tables:
            self.tables.drop(key)
        del self.sequences[key]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release_head(self, data: st.DataObject) -> None:
        key = self.pick(data)
        sequence = self.sequences[key]
        num_tokens = data.draw(st.integers(0, len(sequence)), label="before token")
        for signal in sequence.release_before(num_tokens):
            self.send(key, signal)

    @invariant()
    def everything_adds_up(self) -> None:
        pool, model = self.ledger.pool, self.model
        assert pool.inactive == tuple(block.sequence_hash for block in model.inactive)
        assert {block: pool.refcount(block) for block in model.refcounts} == model.refcounts
        assert pool.num_active == len(model.refcounts)
        alive = [sequence for sequence in self.sequences.values() if sequence.num_allocated_blocks]
        self.ledger.check_integrity(alive)
        self.ledger_without_grows.check_integrity(alive)
        self.tables.check_integrity()

    @invariant()
    def sequences_hold_what_their_tables_show(self) -> None:
        for key, sequence in self.sequences.items():
            if key in self.tables:
                held = [self.tables.pool.page_of(block) for block in sequence.held_blocks]
                assert self.tables.pages(key) == held
                assert self.tables.first_block(key) == sequence.num_released_blocks


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=examples(5), stateful_step_count=20)


class CollidingServing(Serving):
    """Like Serving, with a hash of only the first token of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.weak_hash = patch("kvcache.hashing.packed_block_hash", lambda packed, salt: packed[0])
        self.weak_hash.start()

    def teardown(self) -> None:
        self.weak_hash.stop()


TestCollidingServing = CollidingServing.TestCase
TestCollidingServing.settings = settings(stateful_step_count=30)
