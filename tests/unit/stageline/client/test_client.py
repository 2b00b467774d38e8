"""The client against a real grpc.aio server on port 0."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import pytest
from google.rpc import error_details_pb2

import stageline
from stageline import Client, FinishReason, GenerateOutput
from stageline.client.errors import from_rpc_error
from tests.fake_inference import REQUEST_ID, FakeInference, Fault
from tests.fake_stageline import serve
from wire.ids import parse_request_id
from wire.transport import PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    client: Client
    inference: FakeInference


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server, address, inference = await serve("127.0.0.1:0", num_stages=1)
    async with Client(address) as client:
        yield Served(client=client, inference=inference)
    await server.stop(0)


async def _collect(client: Client, prompt: stageline.Prompt) -> list[GenerateOutput]:
    return [output async for output in client.generate(prompt, max_tokens=3)]


async def test_outputs_are_increments_and_the_last_has_the_finish_reason(served: Served) -> None:
    outputs = await _collect(served.client, "two words")

    assert [(output.token_ids, output.text) for output in outputs] == [([0], " 0"), ([1], " 1"), ([2], " 2")]
    assert [(output.first_token_index, output.text_offset) for output in outputs] == [(0, 0), (1, 2), (2, 4)]
    assert {output.request_id for output in outputs} == {served.inference.requests[0].request_id}
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert [output.usage is None for output in outputs] == [True, True, False]
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.prompt_tokens == 2
    assert outputs[-1].usage.completion_tokens == 3


async def test_omitted_arguments_stay_unset(served: Served) -> None:
    async for _ in served.client.generate("x"):
        pass

    (request,) = served.inference.requests
    assert not request.HasField("max_tokens")
    assert not request.HasField("on_disconnect")
    for name in ("temperature", "top_k", "top_p", "seed"):
        assert not request.sampling.HasField(name)
    assert request.sampling.ignore_eos is False


async def test_a_request_without_an_id_is_given_a_fresh_one(served: Served) -> None:
    await _collect(served.client, "x")
    await _collect(served.client, "x")

    first, second = (parse_request_id(request.request_id) for request in served.inference.requests)
    assert first != second


async def test_the_cache_salt_is_sent(served: Served) -> None:
    async for _ in served.client.generate("x", cache_salt="tenant"):
        pass
    async for _ in served.client.generate("x"):
        pass

    assert [request.cache_salt for request in served.inference.requests] == ["tenant", ""]


async def test_zero_is_sent_and_not_taken_for_unset(served: Served) -> None:
    outputs = served.client.generate(
        "x", max_tokens=1, temperature=0.0, top_k=0, top_p=0.5, seed=0, ignore_eos=True, request_id=REQUEST_ID
    )
    async for _ in outputs:
        pass

    (request,) = served.inference.requests
    assert request.request_id == REQUEST_ID
    for name in ("temperature", "top_k", "top_p", "seed"):
        assert request.sampling.HasField(name)
    assert request.sampling.top_p == 0.5
    assert request.sampling.ignore_eos is True


async def test_a_prompt_is_text_or_token_ids_or_messages(served: Served) -> None:
    await _collect(served.client, "text")
    await _collect(served.client, [5, 6])
    await _collect(served.client, [{"role": "user", "content": "hello"}])

    text, ids, conversation = served.inference.requests
    assert text.WhichOneof("prompt") == "text"
    assert list(ids.token_ids.ids) == [5, 6]
    assert [(m.role, m.content) for m in conversation.conversation.messages] == [("user", "hello")]


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [-1],
        [2**32],
        [1.5],
        [{"role": "user"}],
        [{"role": "user", "content": "x", "name": "y"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": "x"}, 4],
        [4, {"role": "user", "content": "x"}],
    ],
)
async def test_a_prompt_that_no_message_can_carry_is_an_invalid_request(
    served: Served, prompt: list[object]
) -> None:
    with pytest.raises(stageline.InvalidRequest):
        await _collect(served.client, prompt)  # type: ignore[arg-type]
    assert served.inference.requests == []


@pytest.mark.parametrize(
    ("prompt", "arguments", "message"),
    [
        ("x", {"max_tokens": -1}, "max_tokens is -1, must be in [0, 4294967295]"),
        ("x", {"top_k": 2**32}, "top_k is 4294967296, must be in [0, 4294967295]"),
        ("x", {"seed": 10**23}, f"seed is {10**23}, must be in [0, 18446744073709551615]"),
        ([3, -1], {}, "a token id of the prompt is -1, must be in [0, 4294967295]"),
    ],
)
async def test_values_outside_the_message_range_are_rejected_with_limits(
    served: Served, prompt: stageline.Prompt, arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(stageline.InvalidRequest) as caught:
        await anext(served.client.generate(prompt, **arguments))  # type: ignore[arg-type]
    assert str(caught.value) == message
    assert served.inference.requests == []


async def test_a_prompt_too_large_for_a_message_is_rejected_with_its_size(served: Served) -> None:
    with pytest.raises(
        stageline.InvalidRequest, match=r"has 16777\d+ bytes with its prompt, a message has at"
    ):
        await anext(served.client.generate("x" * 2**24))
    assert served.inference.requests == []


async def test_an_unknown_argument_is_rejected(served: Served) -> None:
    with pytest.raises(TypeError, match="temprature"):
        served.client.generate("x", temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", stageline.InvalidRequest),
        ("ALREADY_EXISTS", stageline.RequestExists),
        ("NOT_FOUND", stageline.RequestNotFound),
        ("RESOURCE_EXHAUSTED", stageline.Overloaded),
        ("UNAVAILABLE", stageline.Unavailable),
        ("DEADLINE_EXCEEDED", stageline.DeadlineExceeded),
        ("CANCELLED", stageline.Cancelled),
        ("ABORTED", stageline.StepFailed),
        ("INTERNAL", stageline.ServerError),
        ("DATA_LOSS", stageline.ServerError),
    ],
)
async def test_a_status_becomes_a_typed_error_with_the_servers_text(
    served: Served, code: str, kind: type[stageline.StagelineError]
) -> None:
    outputs = served.client.generate(f"!after:{code}")
    assert (await anext(outputs)).token_ids == [0]
    with pytest.raises(stageline.StagelineError) as caught:
        await anext(outputs)

    assert type(caught.value) is kind
    assert caught.value.code == code
    assert str(caught.value) == caught.value.message == "said the server"


async def test_an_overload_error_has_the_retry_hint(served: Served) -> None:
    with pytest.raises(stageline.Overloaded) as caught:
        await anext(served.client.generate("!overloaded"))
    assert caught.value.retry_after_s == 1.5

    with pytest.raises(stageline.Overloaded) as caught:
        await _collect(served.client, "!after:RESOURCE_EXHAUSTED")
    assert caught.value.retry_after_s is None


async def test_a_superseded_call_raises_its_own_error(served: Served) -> None:
    reason = error_details_pb2.ErrorInfo(reason="SUPERSEDED", domain="stageline")
    served.inference.faults.append(Fault(after=1, code=grpc.StatusCode.ABORTED, detail=reason))
    with pytest.raises(stageline.Superseded, match="said the server") as caught:
        await _collect(served.client, "x")
    assert caught.value.code == "ABORTED"


async def test_details_that_cannot_be_read_do_not_hide_the_error(served: Served) -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff")),
        details="full",
    )
    typed = from_rpc_error(error)
    assert isinstance(typed, stageline.Overloaded)
    assert (str(typed), typed.retry_after_s) == ("full", None)


async def test_choices_are_interleaved_and_end_independently(served: Served) -> None:
    outputs = [output async for output in served.client.generate("!uneven", n=2, max_tokens=3)]

    assert [(output.choice, output.token_ids) for output in outputs] == [
        (0, [0]),
        (1, [0]),
        (0, [1]),
        (1, [1]),
        (1, [2]),
    ]
    assert [output.choice for output in outputs if output.finish_reason] == [0, 1]


async def test_a_stream_that_leaves_a_choice_unfinished_is_an_error(served: Served) -> None:
    with pytest.raises(stageline.ServerError, match="without a finish reason of choice 0, after 4 tokens"):
        async for _ in served.client.generate("!unfinished", n=2):
            pass


async def test_log_probabilities_arrive_with_their_tokens(served: Served) -> None:
    outputs = [
        output async for output in served.client.generate("a b", max_tokens=2, logprobs=2, prompt_logprobs=1)
    ]

    (token,) = outputs[1].logprobs or []
    assert (token.token_id, token.logprob, token.rank) == (1, -0.5, 1)
    assert [(top.token_id, top.logprob) for top in token.top] == [(1, -0.5), (2, -1.5)]
    first, second = outputs[0].prompt_logprobs or []
    assert first.logprob is None
    assert second.logprob == -0.5
    assert outputs[1].prompt_logprobs is None


async def test_unrequested_fields_are_none(served: Served) -> None:
    (output,) = [output async for output in served.client.generate("x", max_tokens=1)]
    assert output.logprobs is None
    assert output.prompt_logprobs is None


async def test_complete_gives_each_choice_whole_and_in_order(served: Served) -> None:
    completions = await served.client.complete("a b", n=3, max_tokens=2, logprobs=0, prompt_logprobs=0)

    assert [completion.choice for completion in completions] == [0, 1, 2]
    assert {completion.text for completion in completions} == {" 0 1"}
    assert {completion.request_id for completion in completions} == {served.inference.requests[0].request_id}
    assert [len(completion.logprobs or []) for completion in completions] == [2, 2, 2]
    assert [len(completion.prompt_logprobs or []) for completion in completions] == [2, 0, 0]
    assert completions[2].finish_reason == FinishReason.LENGTH
    assert completions[2].usage.completion_tokens == 2


async def test_scoring_generates_nothing(served: Served) -> None:
    (completion,) = await served.client.complete("a b c", max_tokens=0, prompt_logprobs=1)
    assert completion.token_ids == []
    assert len(completion.prompt_logprobs or []) == 3


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), "1"])
async def test_an_invalid_timeout_is_rejected(served: Served, timeout_s: float) -> None:
    with pytest.raises(stageline.InvalidRequest, match="timeout_s is"):
        served.client.generate("x", timeout_s=timeout_s)


async def test_breaking_out_of_the_loop_cancels_the_call(served: Served) -> None:
    async for _ in served.client.generate("!endless"):
        break
    async with asyncio.timeout(5):
        await served.inference.ended_early.wait()


async def test_closing_the_generator_cancels_the_call(served: Served) -> None:
    outputs = served.client.generate("!endless")
    await anext(outputs)
    await outputs.aclose()
    async with asyncio.timeout(5):
        await served.inference.ended_early.wait()


async def test_cancelling_the_task_cancels_the_call(served: Served) -> None:
    async def consume() -> None:
        async for _ in served.client.generate("!endless"):
            started.set()

    started = asyncio.Event()
    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        await served.inference.ended_early.wait()


async def test_closing_the_client_under_a_call_is_an_error_and_not_a_cancelled_task() -> None:
    server, address, _ = await serve("127.0.0.1:0", num_stages=1)
    async with Client(address) as client:
        outputs = client.generate("!endless")
        await anext(outputs)
    with pytest.raises(stageline.Cancelled, match="client was closed"):
        async for _ in outputs:
            pass
    await server.stop(0)


async def test_a_timeout_bounds_the_whole_generation(served: Served) -> None:
    with pytest.raises(stageline.DeadlineExceeded):
        async for _ in served.client.generate("!endless", timeout_s=0.3):
            pass


async def test_a_missing_token_is_an_error(served: Served) -> None:
    with pytest.raises(stageline.ServerError, match="continues at token 2 and character 2, after 1 tokens"):
        await _collect(served.client, "!gap")


async def test_a_stream_without_a_finish_reason_is_an_error(served: Served) -> None:
    with pytest.raises(stageline.ServerError, match="without a finish reason of choice 0, after 3 tokens"):
        await _collect(served.client, "!unfinished")


async def test_cancel_names_the_request(served: Served) -> None:
    await served.client.cancel(REQUEST_ID, secret=stageline.new_attach_secret())
    assert served.inference.cancelled_ids == [REQUEST_ID]
    with pytest.raises(stageline.RequestNotFound, match="no request other"):
        await served.client.cancel("other", secret=stageline.new_attach_secret())


async def test_model_and_status_are_the_servers_messages(served: Served) -> None:
    assert (await served.client.model()).name == "fake-stories"
    assert (await served.client.status()).num_stages == 1


async def test_an_unreachable_coordinator_is_one_clear_error(unused_address: str) -> None:
    async with Client(unused_address, connect_timeout_s=0.2) as client:
        with pytest.raises(
            stageline.Unavailable,
            match=f"^no coordinator at {unused_address} within 0.2 s: nothing listens there",
        ):
            await client.model()


async def test_a_late_coordinator_is_waited_for(unused_address: str) -> None:
    async with Client(unused_address) as client:
        asking = asyncio.create_task(client.model())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await asyncio.shield(asking)
        server, _, _ = await serve(unused_address, num_stages=1)
        assert (await asking).name == "fake-stories"
    await server.stop(0)


async def test_a_connection_made_while_the_event_loop_was_busy_is_in_time(served: Served) -> None:
    async with Client(served.client._connection.address, connect_timeout_s=0.2) as client:
        asking = asyncio.create_task(client.model())
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251  # gRPC connects meanwhile, on its own threads
        assert (await asking).name == "fake-stories"


async def test_many_first_calls_watch_the_connection_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_watches = 0
    channel_type = type(PLAIN.channel("127.0.0.1:1"))
    real = channel_type.channel_ready

    async def counted(channel: grpc.aio.Channel) -> None:
        nonlocal num_watches
        num_watches += 1
        await real(channel)

    monkeypatch.setattr(channel_type, "channel_ready", counted)
    async with Client(served.client._connection.address) as client:
        await asyncio.gather(*(client.model() for _ in range(50)))
    assert num_watches == 1


def test_a_call_that_was_refused_unread_is_an_overload_with_a_retry_hint() -> None:
    text = "Stream removed (RST_STREAM (Received RST_STREAM with error code 7))"
    refused = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=text
    )
    typed = from_rpc_error(refused)
    assert isinstance(typed, stageline.Overloaded)
    assert (typed.reason, typed.retry_after_s) == ("OVERLOADED", 1.0)


async def test_a_closed_client_raises_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await Client("127.0.0.1:1").model()


def test_a_wrong_address_is_rejected_at_once() -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        Client("localhost")


def test_importing_the_client_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, stageline; sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
