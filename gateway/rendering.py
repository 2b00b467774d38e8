"""What a writer makes of a generation's output: everything that arrived together is one portion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from gateway.output import Delta
from gateway.spans import OutputTimes
from gateway.text_thread import TenantText
from gateway.upstream.contract import Item, UpstreamFailure

if TYPE_CHECKING:
    from gateway.generation import Generation, PromptState

_Rendered = TypeVar("_Rendered")
Taken: TypeAlias = "tuple[PromptState, Sequence[Item]]"


class Rendering(Generic[_Rendered]):
    """A job of the text thread: takes what arrived, renders it, and hands it to a reader.

    While the reader is congested, what arrives stays in the streams, which costs the coordinator credit.
    """

    def __init__(
        self,
        generation: Generation,
        text: TenantText,
        render: Callable[[Delta], _Rendered | None],
        times: OutputTimes | None = None,
    ) -> None:
        """`render` is called on the text thread. `times` takes the times of the output."""
        self._generation, self._text, self._render, self._times = generation, text, render, times
        self._put: Callable[[list[_Rendered]], bool | None]
        self._ready: dict[int, None] = {}
        self._num_open = len(generation.prompts)
        self._failure: Exception | None = None
        self._is_busy = self._is_congested = False
        self._woken = asyncio.Event()

    async def portions(self) -> AsyncGenerator[list[_Rendered], None]:
        """Yield what is rendered, until every stream has ended. Raises UpstreamFailure."""
        waiting: list[list[_Rendered]] = []
        async with aclosing(self._congestions(waiting.append)) as congestions:
            async for _ in congestions:
                yield waiting.pop()

    async def deliver(
        self, put: Callable[[list[_Rendered]], bool], drain: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Call `put` with what is rendered, until every stream has ended. Raises UpstreamFailure.

        When `put` returns False, the next call follows `drain`.
        """
        async with aclosing(self._congestions(put)) as congestions:
            async for _ in congestions:
                await drain()

    def begin(self) -> Callable[[], list[_Rendered]] | None:
        """Take what has arrived."""
        ready, self._ready = self._ready, {}
        taken: list[Taken] = []
        prompts = self._generation.prompts
        for index in ready:
            prompt = prompts[index]
            try:
                while items := prompt.stream.take():
                    taken.append((prompt, items))
            except UpstreamFailure as failure:
                self._failure = failure
                break
            if items is None:
                self._num_open -= 1
        if taken:
            self._is_busy = True
            work = partial(self._run, taken)
            return work if self._times is None else self._times.timed(work)
        self._woken.set()
        return None

    def end(self, result: list[_Rendered] | None, error: Exception | None) -> None:
        """Hand a portion to the reader."""
        self._is_busy = False
        self._failure = error or self._failure
        self._generation.stop_choices()
        if result and self._times is not None:
            self._times.output()
        self._is_congested = bool(result and not self._put(result))
        if self._is_congested or self._failure is not None or not self._num_open:
            self._woken.set()
        self._continue()

    async def _congestions(self, put: Callable[[list[_Rendered]], bool | None]) -> AsyncGenerator[None, None]:
        """Run until every stream has ended; yield whenever `put` did not return True."""
        self._put = put
        streams = [prompt.stream for prompt in self._generation.prompts]
        for index, stream in enumerate(streams):
            stream.notify(partial(self._changed, index))
        try:
            while True:
                if self._is_congested:
                    yield
                    self._is_congested = False
                    self._continue()
                elif self._is_busy or (self._num_open and self._failure is None):
                    self._woken.clear()
                    await self._woken.wait()  # no timeout: streams end
                elif self._failure is not None:
                    raise self._failure
                else:
                    return
        finally:
            self._put, self._failure = _drop, None  # the frames of a failure hold this rendering
            for stream in streams:
                stream.notify(None)

    def _changed(self, index: int) -> None:
        self._ready[index] = None
        self._continue()

    def _continue(self) -> None:
        if self._ready and not (self._is_busy or self._is_congested or self._failure is not None):
            if self._times is not None:
                self._times.wait()
            self._text.add(self)

    def _run(self, taken: list[Taken]) -> list[_Rendered]:
        """Render, on the text thread."""
        generation, rendered = self._generation, []
        for prompt, items in taken:
            for item in items:
                for delta in generation.deltas(prompt, item):
                    result = self._render(delta)
                    if result is not None:
                        rendered.append(result)
        return rendered


def _drop(portion: list[Any]) -> bool:
    """Discard the rest: the reader is gone."""
    return True
