"""Attaching to a request: every token and text arrives once, wherever the call attaches."""

import asyncio
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from stageline_rpc.v1 import inference_pb2
from tests.integration.calls import Caller, Reader, Received, StatusCode, again, message
from tests.integration.cluster import Cluster
from tests.integration.gate import Gate, num_generated
from wire.ids import id_text, new_request_id

LAYERS = (1, 1, 1)
NUM_TOKENS = 60
SHAPES: dict[str, dict[str, Any]] = {
    "one choice": {},
    "three choices": {"n": 3},
    "echo": {"echo": True},
    "three choices with echo": {"n": 3, "echo": True},
    "stop strings": {"stop": ["a", "th", "\n "], "min_tokens": 40},
}


def request_of(shape: str = "one choice", **more: Any) -> inference_pb2.GenerateRequest:
    return message("The red fox", NUM_TOKENS, seed=7, **SHAPES[shape], **more)


async def read_all_there_is(cluster: Cluster, gate: Gate, reader: Reader) -> None:
    """Read until the client has all generated tokens and generation is paused."""
    gate.close()
    await gate.wait_quiet()
    for choice, count in enumerate(num_generated(cluster, reader.received.request_id)):
        await reader.until(count, choice=choice)


@pytest.mark.matrix(1, full=1)
@pytest.mark.parametrize("shape", SHAPES)
async def test_an_attaching_call_continues_and_the_previous_call_ends(worded_llama: Path, shape: str) -> None:
    async with (
        Cluster(worded_llama, layers=LAYERS, has_text=True, hop_proxies=[0]) as cluster,
        Caller(cluster.address) as first,
        Caller(cluster.address) as second,
    ):
        undisturbed = await first.run(request_of(shape))
        gate = Gate(cluster)
        reader = first.generate(request_of(shape))
        for caller in (second, first, second):
            await reader.until(len(reader.received.tokens) + 7)
            await read_all_there_is(cluster, gate, reader)
            num_messages = reader.num_messages
            attached = caller.attach(reader.received)
            assert await reader.end() is StatusCode.ABORTED
            assert "another call attached" in reader.details
            assert reader.num_messages == num_messages
            reader = attached
            gate.open()
        assert await reader.end() is StatusCode.OK
        assert reader.received.outputs == undisturbed.outputs
        assert (await cluster.wait_drained()).requests.finished == 2


@pytest.mark.full
async def test_repeated_attaches_read_one_stream_without_gaps(worded_llama: Path) -> None:
    async with (
        Cluster(worded_llama, layers=LAYERS, has_text=True) as cluster,
        Caller(cluster.address) as first,
        Caller(cluster.address) as second,
    ):
        request = message("The red fox", 160, seed=7, keep_s=60.0)
        undisturbed = await first.run(request)
        readers = [first.generate(again(request))]
        request_id = readers[0].received.request_id
        await readers[0].until(1)
        async with asyncio.TaskGroup() as tasks:
            for index in range(1, 9):
                # The previous reader continues at full speed.
                reading = tasks.create_task(readers[-1].end())
                readers.append((first, second)[index % 2].attach_at(request_id, 0))
                await readers[-1].until(10 * index)
                # OK only if the request ended before the next call attached.
                assert await reading in (StatusCode.ABORTED, StatusCode.OK)
        assert await readers[-1].end() is StatusCode.OK
        for reader in readers:
            num_tokens = len(reader.received.tokens)
            assert reader.received.tokens == undisturbed.tokens[:num_tokens]
            assert undisturbed.text.startswith(reader.received.text)
        assert readers[-1].received.outputs == undisturbed.outputs
        await cluster.wait_drained()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("shape", ["one choice", "echo", "stop strings"])
