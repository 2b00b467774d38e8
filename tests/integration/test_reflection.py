"""Server reflection: clients without our .proto files find and call the methods of all servers."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.test_mock_cluster import mock_cluster

PUBLIC = ("stageline.v1.Inference", "stageline.v1.Cluster", "stageline.v1.TelemetryService")
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


def listed(address: str) -> dict[str, list[str]]:
    """The methods of every service that a server describes."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        return {
            name: [method.full_name for method in pool.FindServiceByName(name).methods]
            for name in database.get_services()
        }


def model_name(address: str) -> str:
    """Call Inference/GetModel with messages that the server described."""
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("stageline.v1.Inference").methods_by_name["GetModel"]
        call = channel.unary_unary(
            "/stageline.v1.Inference/GetModel",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        name: str = call(GetMessageClass(method.input_type)(), timeout=DEADLINE_S).name
        return name


async def code_of(channel: grpc.aio.Channel, name: str) -> grpc.StatusCode:
    """The status of a call with one message, which no method can read."""
    service, _, method = name.rpartition(".")
    return await channel.unary_stream(f"/{service}/{method}")(b"\xff", timeout=2.0).code()


def worker_address(cluster: Cluster) -> str:
    return cluster.workers["w0"].worker.listen_address


async def test_every_listed_method_is_served() -> None:
    async with mock_cluster(1) as cluster:
        assert await asyncio.to_thread(model_name, cluster.address) == "mock"
        for address, services in (
            (cluster.address, PUBLIC),
            (worker_address(cluster), ("stageline.internal.v1.StageService",)),
        ):
            found = await asyncio.to_thread(listed, address)
            assert {*services, "grpc.health.v1.Health", REFLECTION} <= found.keys()
            async with grpc.aio.insecure_channel(address) as channel:
                codes = await asyncio.gather(
                    *(code_of(channel, name) for methods in found.values() for name in methods)
                )
                assert grpc.StatusCode.UNIMPLEMENTED not in codes
                assert await code_of(channel, f"{services[0]}.Nothing") is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_can_be_turned_off() -> None:
    async with mock_cluster(1, reflection=False) as cluster:
        for address in (cluster.address, worker_address(cluster)):
            with pytest.raises(grpc.RpcError) as caught:
                await asyncio.to_thread(listed, address)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
