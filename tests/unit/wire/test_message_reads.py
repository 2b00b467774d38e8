"""Calls whose message takes long, in a process whose size the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from wire.errors import Overloaded
from wire.message_reads import CALL_BYTES, MessageReads

HOST, OTHER, THIRD = "10.0.0.1", "10.0.0.2", "10.0.0.3"
LONG_S = 3600.0
DEADLINE_S = 60.0
LIMIT = 2**20


class Server:
    """Reads of one server; those without a grace are long at once."""

    def __init__(self, **limits: Any) -> None:
        self.resident = 5000
        self.is_readable = True
        fixed = {"max_growth_bytes": LIMIT, "max_reads_growth_bytes": 3 * LIMIT}
        times = {"grace_s": 0.0, "timeout_s": LONG_S}
        self.reads = MessageReads(**{**fixed, **times, **limits}, resident=self._resident)

    def _resident(self) -> int:
        if not self.is_readable:
            raise OSError(24, "Too many open files")
        return self.resident

    async def open(self, *hosts: str) -> list[Message]:
        messages = [Message(self.reads, host) for host in hosts]
        await asyncio.sleep(0.01)
        return messages


class Message:
    """Arrives when the test says so."""

    def __init__(self, reads: MessageReads, host: str) -> None:
        self._arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.is_abandoned = False
        self.call: asyncio.Task[Any] = asyncio.create_task(reads.read(host, self._receive))

    async def _receive(self) -> bytes:
        try:
            return await self._arrived
        except asyncio.CancelledError:
            self.is_abandoned = True
            raise

    async def arrive(self, message: bytes = b"x") -> bytes:
        self._arrived.set_result(message)
        return bytes(await asyncio.wait_for(self.call, DEADLINE_S))

    async def refusal(self) -> str:
        with pytest.raises(Overloaded) as refused:
            await asyncio.wait_for(self.call, DEADLINE_S)
        assert refused.value.retry_after_s
        return str(refused.value)


async def all_arrive(messages: list[Message]) -> bool:
    return [await message.arrive() for message in messages] == [b"x"] * len(messages)


async def test_a_message_is_returned_as_soon_as_it_is_complete() -> None:
    (long,) = await Server().open(HOST)
    (short,) = await Server(grace_s=LONG_S).open(HOST)
    assert await long.arrive(b"all of it") == await short.arrive(b"all of it") == b"all of it"


async def test_any_number_of_messages_is_read_while_the_process_does_not_grow() -> None:
    server = Server(max_per_host=2)
    messages = await server.open(*[HOST] * 50)
    server.resident += LIMIT
    await asyncio.sleep(0.2)
    assert await all_arrive(messages)


async def test_the_oldest_reads_of_a_host_beyond_its_limit_end_when_the_process_grows() -> None:
    server = Server(max_per_host=2)
    *old, newer, newest = await server.open(*[HOST] * 5)
    (other,) = await server.open(OTHER)
    server.resident += LIMIT + 1
    problem = "the server's memory grew by 1 MiB since, and host 10.0.0.1 has 5 such messages, the limit is 2"
    assert {(await message.refusal()).partition(" s: ")[2] for message in old} == {problem}
    assert not any(message.is_abandoned for message in old)
    assert await all_arrive([newer, newest, other])


async def test_the_oldest_reads_beyond_the_limit_of_all_end_when_the_process_grows() -> None:
    server = Server(max_reads=2)
    first, second, third = await server.open(HOST, OTHER, THIRD)
    server.resident += LIMIT + 1
    assert "and the server has 3 such messages, the limit is 2" in await first.refusal()
    assert await all_arrive([second, third])


async def test_many_reads_of_a_host_do_not_end_the_only_one_of_another() -> None:
    for limits in ({"max_per_host": 8, "max_reads": 16}, {"max_per_host": 20, "max_reads": 8}):
        server = Server(**limits)
        (victim,) = await server.open(OTHER)
        messages = await server.open(*[HOST] * 20)
        server.resident += LIMIT + 1
        for message in messages[: 20 - 8]:
            await message.refusal()
        assert not victim.call.done()
        assert await victim.arrive() == b"x"
        for message in messages:
            message.call.cancel()
        await asyncio.gather(*(message.call for message in messages), return_exceptions=True)


async def test_all_reads_end_when_few_of_them_fill_the_memory() -> None:
    server = Server()
    messages = await server.open(HOST, OTHER)
    server.resident += 3 * LIMIT
    await asyncio.sleep(0.2)
    assert not any(message.call.done() for message in messages)
    server.resident += 1
    problem = "the server's memory grew by 3 MiB since, the limit of all such messages is 3 MiB"
    assert {(await message.refusal()).partition(" s: ")[2] for message in messages} == {problem}
    (later,) = await server.open(HOST)
    await asyncio.sleep(0.2)
    assert await later.arrive() == b"x"


async def test_what_the_process_grew_by_before_the_oldest_read_does_not_count() -> None:
    server = Server(max_per_host=2)
    for _ in range(2):
        server.resident += 10 * LIMIT
        messages = await server.open(*[HOST] * 4)
        server.resident += LIMIT
        await asyncio.sleep(0.2)
        assert await all_arrive(messages)


async def test_what_open_calls_cost_does_not_count() -> None:
    server = Server(max_per_host=1)
    messages = await server.open(HOST, HOST)
    for _ in range(100):
        server.reads.begin_call()
    server.resident += LIMIT + 100 * CALL_BYTES
    await asyncio.sleep(0.2)
    assert not any(message.call.done() for message in messages)
    server.reads.end_call()
    await messages[0].refusal()
    assert await messages[1].arrive() == b"x"


async def test_a_process_that_cannot_be_measured_has_its_former_size() -> None:
    server = Server(max_per_host=1)
    server.is_readable = False
    messages = await server.open(HOST, HOST)
    server.resident += LIMIT + 1
    await asyncio.sleep(0.2)
    assert not any(message.call.done() for message in messages)
    server.is_readable = True
    await messages[0].refusal()
    assert await messages[1].arrive() == b"x"


async def test_reads_within_their_grace_do_not_end() -> None:
    server = Server(grace_s=LONG_S, max_per_host=1)
    messages = await server.open(*[HOST] * 10)
    server.resident += LIMIT + 1
    await asyncio.sleep(0.2)
    assert await all_arrive(messages)


async def test_a_long_read_has_a_deadline() -> None:
    server = Server(timeout_s=0.05)
    (message,) = await server.open(HOST)
    text = await message.refusal()
    assert text.startswith("the call's message is incomplete, after 0.0")
    assert text.endswith(" s")


async def test_a_cancelled_call_does_not_count_and_lets_grpc_finish() -> None:
    server = Server(max_per_host=1)
    for _ in range(3):
        (message,) = await server.open(HOST)
        message.call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await message.call
        assert not message.is_abandoned
    (last,) = await server.open(HOST)
    server.resident += LIMIT + 1
    await asyncio.sleep(0.2)
    assert await all_arrive([last])


async def test_an_error_of_reading_is_the_calls() -> None:
    async def fail() -> bytes:
        raise ValueError("not a message")

    with pytest.raises(ValueError, match="not a message"):
        await Server().reads.read(HOST, fail)
