"""Clients: what they ask for, what they do meanwhile, and what they must get."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from random import Random
from typing import Any
from uuid import UUID

import grpc

from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.simulation.cluster import POLICY, Cluster, Shape
from tests.simulation.stage_compute import VOCAB_SIZE, right_tokens

Code = grpc.StatusCode
KEEP_S = 3600.0
LEAST_TOKENS = 28
"""That the requests of a schedule ask for."""


class Habit(Enum):
    """What a client does beside reading."""

    READS = auto()
    CANCELS = auto()
    HANGS_UP = auto()
    REATTACHES = auto()
    MOVES = auto()
    HAS_A_DEADLINE = auto()


_ENDS: dict[Habit, frozenset[Code]] = {
    Habit.CANCELS: frozenset({Code.CANCELLED}),
    Habit.HANGS_UP: frozenset({Code.CANCELLED}),
    Habit.HAS_A_DEADLINE: frozenset({Code.DEADLINE_EXCEEDED, Code.CANCELLED}),
}


_LEAST_DEATHS = POLICY.max_deaths_alone
_MOST_DEATHS = _LEAST_DEATHS + POLICY.max_unrelated_deaths
_POISONED = re.compile(f"[{_LEAST_DEATHS}-{_MOST_DEATHS}] workers were lost while this request alone ran")


@dataclass(slots=True, kw_only=True)
class Customer:
    """One request. `act_s` after it was sent, its client does what it is wont to."""

    name: str
    request_id: str
    habit: Habit
    arrives_s: float
    act_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    num_choices: int
    is_poison: bool = False
    expected: list[int] = field(default_factory=list)
    got: list[list[int]] = field(default_factory=list)
    end: str = ""

    @property
    def is_done(self) -> bool:
        return bool(self.end)


def draw_customers(random: Random, shape: Shape, count: int) -> list[Customer]:
    """Draw at least `count` customers with at least LEAST_TOKENS in total; some share a prompt prefix."""
    shared = tuple(random.randrange(VOCAB_SIZE) for _ in range(16))
    customers: list[Customer] = []
    while len(customers) < count or sum(customer.max_tokens for customer in customers) < LEAST_TOKENS:
        customers.append(_draw(random, shape, len(customers), shared))
    return customers


def late_guest(random: Random, shape: Shape, number: int) -> Customer:
    """Comes at once, and only reads."""
    return replace(_draw(random, shape, number, ()), habit=Habit.READS, arrives_s=0.0)


def _draw(random: Random, shape: Shape, number: int, shared: tuple[int, ...]) -> Customer:
    max_tokens = random.randint(1, 12)
    length = min(random.randint(1, 24), shape.num_blocks * shape.block_size - max_tokens)
    own = tuple(random.randrange(VOCAB_SIZE) for _ in range(length))
    num_shared = random.choice((0, 0, 8, 13))
    return Customer(
        name=f"client {number}",
        request_id=new_request_id(random),
        habit=random.choices(list(Habit), weights=(8, 2, 2, 2, 1, 1))[0],
        arrives_s=random.uniform(0, 2.5),
        act_s=random.uniform(0, 0.6),
        prompt=(shared[:num_shared] + own)[:length],
        max_tokens=max_tokens,
        num_choices=random.choice((1, 1, 1, 2)),
    )


def new_request_id(random: Random) -> str:
    number = random.getrandbits(128) & ~(0xF << 76) & ~(0x3 << 62) | (7 << 76) | (2 << 62)
    return str(UUID(int=number))


class Visit:
    """A customer and the cluster: sends, reads, compares."""

    def __init__(self, customer: Customer, cluster: Cluster) -> None:
        shape = cluster.shape
        self._customer = customer
        self._cluster = cluster
        self._stub: Any = inference_pb2_grpc.InferenceStub(cluster.client_channel())
        customer.expected = right_tokens(
            customer.prompt,
            customer.max_tokens,
            block_size=shape.block_size,
            has_states=shape.num_states > 0,
        )
        customer.got = [[] for _ in range(customer.num_choices)]

    async def run(self) -> None:
        """From arriving to leaving."""
        customer = self._customer
        await asyncio.sleep(customer.arrives_s)
        deadline_s = customer.act_s + 0.1 if customer.habit is Habit.HAS_A_DEADLINE else None
        call = self._stub.Generate(self._request(), timeout=deadline_s)
        acting = asyncio.create_task(self._act(call))
        try:
            await self._read(call, customer.got)
        except grpc.aio.AioRpcError as error:
            await self._came_to(error)
        finally:
            acting.cancel()

    def _request(self) -> inference_pb2.GenerateRequest:
        customer = self._customer
        request = inference_pb2.GenerateRequest(
            request_id=customer.request_id,
            token_ids=inference_pb2.TokenIds(ids=customer.prompt),
            max_tokens=customer.max_tokens,
        )
        if customer.num_choices > 1:
            request.sampling.n = customer.num_choices
            request.sampling.temperature = 1.0
        if customer.habit in (Habit.REATTACHES, Habit.MOVES):
            request.on_disconnect.action = inference_pb2.OnDisconnect.ACTION_DETACH
            request.on_disconnect.keep_for.FromMicroseconds(round(KEEP_S * 1e6))
        return request

    async def _act(self, call: Any) -> None:
        customer = self._customer
        await asyncio.sleep(customer.act_s)
        match customer.habit:
            case Habit.CANCELS:
                answer = self._stub.Cancel(inference_pb2.CancelRequest(request_id=customer.request_id))
                await answer.code()
            case Habit.HANGS_UP | Habit.REATTACHES:
                call.cancel()
            case Habit.MOVES:
                self._cluster.clients.spawn(self._attach())

    async def _came_to(self, error: grpc.aio.AioRpcError) -> None:
        code, text = error.code(), error.details() or ""
        customer = self._customer
        if customer.habit is Habit.REATTACHES and code is Code.CANCELLED:
            await asyncio.sleep(customer.act_s)
            await self._attach()
        elif not (customer.habit is Habit.MOVES and "another call attached" in text):
            self._end(code, text)

    async def _attach(self) -> None:
        """Reads on from what it has; where the request never came that far, nothing is left to read."""
        customer = self._customer
        request = inference_pb2.AttachRequest(request_id=customer.request_id)
        got = customer.got if customer.habit is Habit.REATTACHES else [[] for _ in customer.got]
        for choice, tokens in enumerate(got):
            request.positions.add(choice=choice, from_token=len(tokens))
        call = self._stub.Attach(request)
        try:
            await self._read(call, got)
        except grpc.aio.AioRpcError as error:
            if error.code() is Code.NOT_FOUND:
                customer.end = customer.end or "never accepted"
            else:
                self._end(error.code(), error.details() or "")

    async def _read(self, call: Any, got: list[list[int]]) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            self._take(message, got[message.choice])
        if self._customer.is_poison:
            self._note("complete, although it crashes its workers")
        if any(tokens != self._customer.expected for tokens in got):
            self._note(f"complete with {got}, expected {self._customer.expected}")
        self._customer.end = "complete"

    def _take(self, message: inference_pb2.GenerateResponse, tokens: list[int]) -> None:
        start = message.first_token_index
        new = list(message.token_ids)
        if start != len(tokens):
            self._note(f"token {start} follows {len(tokens)} tokens")
        if new != self._customer.expected[start : start + len(new)]:
            self._note(f"tokens {new} from {start} on, expected {self._customer.expected}")
        tokens.extend(new)

    def _end(self, code: Code, text: str) -> None:
        customer = self._customer
        customer.end = f"{code.name}: {text}"
        if code in _ENDS.get(customer.habit, ()):
            return
        was_unserved = self._cluster.oracle.unserved_s >= POLICY.recovery_timeout_s - 0.1
        if code is Code.UNAVAILABLE and was_unserved:
            return
        if code is Code.ABORTED and "all 3 steps with this request were rejected" in text:
            return  # the oracle decides whether a fault had a cause
        if code is Code.INTERNAL and _POISONED.match(text):
            return  # deaths in a row, by chance
        self._note(f"ended with {customer.end}")

    def _note(self, problem: str) -> None:
        self._cluster.oracle.note(f"{self._customer.name}: {problem}")
