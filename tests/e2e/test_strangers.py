"""Attacks by processes that reach every port and have all public information, but no secret."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import grpc
import pytest
import pytest_asyncio

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client, PermissionDenied, new_attach_secret
from stageline_rpc.internal.v1 import deliver_pb2, deliver_pb2_grpc, forward_pb2, join_pb2, join_pb2_grpc
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.clusters import START_TIMEOUT_S, tokens_of
from tests.e2e.commands import ENVIRONMENT, run_stageline
from tests.mock_answers import mock_tokens
from wire.channels import PROTOCOL_VERSION
from wire.errors import StepFaultKind
from wire.ids import new_incarnation
from wire.stage_calls import open_forward
from wire.step_codec import encode_fault
from wire.steps import FaultReport
from wire.transport import PLAIN
from wire.user_files import state_directory, token_path

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_LAYERS = 4
VOCAB_SIZE = 1000
NUM_TOKENS = 60
PROMPT = [3, 1, 4]
TRIES = 6
DEADLINE_S = 30.0
IDENTITY = re.compile(r"[0-9a-f]{16}|[0-9a-f]{8}-[0-9a-f]{4}-")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = LocalClusterConfig(
        num_workers=2,
        mocks=("step=10ms",),
        coordinator_arguments=("--mock-model", f"layers={NUM_LAYERS},vocab={VOCAB_SIZE}"),
        environment=ENVIRONMENT,
        log_directory=tmp_path_factory.mktemp("logs"),
    )
    async with LocalCluster(config) as running:
        await running.wait_until_serving(timeout_s=START_TIMEOUT_S)
        yield running


async def status_of(cluster: LocalCluster) -> cluster_pb2.GetStatusResponse:
    async with Client(cluster.address) as client:
        return await client.status()


def hello_of(status: cluster_pb2.GetStatusResponse, *, sender_stage: int) -> forward_pb2.HopHello:
    """A hello with all information available to a stranger."""
    ends = {worker.stage: worker.layer_end for worker in status.workers if worker.HasField("stage")}
    return forward_pb2.HopHello(
        protocol_version=PROTOCOL_VERSION,
        coordinator_incarnation=bytes(16),
        epoch=status.epoch,
        sender_stage=sender_stage,
        sender_incarnation=bytes(16),
        fingerprint=status.fingerprint,
        dtype=status.dtype,
        layer_end=ends.get(sender_stage, 0),
        block_size=status.block_size,
        num_blocks=status.num_blocks,
    )


def learn(hello: forward_pb2.HopHello, details: str) -> None:
    """Use the information of a rejection in the next attempt."""
    for field, pattern in (
        ("coordinator_incarnation", r"coordinator incarnation.* (?:expected|one is) ([0-9a-f-]{32,})"),
        (
            "sender_incarnation",
            r"(?:worker incarnation|incarnation of).* (?:expected|one is) ([0-9a-f-]{32,})",
        ),
    ):
        if found := re.search(pattern, details):
            setattr(hello, field, UUID(found[1]).bytes)
    hello.secret = os.urandom(32)


async def refusal(call: Any) -> grpc.aio.AioRpcError | None:
    """Details of the rejection; None if the call is accepted."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            await call.read()
    except grpc.aio.AioRpcError as error:
        return error
    call.cancel()
    return None


def check_refusals(refusals: list[grpc.aio.AioRpcError | None]) -> None:
    """Assert that all were rejected without a hint for the next attempt."""
    assert None not in refusals, f"accepted at attempt {refusals.index(None) + 1}"
    for error in refusals:
        assert error is not None
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        details = error.details() or ""
        assert (
            "incarnation" not in details and "fingerprint" not in details and not IDENTITY.search(details)
        ), details