async def test_an_ended_request_can_be_read_from_any_token(worded_llama: Path, shape: str) -> None:
    async with (
        Cluster(worded_llama, layers=LAYERS, has_text=True) as cluster,
        Caller(cluster.address) as caller,
    ):
        whole = caller.generate(request_of(shape, keep_s=60.0))
        prefixes = [Received(whole.received.request_id)]
        while await whole.next() is not None:
            prefixes.append(deepcopy(whole.received))
        assert len(prefixes) > 30
        for prefix in prefixes:
            reader = caller.attach(prefix)
            assert await reader.end() is StatusCode.OK
            assert reader.received.outputs == whole.received.outputs
            assert prefix.choices[0].usage == whole.received.choices[0].usage
        assert (await cluster.wait_drained()).requests.kept == 1


@pytest.mark.full
async def test_an_invalid_attach_is_rejected_and_affects_no_request(worded_llama: Path) -> None:
    async with (
        Cluster(worded_llama, layers=LAYERS, has_text=True, hop_proxies=[0]) as cluster,
        Caller(cluster.address) as caller,
    ):
        gate = Gate(cluster)
        request = request_of("three choices")
        reader = caller.generate(request)
        await reader.until(5)
        await read_all_there_is(cluster, gate, reader)
        (num_tokens, *_) = num_generated(cluster, request.request_id)
        refused = [
            (caller.attach_at(request.request_id, 1000), "from_token is 1000, choice 0 has"),
            (
                caller.attach_at(request.request_id, num_tokens + 1, choice=0),
                f"from_token is {num_tokens + 1}, choice 0 has {num_tokens} tokens",
            ),
            (caller.attach_at(request.request_id, 0, choice=3), "choice is 3, the request has 3 choices"),
            (caller.attach_at("fox", 0), "'fox' is not a UUID"),
        ]
        for attached, reason in refused:
            assert await attached.end() is StatusCode.INVALID_ARGUMENT
            assert reason in attached.details
        unknown = caller.attach_at(id_text(new_request_id()), 0)
        assert await unknown.end() is StatusCode.NOT_FOUND
        gate.open()
        assert await reader.end() is StatusCode.OK
        # Keeping its output was not requested.
        assert await caller.attach_at(request.request_id, 0).end() is StatusCode.NOT_FOUND
        await cluster.wait_drained()


@pytest.mark.full
async def test_the_deadline_of_the_attaching_call_applies(worded_llama: Path) -> None:
    async with (
        Cluster(worded_llama, layers=LAYERS, has_text=True, hop_proxies=[0]) as cluster,
        Caller(cluster.address) as caller,
    ):
        gate = Gate(cluster)
        request = message("The red fox", 20, seed=7)
        undisturbed = await caller.run(request)
        short = caller.generate(again(request), timeout_s=0.8)
        await short.until(3)
        await read_all_there_is(cluster, gate, short)
        patient = caller.attach(short.received)
        assert await short.end() is StatusCode.ABORTED
        # The call ends at its deadline; the request continues although its first deadline has passed.
        other = caller.generate(message("A", 1), timeout_s=0.8)
        assert await other.end() is StatusCode.DEADLINE_EXCEEDED
        gate.open()
        assert await patient.end() is StatusCode.OK
        assert patient.received.outputs == undisturbed.outputs
        # And the other way round.
        slow = caller.generate(again(request))
        await slow.until(3)
        await read_all_there_is(cluster, gate, slow)
        assert await caller.attach(slow.received, timeout_s=0.4).end() is StatusCode.DEADLINE_EXCEEDED
        gate.open()
        status = await cluster.wait_drained()
        assert (status.requests.finished, status.requests.cancelled) == (2, 2)


@pytest.mark.full
async def test_a_call_attaches_without_a_pipeline(worded_llama: Path) -> None:
    async with (
        Cluster(worded_llama, layers=LAYERS, has_text=True) as cluster,
        Caller(cluster.address) as caller,
    ):
        undisturbed = await caller.run(request_of("three choices"))
        old = caller.generate(request_of("three choices"))
        await old.until(10)
        await cluster.workers["w1"].stop()
        attached = caller.attach(old.received)
        await cluster.start_worker("w1")
        # Tokens in flight to the old call are unread, and are sent again.
        assert await attached.end() is StatusCode.OK
        assert attached.received.outputs == undisturbed.outputs
        await cluster.wait_drained()
