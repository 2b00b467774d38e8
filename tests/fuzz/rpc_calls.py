"""Surfaces of gRPC: every method of a coordinator and of a worker, with changed messages.

A case is the name of a method, a line break, and a JSON list of the hexadecimal messages that are sent.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from coordinator.server import SERVICES
from stageline_rpc.internal.v1 import deliver_pb2, forward_pb2, join_pb2
from stageline_rpc.v1 import inference_pb2
from tests.fuzz.background import Background, errors_logged
from tests.fuzz.harness import Broken, Opened, Surface
from tests.fuzz.hop_frames import RESULT
from tests.fuzz.protobuf import mutate_message
from tests.integration.cluster import Cluster
from tests.integration.test_mock_cluster import mock_cluster
from tests.otlp_spans import served
from wire.channels import CHANNEL_OPTIONS, PROTOCOL_VERSION
from wire.step_codec import encode_result

_FILES = (*(service.DESCRIPTOR for service in SERVICES), forward_pb2.DESCRIPTOR)
METHODS: Mapping[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in _FILES
    for service in file.services_by_name.values()
    for method in service.methods
}
PUBLIC = tuple(name for name in METHODS if name.startswith("/stageline.v1.") or "health" in name)
INTERNAL = tuple(name for name in METHODS if name not in PUBLIC)
_OPEN_S = 0.02
"""How long a stream that has neither ended nor answered is read."""
_REFUSED = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


def _bases(method: str) -> Sequence[Message]:
    """Messages of a stream that a caller would send."""
    kind = GetMessageClass(METHODS[method].input_type)
    return _BASES.get(method.rpartition("/")[2], [kind()])


def _generate() -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(max_tokens=2, cache_salt="s", client_state=b"x")
    request.token_ids.ids.extend([1, 2, 3])
    request.sampling.temperature, request.sampling.seed, request.sampling.logprobs = 0.5, 3, 2
    request.sampling.stop.append("a")
    return request


def _hello() -> join_pb2.JoinRequest:
    hello = join_pb2.WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        name="fuzz",
        incarnation=bytes(16),
        address="127.0.0.1:1",
        is_mock=True,
    )
    return join_pb2.JoinRequest(hello=hello)


_RESULT = deliver_pb2.DeliverRequest()
_RESULT.frame.result = encode_result(RESULT).SerializeToString()
_SUBMIT = inference_pb2.Submit(number=1, request=_generate(), credit=100, attach_secret="s" * 20)
_FAULT = join_pb2.StepFault(epoch=1, step_id=1, stage=0, kind=3, message="m")
_BASES: dict[str, Sequence[Message]] = {
    "Generate": [_generate()],
    "Serve": [inference_pb2.ServeRequest(submit=_SUBMIT), inference_pb2.ServeRequest(submit=_SUBMIT)],
    "Attach": [inference_pb2.AttachRequest(request_id="01890000-0000-7000-8000-000000000000")],
    "Cancel": [inference_pb2.CancelRequest(request_id="01890000-0000-7000-8000-000000000000")],
    "Tokenize": [inference_pb2.TokenizeRequest(text="a b")],
    "Join": [
        _hello(),
        join_pb2.JoinRequest(heartbeat=join_pb2.Heartbeat()),
        join_pb2.JoinRequest(fault=_FAULT),
    ],
    "Deliver": [_RESULT, _RESULT],
    "Forward": [forward_pb2.ForwardRequest(hello=forward_pb2.HopHello(epoch=1, secret=bytes(32)))],
}


def _export(method: str) -> Message | None:
    if "TraceService" in method:
        maker = served(
            request_id="01890000-0000-7000-8000-000000000000", trace_id=bytes(range(16)), begin_ns=10**9
        )
        return trace_service_pb2.ExportTraceServiceRequest(resource_spans=maker.spans)
    if "MetricsService" in method:
        request = metrics_service_pb2.ExportMetricsServiceRequest()
        attribute = request.resource_metrics.add().resource.attributes.add(key="service.instance.id")
        attribute.value.string_value = "w0"
        request.resource_metrics[0].scope_metrics.add().metrics.add(name="m").sum.data_points.add(as_int=3)
        return request
    return None


def _make(names: Sequence[str], random: Random) -> bytes:
    name = random.choice(names)
    export = _export(name)
    bases = [export] if export is not None else _bases(name)
    if not METHODS[name].client_streaming:
        bases = bases[:1]
    changed = random.randrange(len(bases))
    messages = [
        mutate_message(base, random) if index == changed else base.SerializeToString()
        for index, base in enumerate(bases)
    ]
    return f"{name}\n{json.dumps([message.hex() for message in messages])}".encode()


def make_public(random: Random) -> bytes:
    return _make(PUBLIC, random)


def make_internal(random: Random) -> bytes:
    return _make(INTERNAL, random)


@contextmanager
def opened_cluster() -> Iterator[Opened]:
    """A coordinator and a mock worker; a case must leave both able to serve."""
    background = Background()
    with errors_logged() as errors, background.entered(lambda: mock_cluster(1)) as cluster:

        def examine(data: bytes) -> str:
            name, _, listed = data.decode().partition("\n")
            messages = [bytes.fromhex(message) for message in json.loads(listed)]
            ended = background.run(_call(cluster, name, messages))
            errors.check()
            return ended

        def check() -> None:
            background.run(_check(cluster))
            errors.check()

        yield Opened(examine, check, (os.getpid(),))
    background.close()


async def _call(cluster: Cluster, name: str, messages: Sequence[bytes]) -> str:
    on_worker = "StageService" in name
    address = cluster.workers["w0"].worker.listen_address if on_worker else cluster.address
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        untyped: Any = channel
        call = untyped.stream_stream(name)(iter(messages))
        try:
            async with asyncio.timeout(None) as patience:
                while True:
                    patience.reschedule(asyncio.get_running_loop().time() + _OPEN_S)
                    if await call.read() is grpc.aio.EOF:
                        return "OK"
        except TimeoutError:
            call.cancel()
            return "open"
        except grpc.aio.AioRpcError as error:
            code, text = error.code(), error.details() or ""
    if text == "Internal error from Core":
        return "replaced by gRPC"
    if code in _REFUSED:
        raise Broken(f"{name.rpartition('/')[2]} ends with {code.name}: {text}")
    return code.name


async def _check(cluster: Cluster) -> None:
    (done,) = await cluster.client.complete([1, 2, 3], max_tokens=2)
    if len(done.token_ids) != 2:
        raise Broken(f"a valid request got {done.token_ids}")


SURFACES = (
    Surface(name="public-rpc", share=6, make=make_public, opened=opened_cluster),
    Surface(name="internal-rpc", share=6, make=make_internal, opened=opened_cluster),
)
