"""Portions of output: what arrived together, readers that are congested, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import pytest

from gateway.generation import Generation, GenerationSpec
from gateway.output import Delta, OutputRules
from gateway.rendering import Rendering
from gateway.text_thread import TextThread
from gateway.upstream.contract import Item, Tokens, UpstreamFailure
from tests.unit.gateway.fake_upstream import end_of

DEADLINE_S = 10.0
FAILURE = UpstreamFailure("gone", status=grpc.StatusCode.UNAVAILABLE, reason="UNAVAILABLE")


@dataclass
class Stream:
    """A stream that gets items from the test."""

    request_id: str = "r"
    secret: str = "s"
    client_state: bytes = b""
    items: list[Item] = field(default_factory=list)
    failure: UpstreamFailure | None = None
    has_ended: bool = False
    changed: Callable[[], None] | None = None
    num_taken: int = 0
    is_cancelled: bool = False

    def add(self, *items: Item, failure: UpstreamFailure | None = None, ends: bool = False) -> None:
        self.items += items
        self.failure, self.has_ended = failure, ends
        if self.changed is not None:
            self.changed()

    def take(self) -> Sequence[Item] | None:
        if self.items:
            items, self.items = self.items, []
            self.num_taken += len(items)
            return items
        if self.failure is not None:
            raise self.failure
        return None if self.has_ended else ()

    def notify(self, changed: Callable[[], None] | None) -> None:
        self.changed = changed
        if changed is not None and (self.items or self.has_ended or self.failure):
            changed()

    def __aiter__(self) -> AsyncIterator[Item]:
        raise NotImplementedError

    def stop(self, choice: int, num_tokens: int) -> None:
        raise NotImplementedError

    async def cancel(self) -> None:
        self.is_cancelled = True

    def detach(self) -> None:
        raise NotImplementedError


def tokens(first: int, *ids: int) -> Tokens:
    return Tokens(0, first, ids)


def rendering_of(*streams: Stream) -> Rendering[tuple[int, tuple[int, ...]]]:
    """Renders the choice and the tokens of each delta."""
    spec = GenerationSpec(rules=OutputRules(None), wants_tokens=True)
    generation = Generation(spec, [(1, 2)] * len(streams), streams, TextThread().of(""))
    return generation.rendering(lambda delta: None if delta.finish_reason else seen(delta))


def seen(delta: Delta) -> tuple[int, tuple[int, ...]]:
    return delta.choice, tuple(delta.token_ids)


async def test_what_arrived_together_is_one_portion() -> None:
    first, second = Stream(), Stream()
    first.add(tokens(0, 5), tokens(1, 6, 7))
    second.add(tokens(0, 8))
    portions = rendering_of(first, second).portions()
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(portions) == [(0, (5,)), (0, (6, 7)), (1, (8,))]
        first.add(end_of(0, 3), ends=True)
        second.add(tokens(1, 9), end_of(0, 2), ends=True)
        assert [portion async for portion in portions] == [[(1, (9,))]]
    assert first.changed is second.changed is None


async def test_what_arrives_while_the_reader_is_congested_stays_in_the_stream() -> None:
    stream, congested, drained = Stream(), asyncio.Event(), asyncio.Event()
    got: list[tuple[int, tuple[int, ...]]] = []

    def put(portion: list[tuple[int, tuple[int, ...]]]) -> bool:
        got.extend(portion)
        return False

    async def drain() -> None:
        congested.set()
        await drained.wait()

    delivering = asyncio.create_task(rendering_of(stream).deliver(put, drain))
    await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        stream.add(tokens(0, 5))
        await congested.wait()
        stream.add(tokens(1, 6))
        stream.add(tokens(2, 7), end_of(0, 3), ends=True)
        for _ in range(10):
            await asyncio.sleep(0.002)
        assert (stream.num_taken, got) == (1, [(0, (5,))])
        drained.set()
        await delivering
    assert got == [(0, (5,)), (0, (6,)), (0, (7,))]


async def test_a_failure_follows_the_output_before_it() -> None:
    stream = Stream()
    stream.add(tokens(0, 5), failure=FAILURE)
    portions = rendering_of(stream).portions()
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(portions) == [(0, (5,))]
        with pytest.raises(UpstreamFailure, match="gone"):
            await anext(portions)
    assert stream.changed is None


async def test_an_error_while_rendering_ends_the_reading() -> None:
    stream = Stream()
    stream.add(tokens(0, 5), tokens(1, 6))

    def fail(delta: Delta) -> None:
        raise KeyError("broken")

    generation = Generation(
        GenerationSpec(rules=OutputRules(None), wants_tokens=True), [(1,)], [stream], TextThread().of("")
    )
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(KeyError, match="broken"):
            await generation.rendering(fail).deliver(lambda portion: True, asyncio.Event().wait)  # type: ignore[arg-type]
        await generation.cancel()
    assert stream.is_cancelled
