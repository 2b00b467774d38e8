"""Under any load and any mishap every request ends, with the tokens that it would have got alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import kvcache.hashing
from coordinator.scheduler.policy import SchedulerLimits
from kvcache import KvGroup, KvWindow
from tests.properties import examples
from tests.unit.coordinator.scheduler.pipeline_model import PipelineModel
from tests.unit.coordinator.scheduler.stage_replica import VOCAB_SIZE
from wire.steps import StageTime, Step


@dataclass(frozen=True, slots=True)
class Setup:
    block_size: int
    num_blocks: int
    num_stages: int
    limits: SchedulerLimits
    prefix_caching: bool
    window: int | None = None
    is_timed: bool = False
    other_groups: tuple[KvGroup, ...] = ()
    num_states: int = 0
    grid_tokens: int = 1
    late_positions: int = 0
    """Every so many positions the token is late; 0 for never."""

    @property
    def max_sequence_tokens(self) -> int:
        return self.block_size * self.num_blocks


@dataclass(frozen=True, slots=True)
class Arrival:
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: frozenset[int]
    client: str = ""


class Event(Enum):
    ARRIVE = auto()
    ADVANCE = auto()
    DELIVER = auto()
    CANCEL = auto()
    SLICE_ERROR = auto()
    END_EPOCH = auto()
    FAULT = auto()
    BEGIN_EPOCH = auto()


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Down to a pool of one block, and steps that hold no more than one block's tokens."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    max_steps_in_flight = draw(st.integers(1, 8))
    limits = SchedulerLimits(
        max_step_tokens=draw(st.integers(block_size, 4 * block_size + 3)),
        max_step_sequences=draw(st.integers(1, 6)),
        max_steps_in_flight=max_steps_in_flight,
        min_steps_in_flight=draw(st.none() | st.integers(1, max_steps_in_flight)),
    )
    return Setup(
        block_size=block_size,
        num_blocks=draw(st.integers(1 if block_size > 1 else 2, 12)),
        num_stages=draw(st.integers(1, 3)),
        limits=limits,
        prefix_caching=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 3 * block_size + 2)),
        is_timed=draw(st.booleans()),
        late_positions=draw(st.sampled_from([0, 0, 1, 3])),
    )


@st.composite
def setups_of_groups(draw: st.DrawFn) -> Setup:
    """With one or two windowed groups of at most as many blocks, down to what one sequence needs."""
    setup = draw(setups())
    size, most, max_step_tokens = setup.block_size, setup.num_blocks, setup.limits.max_step_tokens
    windows = sorted(draw(st.sets(st.integers(1, 3 * size + 2), min_size=1, max_size=3)), reverse=True)
    first = draw(st.sampled_from([None, windows[0]]))
    others = [KvWindow(window, max_step_tokens) for window in windows if window != first]
    return replace(
        setup,
        window=first,
        other_groups=tuple(
            KvGroup(draw(st.integers(min(most, window.min_blocks(size)), most)), window) for window in others
        ),
    )


@st.composite
def setups_with_states(draw: st.DrawFn) -> Setup:
    """With recurrent states, down to one, and snapshots at every block or far apart."""
    setup = draw(st.one_of(setups(), setups_of_groups()))
    return replace(setup, num_states=draw(st.integers(1, 5)), grid_tokens=draw(st.integers(1, 40)))


def made_up_times(step: Step) -> tuple[StageTime, ...]:
    """Times of two stages: chunks cost more at later positions, and some steps take very long."""
    context = sum(part.first_position for part in step.slices)
    slow = 100_000 if zlib.crc32(bytes([step.step_id % 256])) % 11 == 0 else 0
    own = 100 + 10 * step.num_tokens + 7 * context + slow
    return (StageTime(5, own), StageTime(0, 2 * own))


@st.composite
def arrivals(draw: st.DrawFn, setup: Setup) -> Arrival:
    """Prompts of one token, around block boundaries and longer than a chunk, that share their beginnings."""
    size, longest = setup.block_size, setup.max_sequence_tokens - 1
    lengths = {1, size - 1, size, size + 1, 2 * size, 3 * size + 1, setup.limits.max_step_tokens + 1, longest}
    length = draw(st.sampled_from(sorted(limit for limit in lengths if 0 < limit <= longest)))
    beginning = [draw(st.integers(0, 1))] * length
    own = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3))
    prompt = (*beginning, *own)[-length:] if draw(st.booleans()) else tuple(beginning)
    room = setup.max_sequence_tokens - length
    max_tokens = draw(st.one_of(st.just(1), st.just(min(room, 30)), st.integers(1, min(room, 12))))
    stops = draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1))
    return Arrival(prompt, max_tokens, stops, draw(st.sampled_from(["", "a", "b"])))


CALM = [Event.ARRIVE, Event.ADVANCE, Event.DELIVER]
PLACES = st.integers(0, 63)


class Load:
    """Plays events onto a model, then lets everything end."""

    def __init__(self, setup: Setup, requests: list[Arrival]) -> None:
        self.model = PipelineModel(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            limits=setup.limits,
            num_stages=setup.num_stages,
            prefix_caching=setup.prefix_caching,
            window=setup.window,
            other_groups=setup.other_groups,
            num_states=setup.num_states,
            grid_tokens=setup.grid_tokens,
        )
        if setup.is_timed:
            self.model.stage_times = made_up_times
        if every := setup.late_positions:
            self.model.late_at = lambda part: (part.first_position + len(part.tokens)) % every == 0
        self.waiting = list(reversed(requests))
        self.setup = setup
        self.num_tokens = sum(len(request.prompt) + request.max_tokens for request in requests)
        self.num_requests = len(requests)
        self.model.begin_epoch()

    def play(self, kind: Event, place: int) -> None:
        model = self.model
        match kind:
            case Event.ARRIVE if self.waiting:
                self.arrive()
            case Event.ADVANCE:
                model.advance(place % self.setup.num_stages)
            case Event.DELIVER:
                model.deliver()
            case Event.CANCEL:
                if live := [key for key, client in model.clients.items() if client.end is None]:
                    model.cancel(live[place % len(live)])
            case Event.SLICE_ERROR:
                self.run_into_an_error()
            case Event.END_EPOCH if model.is_serving:
                model.end_epoch()
            case Event.FAULT if model.scheduler.num_steps_in_flight:
                newest = model.sent[-1].step_id
                model.fault(newest - place % model.scheduler.num_steps_in_flight)
            case Event.BEGIN_EPOCH if not model.is_serving:
                model.begin_epoch()

    def arrive(self) -> None:
        request = self.waiting.pop()
        self.model.submit(
            request.prompt,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            client=request.client,
        )

    def run_into_an_error(self) -> None:
        """The first slice that is sampled next fails."""
        self.model.error_at = lambda part: True
        self.model.advance(self.setup.num_stages - 1)
        self.model.error_at = lambda part: False

    def finish(self) -> None:
        model = self.model
        while self.waiting:
            self.arrive()
        if not model.is_serving:
            model.begin_epoch()
        # In the worst case every request is recomputed for every other one, one token at a time.
        most_steps = 20 + self.num_tokens * (self.num_requests + 2)
        model.drain(max_steps=most_steps * (2 if self.setup.late_positions else 1))
        model.check_all_ended()

    @property
    def max_restarts(self) -> int:
        """Of one request."""
        return max((client.sequence.restart_count for client in self.model.clients.values()), default=0)


def play(setup: Setup, requests: list[Arrival], events: list[tuple[Event, int]]) -> Load:
    load = Load(setup, requests)
    for kind, place in events:
        load.play(kind, place)
    load.finish()
    event(f"restarts of one request: {load.max_restarts}")
    return load


def play_at_once(setup: Setup, requests: list[tuple[tuple[int, ...], int]]) -> None:
    """Prompts and how many tokens each generates, all there from the beginning, in a load that drains."""
    Load(setup, [Arrival(prompt, max_tokens, frozenset()) for prompt, max_tokens in requests]).finish()


QUIET = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(QUIET, max_examples=examples(1.25))
@given(data=st.data())
def test_every_load_ends_with_the_tokens_of_solo_runs(data: st.DataObject) -> None:
    setup = data.draw(setups())
    requests = data.draw(st.lists(arrivals(setup), max_size=10))
    events = data.draw(st.lists(st.tuples(st.sampled_from(CALM), PLACES), max_size=80))
    load = play(setup, requests, events)
    assert all(client.delivered == client.expected for client in load.model.clients.values())


@settings(QUIET, max_examples=examples(1.75))
@given(data=st.data())
def test_cancels_errors_and_restarts_change_no_other_request(data: st.DataObject) -> None:
    setup = data.draw(setups())
    requests = data.draw(st.lists(arrivals(setup), max_size=10))
    kinds = st.sampled_from([*CALM * 4, *Event])
    events = data.draw(st.lists(st.tuples(kinds, PLACES), max_size=100))
    play(setup, requests, events)


@settings(QUIET, max_examples=examples(1.25))
@given(data=st.data())
def test_no_request_is_lost_or_changed_with_several_block_groups(data: st.DataObject) -> None:
    """Every query finds what it sees in each group, and no group leaks a block."""
    setup = data.draw(setups_of_groups())
    requests = data.draw(st.lists(arrivals(setup), max_size=10))
    kinds = st.sampled_from([*CALM * 4, *Event])
    events = data.draw(st.lists(st.tuples(kinds, PLACES), max_size=100))
    play(setup, requests, events)


@settings(QUIET, max_examples=examples(1.25))
@given(data=st.data())
def test_no_request_is_lost_or_changed_with_recurrent_states(data: st.DataObject) -> None:
    """Every slice continues the state of its own tokens, and no slot leaks."""
    setup = data.draw(setups_with_states())
    requests = data.draw(st.lists(arrivals(setup), max_size=10))
    kinds = st.sampled_from([*CALM * 4, *Event])
    events = data.draw(st.lists(st.tuples(kinds, PLACES), max_size=100))
    play(setup, requests, events)


@settings(QUIET, max_examples=examples(0.6))
@given(data=st.data())
def test_states_of_equal_hashes_are_never_shared(data: st.DataObject) -> None:
    setup = data.draw(setups_with_states())
    requests = data.draw(st.lists(arrivals(setup), max_size=10))
    events = data.draw(st.lists(st.tuples(st.sampled_from(CALM), PLACES), max_size=80))
    with two_bits_of_hash():
        load = play(setup, requests, events)
    assert all(client.delivered == client.expected for client in load.model.clients.values())


@settings(QUIET, max_examples=examples(0.6))
@given(data=st.data())
def test_equal_hashes_are_never_shared_in_any_block_group(data: st.DataObject) -> None:
    setup = data.draw(setups_of_groups())
    requests = data.draw(st.lists(arrivals(setup), max_size=10))
    events = data.draw(st.lists(st.tuples(st.sampled_from(CALM), PLACES), max_size=80))
    with two_bits_of_hash():
        load = play(setup, requests, events)
    assert all(client.delivered == client.expected for client in load.model.clients.values())


@settings(QUIET, max_examples=examples(0.2))
@given(st.integers(2, 8), st.integers(1, 8), st.integers(2, 5))
def test_a_pool_that_holds_one_request_serves_them_one_after_the_other(
    num_requests: int, num_steps_in_flight: int, num_blocks: int
) -> None:
    limits = SchedulerLimits(max_step_tokens=8, max_step_sequences=4, max_steps_in_flight=num_steps_in_flight)
    setup = Setup(4, num_blocks, 2, limits, prefix_caching=True)
    longest = setup.max_sequence_tokens
    requests = [Arrival((number,), longest - 1, frozenset()) for number in range(num_requests)]
    load = play(setup, requests, [(Event.ARRIVE, 0)] * num_requests)
    assert all(len(client.delivered) == longest - 1 for client in load.model.clients.values())


@contextmanager
def two_bits_of_hash() -> Iterator[None]:
    """Every hash with room for collisions has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcache.hashing, "packed_block_hash", lambda packed, salt: zlib.crc32(packed) % 4)
        yield


