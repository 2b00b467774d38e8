"""A gRPC proxy between workers and coordinator that drops, repeats and alters step results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from stageline_rpc.internal.v1 import deliver_pb2, step_pb2
from tests.integration.stream_proxy import DELIVER, StreamProxy

Results = Iterable[deliver_pb2.DeliverRequest]


@dataclass(eq=False)
class ResultStream:
    """One stream of results: `held` ones are sent after the next one."""

    held: list[deliver_pb2.DeliverRequest] = field(default_factory=list)


ResultFault = Callable[[deliver_pb2.DeliverRequest, ResultStream], Awaitable[Results]]


@dataclass(eq=False)
class ResultInjection:
    """Applies `fault` to results that match `when`, at most `times`; counts them in `num_done`."""

    fault: ResultFault
    when: Callable[[step_pb2.StepResult], bool]
    times: int
    num_done: int = 0
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def matches(self, result: step_pb2.StepResult) -> bool:
        return self.num_done < self.times and self.when(result)


def has_tokens(result: step_pb2.StepResult) -> bool:
    """Whether it answers."""
    return bool(result.tokens)


class ResultProxy(StreamProxy):
    """In front of the coordinator for one worker: forwards Join, alters results per `injection`."""

    def __init__(self) -> None:
        super().__init__()
        self.injection: ResultInjection | None = None

    def inject(
        self,
        fault: ResultFault,
        *,
        when: Callable[[step_pb2.StepResult], bool] = has_tokens,
        times: int = 1,
    ) -> ResultInjection:
        """Replaces the current injection."""
        self.injection = ResultInjection(fault, when, times)
        return self.injection

    def relay_for(self, method: str) -> Callable[[bytes], Awaitable[Iterable[bytes]]]:
        if method != DELIVER:
            return super().relay_for(method)
        stream = ResultStream()

        async def relay(data: bytes) -> Iterable[bytes]:
            message = deliver_pb2.DeliverRequest.FromString(data)
            if message.WhichOneof("message") != "frame":
                return (data,)
            altered = await self._altered(message, stream)
            return [message.SerializeToString() for message in altered]

        return relay

    async def _altered(self, message: deliver_pb2.DeliverRequest, stream: ResultStream) -> Results:
        held, stream.held = stream.held, []
        altered: Results = (message,)
        if (injection := self.injection) is not None and injection.matches(_result_of(message)):
            injection.num_done += 1
            injection.happened.set()
            altered = await injection.fault(message, stream)
        return [*altered, *held]


def _result_of(message: deliver_pb2.DeliverRequest) -> step_pb2.StepResult:
    return step_pb2.StepResult.FromString(message.frame.result)


async def drop(message: deliver_pb2.DeliverRequest, stream: ResultStream) -> Results:
    return ()


async def repeat(message: deliver_pb2.DeliverRequest, stream: ResultStream) -> Results:
    return (message, message)


async def hold_until_next(message: deliver_pb2.DeliverRequest, stream: ResultStream) -> Results:
    stream.held = [message]
    return ()


async def truncate(message: deliver_pb2.DeliverRequest, stream: ResultStream) -> Results:
    """Removes the last token."""
    result = _result_of(message)
    result.tokens = result.tokens[:-4]
    message.frame.result = result.SerializeToString()
    return (message,)


async def alter_token(message: deliver_pb2.DeliverRequest, stream: ResultStream) -> Results:
    """Replaces a sampled token by another one of any vocabulary."""
    result = _result_of(message)
    result.tokens = bytes((result.tokens[0] ^ 1,)) + result.tokens[1:]
    message.frame.result = result.SerializeToString()
    return (message,)


def delay(seconds: float) -> ResultFault:
    async def delayed(message: deliver_pb2.DeliverRequest, stream: ResultStream) -> Results:
        await asyncio.sleep(seconds)
        return (message,)

    return delayed


RESULT_FAULTS: dict[str, ResultFault] = {
    "dropped": drop,
    "repeated": repeat,
    "reordered": hold_until_next,
    "truncated": truncate,
    "altered": alter_token,
    "delayed": delay(0.3),
}
