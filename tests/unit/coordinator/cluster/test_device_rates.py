"""Rates in a hello decide on the shares of a plan, and stay when a worker rejoins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoint import DType
from coordinator.cluster.membership import Members
from coordinator.cluster.messages import decode_hello
from coordinator.cluster.plan_choice import PlanChoice
from coordinator.planner.plan import DeviceKind
from coordinator.planner.planner import make_plan
from coordinator.recovery.policy import DEFAULT_POLICY
from stageline_rpc.internal.v1 import join_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.unit.coordinator.cluster.cluster_driver import identity_of
from tests.unit.coordinator.planner.small_models import GIB, USUAL_STEPS, llama_8b
from wire.channels import PROTOCOL_VERSION
from wire.device_rates import DeviceRates, encode_rates
from wire.errors import InvalidRequest
from wire.gpu import Gpu

H100, A100 = DeviceRates.parse("3350:800"), DeviceRates.parse("2000:312")
CHOICE = PlanChoice(
    2,
    lambda workers: make_plan(llama_8b(), DType.BF16, workers, limits=USUAL_STEPS, block_size=16),
    DEFAULT_POLICY,
)


def joined(members: Members, name: str, rates: DeviceRates | None) -> None:
    members.add(replace(identity_of(name, memory_bytes=80 * GIB), rates=rates))


def layers(members: Members) -> list[int]:
    return [stage.num_layers for stage in CHOICE.best(members, may_shrink=False).stages]


def test_a_worker_that_rejoins_with_similar_rates_changes_no_share() -> None:
    members = Members(DEFAULT_POLICY)
    joined(members, "a", H100)
    joined(members, "b", A100)
    assert (shares := layers(members)) == [22, 10]
    faster = DeviceRates(bytes_per_s=1.14 * A100.bytes_per_s, operations_per_s=A100.operations_per_s)
    joined(members, "b", faster)
    assert layers(members) == shares
    joined(members, "b", H100)
    assert layers(members) == [17, 15]
    joined(members, "b", None)
    assert layers(members) == [17, 15]


def hello() -> join_pb2.WorkerHello:
    return join_pb2.WorkerHello(
        protocol_version=PROTOCOL_VERSION, name="a", incarnation=bytes(16), address="a:1", device="cuda:0"
    )


def test_a_hello_has_rates_and_the_kind_of_device() -> None:
    message = hello()
    identity = decode_hello(join_pb2.JoinRequest(hello=message))
    assert (identity.rates, identity.device_kind) == (None, DeviceKind.HOST)
    message.rates.CopyFrom(encode_rates(H100))
    message.gpu.CopyFrom(cluster_pb2.Gpu(model="NVIDIA H100"))
    identity = decode_hello(join_pb2.JoinRequest(hello=message))
    assert (identity.rates, identity.device_kind) == (H100, DeviceKind.GPU)
    assert identity.gpu == Gpu(model="NVIDIA H100", uuid="", compute_capability="", memory_bytes=0, driver="")
    message.reads_pages_in_place = True
    assert decode_hello(join_pb2.JoinRequest(hello=message)).device_kind is DeviceKind.GPU_IN_PLACE
    assert identity.host_memory_bytes == 0
    message.host_memory_bytes = 5
    assert decode_hello(join_pb2.JoinRequest(hello=message)).host_memory_bytes == 5


def test_impossible_rates_are_refused() -> None:
    message = hello()
    message.rates.CopyFrom(cluster_pb2.DeviceRates(bytes_per_second=1))
    with pytest.raises(InvalidRequest, match="worker a: rates are 1 bytes and 0 operations"):
        decode_hello(join_pb2.JoinRequest(hello=message))
