"""A client with broken connections against real grpc.aio servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

import grpc.aio
import pytest
from google.rpc import error_details_pb2

import stageline
from stageline import Client, Detach, GenerateOutput
from stageline.client.connection import is_connection_loss
from tests.fake_inference import FakeInference, Fault
from tests.fake_stageline import serve
from tests.unit.stageline.cutting_proxy import CuttingProxy
from wire.ids import id_text, new_request_id

NUM_TOKENS = 6
DEADLINE_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    client: Client
    inference: FakeInference
    proxy: CuttingProxy


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server, address, inference = await serve("127.0.0.1:0", num_stages=1)
    async with CuttingProxy(address) as proxy, Client(proxy.address, reattach_timeout_s=DEADLINE_S) as client:
        yield Served(client=client, inference=inference, proxy=proxy)
    await server.stop(0)


def assert_whole(outputs: list[GenerateOutput], num_choices: int = 1) -> None:
    for choice in range(num_choices):
        own = [output for output in outputs if output.choice == choice]
        assert [token_id for output in own for token_id in output.token_ids] == list(range(NUM_TOKENS))
        assert "".join(output.text for output in own) == " 0 1 2 3 4 5"
        assert [output.finish_reason is not None for output in own] == [False] * (len(own) - 1) + [True]


async def collect(client: Client, prompt: str = "x", n: int = 1) -> list[GenerateOutput]:
    async with asyncio.timeout(DEADLINE_S):
        outputs = client.generate(prompt, max_tokens=NUM_TOKENS, on_disconnect="detach", n=n)
        return [output async for output in outputs]


async def drain(outputs: AsyncIterator[GenerateOutput]) -> None:
    async for _ in outputs:
        pass


async def test_a_connection_cut_in_mid_stream_is_no_error_and_loses_and_doubles_nothing(
    served: Served,
) -> None:
    outputs = []
    async with asyncio.timeout(DEADLINE_S):
        async for output in served.client.generate("!endless", on_disconnect="detach", timeout_s=DEADLINE_S):
            outputs.append(output)
            if len(outputs) in (3, 20):
                served.proxy.cut()
            if len(outputs) == 40:
                break

    assert [output.token_ids for output in outputs] == [[index] for index in range(40)]
    assert "".join(output.text for output in outputs) == "".join(f" {index}" for index in range(40))
    assert served.inference.calls == ["generate", "attach", "attach"]
    assert served.proxy.num_connections == 3
    assert {attach.request_id for attach in served.inference.attaches} == {outputs[0].request_id}


@pytest.mark.parametrize("after", range(NUM_TOKENS + 1))
async def test_a_broken_stream_resumes_at_its_position(served: Served, after: int) -> None:
    served.inference.faults.append(Fault(after=after))
    assert_whole(await collect(served.client))
    # A stream sends nothing after its last message.
    assert served.inference.calls == ["generate", "attach"][: 1 if after == NUM_TOKENS else 2]


@pytest.mark.parametrize("after", range(2 * NUM_TOKENS))
async def test_every_choice_resumes_at_its_position(served: Served, after: int) -> None:
    served.inference.faults.append(Fault(after=after))
    assert_whole(await collect(served.client, n=2), num_choices=2)
    (attach,) = served.inference.attaches
    positions = {position.choice: position.from_token for position in attach.positions}
    assert positions == {choice: num for choice in (0, 1) if (num := (after + 1 - choice) // 2)}


async def test_a_choice_that_had_ended_before_the_cut_ends_once(served: Served) -> None:
    served.inference.faults.append(Fault(after=2 * NUM_TOKENS - 1))
    outputs = await collect(served.client, "!uneven", n=2)
    assert [output.choice for output in outputs if output.finish_reason] == [0, 1]
    assert served.inference.calls == ["generate"]

    served.inference.faults.append(Fault(after=2 * NUM_TOKENS - 2))
    outputs = await collect(served.client, "!uneven", n=2)
    assert [output.choice for output in outputs if output.finish_reason] == [0, 1]
    assert served.inference.calls == ["generate", "generate", "attach"]


async def test_an_unreachable_coordinator_is_waited_for(unused_address: str) -> None:
    server, _, inference = await serve(unused_address, num_stages=1)
    outputs: list[GenerateOutput] = []

    async def read() -> None:
        async for output in client.generate("!endless", on_disconnect="detach"):
            outputs.append(output)
            if len(outputs) == 3:
                started.set()
            if len(outputs) == 10:
                return

    started = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S), Client(unused_address) as client:
        reading = asyncio.create_task(read())
        await started.wait()
        await server.stop(0)
        await asyncio.sleep(0.3)  # the time without a listener
        assert not reading.done()
        server, _, _ = await serve(unused_address, num_stages=1, inference=inference)
        await reading
    await server.stop(0)
    assert [output.token_ids for output in outputs] == [[index] for index in range(10)]


async def test_an_unreachable_coordinator_is_given_up_after_the_timeout(
    unused_address: str,
) -> None:
    server, _, _ = await serve(unused_address, num_stages=1)
    async with Client(unused_address, reattach_timeout_s=0.4) as client:
        outputs = client.generate("!endless", on_disconnect="detach")
        first = await anext(outputs)
        await server.stop(0)
        start = asyncio.get_running_loop().time()
        with pytest.raises(stageline.Unavailable) as caught:
            async for _ in outputs:
                pass
    assert 0.3 < asyncio.get_running_loop().time() - start < 5
    assert f"request {first.request_id} could not be attached to for 0.4 s" in str(caught.value)


async def test_the_timeout_bounds_reattaching_too(unused_address: str) -> None:
    server, _, _ = await serve(unused_address, num_stages=1)
    async with Client(unused_address) as client:
        outputs = client.generate("!endless", on_disconnect="detach", timeout_s=0.8)
        await anext(outputs)
        await server.stop(0)
        with pytest.raises(stageline.DeadlineExceeded, match=r"the timeout of 0.8 s has passed"):
            await asyncio.wait_for(drain(outputs), 5)


async def test_the_attaching_call_has_the_remaining_timeout(served: Served) -> None:
    outputs = served.client.generate("!endless", on_disconnect="detach", timeout_s=0.8)
    await anext(outputs)
    served.proxy.cut()
    with pytest.raises(stageline.DeadlineExceeded):
        await asyncio.wait_for(drain(outputs), 5)
    assert served.inference.calls == ["generate", "attach"]


async def test_a_server_that_keeps_disconnecting_is_given_up_with_its_error(served: Served) -> None:
    served.inference.faults.extend([Fault(after=2), *[Fault()] * 1000])
    async with Client(served.proxy.address, reattach_timeout_s=0.5) as client:
        with pytest.raises(stageline.Unavailable, match=r"^said the server; request .* for 0.5 s$"):
            await collect(client)
    # Attempts become rarer: 0.5 s have room for 0, 0.1, 0.2 and 0.4 s at the very least half as long.
    assert 3 <= len(served.inference.attaches) <= 6


async def test_breaks_with_progress_between_them_are_outages_of_their_own(served: Served) -> None:
    served.inference.faults.extend([Fault(after=1)] * (NUM_TOKENS - 1))
    async with Client(served.proxy.address, reattach_timeout_s=0.2) as client:
        assert_whole(await collect(client))


async def test_a_request_that_never_arrived_is_sent_again_under_the_same_id(served: Served) -> None:
    served.inference.faults.append(Fault(is_accepted=False))
    assert_whole(await collect(served.client))
    assert served.inference.calls == ["generate", "attach", "generate"]
    first, second = served.inference.requests
    assert first == second


async def test_a_request_that_arrived_after_all_is_attached_to(served: Served) -> None:
    late = Fault(is_accepted=False, code=grpc.StatusCode.NOT_FOUND)
    served.inference.faults.extend([Fault(), late])
    assert_whole(await collect(served.client))
    # The second Generate was answered with ALREADY_EXISTS.
    assert served.inference.calls == ["generate", "attach", "generate", "attach"]


async def test_a_request_that_is_forgotten_after_its_first_tokens_is_not_started_again(
    served: Served,
) -> None:
    served.inference.faults.extend([Fault(after=2), Fault(is_accepted=False, code=grpc.StatusCode.NOT_FOUND)])
    with pytest.raises(
        stageline.Unavailable, match=r"^said the server; the coordinator has lost the request"
    ):
        await collect(served.client)
    assert served.inference.calls == ["generate", "attach"]


async def test_a_request_id_in_use_is_an_error_of_the_first_call(served: Served) -> None:
    request_id = id_text(new_request_id())
    async with aclosing(
        served.client.generate("!endless", on_disconnect="detach", request_id=request_id)
    ) as outputs:
        await anext(outputs)
        with pytest.raises(stageline.RequestExists):
            await anext(served.client.generate("x", on_disconnect="detach", request_id=request_id))
    assert served.inference.calls == ["generate", "generate"]


@pytest.mark.parametrize("on_disconnect", [None, "cancel"])
async def test_under_cancel_a_lost_connection_is_an_error(
    served: Served, on_disconnect: Literal["cancel"] | None
) -> None:
    outputs = served.client.generate("!endless", on_disconnect=on_disconnect)
    await anext(outputs)
    served.proxy.cut()
    with pytest.raises(stageline.Unavailable):
        async for _ in outputs:
            pass
    async with asyncio.timeout(DEADLINE_S):
        await served.inference.ended_early.wait()
    assert served.inference.calls == ["generate"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ABORTED", stageline.StepFailed),
        ("CANCELLED", stageline.Cancelled),
        ("DEADLINE_EXCEEDED", stageline.DeadlineExceeded),
        ("INTERNAL", stageline.ServerError),
        ("RESOURCE_EXHAUSTED", stageline.Overloaded),
        ("INVALID_ARGUMENT", stageline.InvalidRequest),
    ],
)
@pytest.mark.parametrize("num_cuts", [0, 1])
async def test_errors_of_the_server_are_final(
    served: Served, code: str, kind: type[stageline.StagelineError], num_cuts: int
) -> None:
    served.inference.faults.extend([Fault(after=1)] * num_cuts)
    served.inference.faults.append(Fault(after=1, code=grpc.StatusCode[code]))
    with pytest.raises(kind, match=r"^said the server$"):
        await collect(served.client)
    assert len(served.inference.calls) == num_cuts + 1


async def test_unavailable_with_details_is_final(served: Served) -> None:
    reason = error_details_pb2.ErrorInfo(reason="NO_STAGE_WORKERS", domain="stageline")
    served.inference.faults.append(Fault(after=1, detail=reason))
    with pytest.raises(stageline.Unavailable, match=r"^said the server$"):
        await collect(served.client)
    assert served.inference.calls == ["generate"]


async def test_leaving_the_loop_ends_the_call_and_attach_finds_the_request(served: Served) -> None:
    async for output in served.client.generate("!endless", on_disconnect=Detach(keep_s=5)):
        left = output
        if output.first_token_index == 4:
            break
    async with asyncio.timeout(DEADLINE_S):
        await served.inference.ended_early.wait()
    assert served.inference.cancelled_ids == []

    async with aclosing(served.client.attach(left.request_id, from_token=5)) as outputs:
        later = await anext(outputs)
    assert (later.token_ids, later.first_token_index, later.text_offset) == ([5], 5, 10)


async def test_cancelling_the_task_detaches_and_cancel_ends_the_request(served: Served) -> None:
    request_id = id_text(new_request_id())

    async def consume() -> None:
        async for _ in served.client.generate("!endless", on_disconnect="detach", request_id=request_id):
            started.set()

    started = asyncio.Event()
    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert served.inference.cancelled_ids == []
    await served.client.cancel(request_id)
    assert served.inference.cancelled_ids == [request_id]
    with pytest.raises(stageline.Cancelled):
        async for _ in served.client.attach(request_id):
            pass


async def test_attach_repeats_output_from_the_start_or_a_given_position(
    served: Served,
) -> None:
    first = (await collect(served.client, n=2))[0]
    assert_whole([output async for output in served.client.attach(first.request_id)], num_choices=2)

    outputs = [
        output async for output in served.client.attach(first.request_id, from_token=5, positions={1: 3})
    ]
    assert [(output.choice, output.token_ids) for output in outputs] == [
        (1, [3]),
        (1, [4]),
        (0, [5]),
        (1, [5]),
    ]


async def test_attach_resumes_after_a_cut(served: Served) -> None:
    first = (await collect(served.client, n=2))[0]
    served.inference.faults.extend([Fault(after=3), Fault(after=2 * NUM_TOKENS - 3)])
    assert_whole([output async for output in served.client.attach(first.request_id)], num_choices=2)
    # The number of choices is unknown, so a cut at the very end needs another call.
    assert served.inference.calls == ["generate", "attach", "attach", "attach"]


SECRET = stageline.new_attach_secret()


async def test_attaching_to_an_unknown_request_is_an_error(served: Served) -> None:
    with pytest.raises(stageline.RequestNotFound):
        await anext(served.client.attach(id_text(new_request_id()), secret=SECRET))
    with pytest.raises(stageline.InvalidRequest, match="from_token is -1"):
        served.client.attach("x", secret=SECRET, from_token=-1)
    with pytest.raises(stageline.InvalidRequest, match=r"positions\[1\] is -1"):
        served.client.attach("x", secret=SECRET, positions={1: -1})


async def test_prompt_logprobs_are_delivered_once(served: Served) -> None:
    served.inference.faults.append(Fault(after=0))
    completions = await served.client.complete(
        "a b c", max_tokens=NUM_TOKENS, on_disconnect="detach", prompt_logprobs=0, logprobs=1
    )
    assert [len(completion.prompt_logprobs or []) for completion in completions] == [3]
    assert [len(completion.logprobs or []) for completion in completions] == [NUM_TOKENS]


async def test_closing_the_client_while_it_waits_for_the_coordinator_is_one_clear_error(
    unused_address: str,
) -> None:
    server, _, _ = await serve(unused_address, num_stages=1)

    async def read() -> None:
        async for _ in client.generate("!endless", on_disconnect="detach"):
            started.set()

    started = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        async with Client(unused_address) as client:
            reading = asyncio.create_task(read())
            await started.wait()
            await server.stop(0)
            await asyncio.sleep(0.5)  # the client is waiting now
        with pytest.raises(stageline.Cancelled, match="client was closed"):
            await reading


async def test_closing_the_client_while_it_pauses_is_one_clear_error(served: Served) -> None:
    served.inference.faults.extend([Fault()] * 1000)
    async with Client(served.proxy.address) as client:
        reading = asyncio.create_task(collect(client))
        async with asyncio.timeout(DEADLINE_S):
            while len(served.inference.attaches) < 4:
                await asyncio.sleep(0.01)
    with pytest.raises(stageline.Cancelled, match="client was closed"):
        await reading


async def test_a_reset_or_dropped_stream_is_a_lost_connection_for_any_status() -> None:
    for text, code in [
        ("Stream removed (RST_STREAM (Received RST_STREAM with error code 2))", grpc.StatusCode.INTERNAL),
        ("Stream removed (RST_STREAM (Received RST_STREAM with error code 8))", grpc.StatusCode.CANCELLED),
        ("CANCELLED", grpc.StatusCode.CANCELLED),
    ]:
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=text)
        assert is_connection_loss(error)
    said = grpc.aio.AioRpcError(
        grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no"
    )
    assert not is_connection_loss(said)
