"""Planted bugs of Serve: plausible mistakes that schedules of gateways must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from coordinator.engine.engine import Engine
from coordinator.engine.output_batch import BatchMessage, NumberedStream, OutputBatch
from coordinator.engine.output_stream import OutputStream

GATEWAY_BUGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {}


def _bug(plant: Callable[[], Iterator[None]]) -> None:
    GATEWAY_BUGS[plant.__name__] = contextmanager(plant)


@_bug
def credit_is_off_by_one() -> Iterator[None]:
    collect = NumberedStream.collect

    def too_much(self: NumberedStream, message: BatchMessage) -> bool:
        self.credit += 1
        has_ended = collect(self, message)
        self.credit -= 1
        return has_ended

    with patch.object(NumberedStream, "collect", too_much):
        yield


@_bug
def an_attach_repeats_a_token() -> Iterator[None]:
    begin = NumberedStream.__init__

    def early(self: NumberedStream, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        self._cursors = [max(0, cursor - 1) for cursor in self._cursors]

    with patch.object(NumberedStream, "__init__", early):
        yield


@_bug
def a_detached_request_keeps_its_reader() -> Iterator[None]:
    detach = Engine.detach

    def leak(self: Engine, stream: OutputStream) -> None:
        request = stream.request
        detach(self, stream)
        if request.stream is None and request.is_kept:
            request.stream = stream

    with patch.object(Engine, "detach", leak):
        yield


@_bug
def a_stream_waits_for_its_slowest_reader() -> Iterator[None]:
    add = OutputBatch.add

    def wait(self: OutputBatch, stream: OutputStream) -> None:
        if all(other.credit > 0 or other is stream for other in self._streams.values()):
            add(self, stream)

    with patch.object(OutputBatch, "add", wait):
        yield
