"""Clients of gateways: what they ask for, what they do meanwhile, and what they must get."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random

import grpc

from gateway.upstream.contract import ChoiceEnd, PromptLogprobs, Tokens, UpstreamFailure
from gateway.upstream.numbered_request import RequestStream
from stageline_rpc.v1 import inference_pb2
from tests.simulation.cluster import POLICY, Cluster, Shape
from tests.simulation.customers import new_request_id
from tests.simulation.gateways import Gateway, Gateways
from tests.simulation.stage_compute import VOCAB_SIZE, right_tokens

Code = grpc.StatusCode
POLL_S = 0.05
_STOP = inference_pb2.FINISH_REASON_STOP


class Habit(Enum):
    """What a client does beside reading."""

    READS = auto()
    IS_SLOW = auto()
    """Takes nothing before all others have ended."""
    CANCELS = auto()
    STOPS = auto()
    DETACHES = auto()
    HAS_A_DEADLINE = auto()


@dataclass(slots=True, kw_only=True)
class GatewayCustomer:
    """One request. After `act_tokens` tokens of choice 0, its client does what it is wont to."""

    name: str
    request_id: str
    habit: Habit
    arrives_s: float
    act_tokens: int
    prompt: tuple[int, ...]
    max_tokens: int
    num_choices: int
    expected: list[int] = field(default_factory=list)
    got: list[list[int]] = field(default_factory=list)
    end: str = ""


def draw_gateway_customers(random: Random, shape: Shape, count: int) -> list[GatewayCustomer]:
    shared = tuple(random.randrange(VOCAB_SIZE) for _ in range(16))
    return [_draw(random, shape, number, shared) for number in range(count)]


def _draw(random: Random, shape: Shape, number: int, shared: tuple[int, ...]) -> GatewayCustomer:
    max_tokens = random.randint(2, 16)
    length = min(random.randint(1, 20), shape.num_blocks * shape.block_size - max_tokens)
    own = tuple(random.randrange(VOCAB_SIZE) for _ in range(length))
    return GatewayCustomer(
        name=f"client {number}",
        request_id=new_request_id(random),
        habit=random.choices(list(Habit), weights=(6, 3, 2, 3, 4, 1))[0],
        arrives_s=random.uniform(0, 2.5),
        act_tokens=random.randint(1, max_tokens),
        prompt=(shared[: random.choice((0, 0, 8, 13))] + own)[:length],
        max_tokens=max_tokens,
        num_choices=random.choice((1, 1, 1, 2)),
    )


class GatewayVisit:
    """A customer at one gateway after another."""

    def __init__(
        self, customer: GatewayCustomer, cluster: Cluster, gateways: Gateways, quiet: asyncio.Event
    ) -> None:
        """`quiet` is set when all customers that are not slow have ended."""
        self._customer, self._cluster, self._gateways = customer, cluster, gateways
        self._quiet = quiet
        self._random = Random(customer.request_id)
        self._secret = ""
        self._was_submitted = self._has_acted = False
        self._streams: list[RequestStream] = []  # one that is dropped cancels its request
        customer.got = [[] for _ in range(customer.num_choices)]
        customer.expected = right_tokens(
            customer.prompt, customer.max_tokens, block_size=cluster.shape.block_size
        )

    async def run(self) -> None:
        """From arriving to leaving."""
        await asyncio.sleep(self._customer.arrives_s)
        last: Gateway | None = None
        while not self._customer.end:
            gateway = self._gateways.some(self._random, other_than=last)
            if gateway is None or gateway.process is None:
                await asyncio.sleep(POLL_S)
                continue
            last = gateway
            reading = gateway.process.spawn(self._read_at(gateway))
            await asyncio.wait([reading])
            if reading.cancelled():
                continue  # the gateway died
            if (error := reading.exception()) is not None:
                self._note(f"failed: {error!r}")
                self._customer.end = "failed"

    async def _read_at(self, gateway: Gateway) -> None:
        customer = self._customer
        try:
            if (stream := await self._open(gateway)) is None:
                customer.end = "never accepted"
                return
            self._secret = stream.secret
            self._streams.append(stream)
            if customer.habit is Habit.IS_SLOW:
                await self._quiet.wait()
            if not await self._act(stream):
                await self._read(stream)
        except UpstreamFailure as failure:
            self._fail(failure)

    async def _open(self, gateway: Gateway) -> RequestStream | None:
        """None if a gateway died that had not told its client of the request."""
        customer, link = self._customer, gateway.link
        assert link is not None
        if self._secret:
            return await link.attach(customer.request_id, self._secret, list(map(len, customer.got)))
        if self._was_submitted:
            return None
        self._was_submitted = True
        request = inference_pb2.GenerateRequest(
            request_id=customer.request_id,
            token_ids=inference_pb2.TokenIds(ids=customer.prompt),
            max_tokens=customer.max_tokens,
            output=inference_pb2.OUTPUT_TOKENS_ONLY,
        )
        if customer.num_choices > 1:
            request.sampling.n = customer.num_choices
            request.sampling.temperature = 1.0
        has_deadline = customer.habit is Habit.HAS_A_DEADLINE
        return await link.submit(request, deadline_s=0.1 * customer.act_tokens if has_deadline else None)

    async def _read(self, stream: RequestStream) -> None:
        customer = self._customer
        async for item in stream:
            match item:
                case Tokens():
                    self._take(item)
                    if await self._act(stream):
                        return
                case ChoiceEnd():
                    self._take_end(item)
                case PromptLogprobs():
                    self._note("prompt log-probabilities that nobody asked for")
        customer.end = "complete"
        for choice, tokens in enumerate(customer.got):
            if tokens != customer.expected[: self._limit(choice)]:
                self._note(f"complete with {tokens}, expected {customer.expected[: self._limit(choice)]}")

    async def _act(self, stream: RequestStream) -> bool:
        """Returns whether the stream is left. A stop is asked for again at another gateway."""
        customer = self._customer
        if len(customer.got[0]) < customer.act_tokens:
            return False
        match customer.habit:
            case Habit.CANCELS:
                await stream.cancel()
                customer.end = "cancelled"
                return True
            case Habit.STOPS:
                stream.stop(0, customer.act_tokens)
            case Habit.DETACHES if not self._has_acted:
                self._has_acted = True
                stream.detach()
                return True
        return False

    def _limit(self, choice: int) -> int:
        is_stopped = self._customer.habit is Habit.STOPS and choice == 0
        return self._customer.act_tokens if is_stopped else self._customer.max_tokens

    def _take(self, item: Tokens) -> None:
        customer, new, start = self._customer, list(item.token_ids), item.first_token_index
        tokens = customer.got[item.choice]
        if start != len(tokens):
            self._note(f"token {start} of choice {item.choice} follows {len(tokens)} tokens")
        if new != customer.expected[start : start + len(new)]:
            self._note(f"tokens {new} from {start} on, expected {customer.expected}")
        tokens.extend(new)
        limit = self._limit(item.choice)
        del tokens[limit:]  # as a gateway does behind a stop string

    def _take_end(self, end: ChoiceEnd) -> None:
        limit = self._limit(end.choice)
        if end.usage.completion_tokens != limit:
            self._note(f"choice {end.choice} has {end.usage.completion_tokens} tokens, expected {limit}")
        if limit < self._customer.max_tokens and end.finish_reason != _STOP:
            self._note(f"choice {end.choice} was stopped and ends with {end.finish_reason}")

    def _fail(self, failure: UpstreamFailure) -> None:
        customer = self._customer
        customer.end = f"{failure.status.name}: {failure.message}"
        was_unserved = self._cluster.oracle.unserved_s >= POLICY.recovery_timeout_s - 0.1
        is_late = failure.status is Code.DEADLINE_EXCEEDED
        if is_late and customer.habit is Habit.HAS_A_DEADLINE:
            return
        if failure.status is Code.UNAVAILABLE and was_unserved:
            return
        self._note(f"ended with {customer.end} ({failure.reason})")

    def _note(self, problem: str) -> None:
        customer = self._customer
        self._cluster.oracle.note(f"{customer.name} ({customer.habit.name}): {problem}")