@settings(QUIET, max_examples=examples(0.6))
@given(data=st.data())
def test_content_with_equal_hashes_is_never_shared(data: st.DataObject) -> None:
    setup = data.draw(setups())
    requests = data.draw(st.lists(arrivals(setup), max_size=10))
    events = data.draw(st.lists(st.tuples(st.sampled_from(CALM), PLACES), max_size=80))
    with two_bits_of_hash():
        load = play(setup, requests, events)
    assert all(client.delivered == client.expected for client in load.model.clients.values())


ONE_TOKEN_STEPS = SchedulerLimits(max_step_tokens=1, max_step_sequences=1, max_steps_in_flight=2)


def test_a_block_is_not_shared_after_its_parent_hash_was_reused() -> None:
    """The window lets the head of a prefix go before its end, and then the name of the head is free."""
    setup = Setup(1, 5, 1, ONE_TOKEN_STEPS, prefix_caching=True, window=3)
    with two_bits_of_hash():
        play_at_once(setup, [((0,), 1), ((0,), 1), ((1,), 4), ((6,), 4), ((0,), 4), ((0, 0), 1)])


def test_a_preempted_sequence_restarts_only_when_its_first_chunk_fits() -> None:
    """A window of one token hides the newest block too, which the sequence holds nevertheless."""
    setup = Setup(1, 3, 1, ONE_TOKEN_STEPS, prefix_caching=True, window=1)
    play_at_once(setup, [((0,), 1), ((0,), 1), ((0,), 2), ((1,), 2)])