@pytest.mark.full
async def test_a_stranger_cannot_deliver_results(cluster: LocalCluster) -> None:
    async with Client(cluster.address) as client:
        answer = asyncio.create_task(tokens_of(client, PROMPT, NUM_TOKENS))
        status = await status_of(cluster)
        hello = hello_of(status, sender_stage=status.num_stages - 1)
        refusals: list[grpc.aio.AioRpcError | None] = []
        async with PLAIN.channel(cluster.address) as channel:
            for _ in range(TRIES):
                call = deliver_pb2_grpc.StepResultsServiceStub(channel).Deliver()
                await call.write(deliver_pb2.DeliverRequest(hello=hello))
                refusals.append(error := await refusal(call))
                if error is None:
                    break
                learn(hello, error.details() or "")
        check_refusals(refusals)
        assert await answer == mock_tokens(PROMPT, NUM_TOKENS, vocab_size=VOCAB_SIZE)
    assert (await status_of(cluster)).epoch == status.epoch


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stranger_cannot_send_steps(cluster: LocalCluster, stage: int) -> None:
    status = await status_of(cluster)
    (address,) = (worker.address for worker in status.workers if worker.stage == stage)
    hello = hello_of(status, sender_stage=stage - 1)
    refusals: list[grpc.aio.AioRpcError | None] = []
    async with PLAIN.channel(address) as channel:
        for _ in range(TRIES):
            call = open_forward(channel)
            await call.write(forward_pb2.ForwardRequest(hello=hello).SerializeToString())
            refusals.append(error := await refusal(call))
            if error is None:
                break
            learn(hello, error.details() or "")
    # A second stream of an epoch is always rejected, but only after all other comparisons.
    check_refusals(refusals)


async def test_a_fault_report_for_a_stage_of_another_worker_is_ignored(cluster: LocalCluster) -> None:
    """A stranger that joined as a spare reports repeated faults for FIRST."""
    status = await status_of(cluster)
    async with PLAIN.channel(cluster.address) as channel, Client(cluster.address) as client:
        call = join_pb2_grpc.MembershipServiceStub(channel).Join()
        hello = join_pb2.WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name="stranger",
            incarnation=new_incarnation(),
            address="127.0.0.1:9",
            device="mock",
            is_mock=True,
            memory_bytes=1,
        )
        await call.write(join_pb2.JoinRequest(hello=hello))
        assert (await call.read()).WhichOneof("message") == "welcome"
        answer = asyncio.create_task(tokens_of(client, PROMPT, NUM_TOKENS))
        for step_id in range(5):
            fault = FaultReport(
                epoch=status.epoch, step_id=step_id, stage=0, kind=StepFaultKind.DEVICE, message="no"
            )
            await call.write(join_pb2.JoinRequest(fault=encode_fault(fault)))
        assert await answer == mock_tokens(PROMPT, NUM_TOKENS, vocab_size=VOCAB_SIZE)
        call.cancel()
    assert (await status_of(cluster)).epoch == status.epoch


@pytest.mark.full
async def test_a_request_id_alone_neither_attaches_nor_cancels(cluster: LocalCluster) -> None:
    async with Client(cluster.address) as client, Client(cluster.address) as stranger:
        answer = asyncio.create_task(tokens_of(client, PROMPT, NUM_TOKENS, on_disconnect="detach"))
        request_id = await _shown_request(stranger)
        for attempt in (
            stranger.cancel(request_id, secret=new_attach_secret()),
            anext(stranger.attach(request_id, secret=new_attach_secret())),
        ):
            with pytest.raises(PermissionDenied) as denied:
                await attempt
            assert denied.value.reason == "ATTACH_SECRET_MISMATCH"
        assert await answer == mock_tokens(PROMPT, NUM_TOKENS, vocab_size=VOCAB_SIZE)


async def _shown_request(client: Client) -> str:
    """Id of the running request, which is public."""
    async with asyncio.timeout(DEADLINE_S):
        while not (
            live := [request for request in (await client.activity()).requests if not request.ended_us]
        ):
            await asyncio.sleep(0.01)
    return live[0].request_id


@pytest.mark.full
async def test_drain_needs_the_operator_token(
    cluster: LocalCluster,
) -> None:
    async with Client(cluster.address) as stranger:
        with pytest.raises(PermissionDenied) as denied:
            await stranger.drain("worker-0", token="x" * 43)
        assert denied.value.reason == "TOKEN_MISMATCH"
    path = token_path(state_directory(os.environ) / "tokens", cluster.address)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().strip() not in cluster.coordinator.read_log()
    elsewhere = await run_stageline(
        "drain", "unknown", "--coordinator", cluster.address, XDG_STATE_HOME="/nonexistent"
    )
    assert "error[NO_TOKEN]" in elsewhere.the_error()
    here = await run_stageline("drain", "unknown", "--coordinator", cluster.address)
    assert "error[WORKER_NOT_FOUND]" in here.the_error() or "error[NOT_FOUND]" in here.the_error()
