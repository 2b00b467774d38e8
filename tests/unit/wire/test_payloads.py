"""Payloads beside the stream: greetings, headers, and their way into frames."""

import asyncio
from dataclasses import replace

import pytest

from wire import payloads
from wire.errors import StepFault, StepFaultKind
from wire.payloads import (
    GREETING_BYTES,
    HEADER_BYTES,
    PROOF_BYTES,
    ArrivedPayload,
    PayloadInbox,
    PayloadKey,
    PayloadNotice,
    decode_header,
    encode_header,
    new_ticket,
    ticket_of,
)

KEY = PayloadKey(7, b"s" * 32, b"t" * 16)
LIMIT = 1000


def notice(number: int, **changes: int) -> PayloadNotice:
    return replace(PayloadNotice(number, 3, 0xABC), **changes)


def arrived(number: int) -> ArrivedPayload:
    return ArrivedPayload(notice(number), b"abc", 0.0)


async def fault_of(inbox: PayloadInbox, wanted: PayloadNotice) -> StepFault:
    with pytest.raises(StepFault) as raised:
        await inbox.take(wanted)
    return raised.value


def test_a_greeting_names_its_ticket_and_proves_the_secret() -> None:
    greeting = KEY.greeting()
    assert len(greeting) == GREETING_BYTES and len(KEY.answer()) == PROOF_BYTES
    assert ticket_of(greeting) == KEY.ticket
    assert KEY.is_greeting(greeting) and KEY.is_answer(KEY.answer())
    assert KEY.secret not in greeting + KEY.answer()
    assert new_ticket() != new_ticket()


@pytest.mark.parametrize(
    "other",
    [replace(KEY, epoch=8), replace(KEY, secret=b"x" * 32), replace(KEY, ticket=b"x" * 16)],
    ids=["epoch", "secret", "ticket"],
)
def test_a_greeting_of_another_epoch_secret_or_ticket_proves_nothing(other: PayloadKey) -> None:
    assert not KEY.is_greeting(other.greeting())
    assert not KEY.is_answer(other.answer())


def test_the_greeting_does_not_serve_as_answer() -> None:
    assert not KEY.is_answer(KEY.greeting()[-PROOF_BYTES:])


def test_a_header_has_number_and_size() -> None:
    header = encode_header(3, LIMIT)
    assert len(header) == HEADER_BYTES
    assert decode_header(header, number=3, max_bytes=LIMIT) == LIMIT


@pytest.mark.parametrize(
    ("number", "size_bytes", "kind", "message"),
    [
        (4, 3, StepFaultKind.UNDECODABLE, "payload 4 on the connection, expected 3"),
        (2, 3, StepFaultKind.UNDECODABLE, "payload 2 on the connection, expected 3"),
        (3, LIMIT + 1, StepFaultKind.SHAPE, "payload 3 has 1001 bytes, the limit is 1000"),
        (3, 2**64 - 1, StepFaultKind.SHAPE, f"payload 3 has {2**64 - 1} bytes, the limit is 1000"),
        (3, 0, StepFaultKind.SHAPE, "payload 3 has 0 bytes, the limit is 1000"),
    ],
)
def test_a_header_of_another_payload_or_size_is_a_fault(
    number: int, size_bytes: int, kind: StepFaultKind, message: str
) -> None:
    with pytest.raises(StepFault) as raised:
        decode_header(encode_header(number, size_bytes), number=3, max_bytes=LIMIT)
    assert (raised.value.kind, raised.value.message) == (kind, message)


async def test_payloads_are_taken_in_order_before_or_after_they_arrive() -> None:
    taken: list[None] = []
    inbox = PayloadInbox(on_taken=lambda: taken.append(None))
    inbox.arrived(arrived(1))
    assert (await inbox.take(notice(1))).data == b"abc"
    waiting = asyncio.create_task(inbox.take(notice(2)))
    await asyncio.sleep(0)
    assert not waiting.done() and len(taken) == 1
    inbox.arrived(arrived(2))
    assert (await waiting).notice == notice(2)
    assert len(taken) == 2


@pytest.mark.parametrize(
    ("wanted", "kind", "message"),
    [
        (notice(2), StepFaultKind.UNDECODABLE, "the frame names payload 2, the next is 1"),
        (notice(1, size_bytes=4), StepFaultKind.SHAPE, "payload 1 has 3 bytes, the frame says 4"),
        (
            notice(1, checksum=0xDEF),
            StepFaultKind.CHECKSUM,
            "checksum of payload 1: expected 0000000000000def, got 0000000000000abc",
        ),
    ],
    ids=["number", "size", "checksum"],
)
async def test_a_payload_that_differs_from_its_frame_is_a_fault(
    wanted: PayloadNotice, kind: StepFaultKind, message: str
) -> None:
    inbox = PayloadInbox()
    inbox.arrived(arrived(1))
    fault = await fault_of(inbox, wanted)
    assert (fault.kind, fault.message) == (kind, message)


async def test_an_end_counts_when_a_frame_needs_a_payload_and_not_before() -> None:
    inbox = PayloadInbox()
    inbox.arrived(arrived(1))
    inbox.end("the sender closed the payload connection")
    assert (await inbox.take(notice(1))).data == b"abc"
    assert not inbox.damaged.done()
    fault = await fault_of(inbox, notice(2))
    assert fault.kind is StepFaultKind.NEIGHBOUR
    assert fault.message == ("payload 2 of 3 bytes did not arrive: the sender closed the payload connection")


async def test_an_end_wakes_the_frame_that_waits() -> None:
    inbox = PayloadInbox()
    waiting = asyncio.create_task(fault_of(inbox, notice(1)))
    await asyncio.sleep(0)
    inbox.end("reset")
    assert (await waiting).message == "payload 1 of 3 bytes did not arrive: reset"


async def test_damage_is_told_at_once() -> None:
    inbox = PayloadInbox()
    fault = StepFault(StepFaultKind.UNDECODABLE, "payload 9 on the connection, expected 1")
    inbox.fail(fault)
    assert inbox.damaged.result() is fault
    assert await fault_of(inbox, notice(1)) is fault


async def test_a_payload_without_progress_is_a_fault_and_a_slow_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payloads, "PAYLOAD_TIMEOUT_S", 0.01)
    received = iter((0, 100, 100, 200, 200, 200))
    inbox = PayloadInbox(progress=lambda: next(received))
    fault = await fault_of(inbox, notice(1))
    assert fault.kind is StepFaultKind.NEIGHBOUR
    assert fault.message == "payload 1 of 3 bytes did not arrive: no byte for 0.01 s"
    assert next(received, None) is None
