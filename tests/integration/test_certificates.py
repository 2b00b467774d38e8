"""A cluster with certificates: who gets in, who is refused, and certificates that change under load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from datetime import UTC, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from rich.console import Console

from certificates import CERTIFICATE_FILE, KEY_FILE
from certificates.authority import issue, make_authority, new_key
from certificates.files import certificate_pem, key_pem, read_certificates, replace
from certificates.identity import Identity, Role
from coordinator.server import SERVICES
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.config import WorkerConfig
from stage_worker.server import Worker
from stageline.cli.tables import status_view
from stageline.client.client import Client
from stageline.client.errors import StagelineError, StatusDetails
from stageline_rpc.internal.v1 import (
    deliver_pb2,
    deliver_pb2_grpc,
    doctor_pb2,
    forward_pb2,
    forward_pb2_grpc,
    join_pb2,
    join_pb2_grpc,
)
from stageline_rpc.v1 import cluster_pb2, inference_pb2, inference_pb2_grpc
from tests.integration.calls import until
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.request_cases import mixed_cases
from tests.integration.test_mock_cluster import check, has_tokens, mock_cluster
from tests.issued import LIFE, Certificates, careless_channel
from wire.authorization import ROLES_OF_METHOD
from wire.channels import PROTOCOL_VERSION, StartedWrite, finish_write
from wire.transport import PLAIN, TransportSettings

Code = grpc.StatusCode
Outcome = tuple[grpc.StatusCode, str, str]
"""Status code, reason and text."""
ON_WORKERS = "/stageline.internal.v1.StageService/"
HELLO = forward_pb2.HopHello(secret=bytes(32))


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def outcome(begin: Callable[[], Any], *messages: object) -> Outcome:
    """Send these messages, and read one: an empty reason and text for a call that is permitted."""
    while True:
        found = await _outcome(begin(), messages)
        if found != (Code.INTERNAL, "", "Internal error from Core"):
            return found
        # A write met the end of the call, and gRPC replaced the call's status.


async def _outcome(call: Any, messages: Iterable[object]) -> Outcome:
    try:
        for message in messages:
            await finish_write(call, StartedWrite(call.write(message)))
        if await call.read() is not grpc.aio.EOF:
            return Code.OK, "", ""
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        return await call.code(), "", await call.details()
    except grpc.aio.AioRpcError as error:
        return error.code(), StatusDetails.of(error).reason, error.details() or ""
    finally:
        call.cancel()


async def model_outcome(directory: Path, address: str) -> Outcome:
    """What a caller with this certificate gets for GetModel, which is open to every role."""
    async with careless_channel(directory, address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            await stub.GetModel(inference_pb2.GetModelRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            return error.code(), StatusDetails.of(error).reason, error.details() or ""
    return Code.OK, "", ""


def hello_of(name: str) -> join_pb2.JoinRequest:
    hello = join_pb2.WorkerHello(
        protocol_version=PROTOCOL_VERSION,
        name=name,
        incarnation=bytes(16),
        address="127.0.0.1:1",
        is_mock=True,
    )
    return join_pb2.JoinRequest(hello=hello)


# Serving


async def test_a_cluster_serves_with_certificates_at_all_connections(certificates: Certificates) -> None:
    async with mock_cluster(3, certificates=certificates) as cluster:
        check(await cluster.generate_all(mixed_cases(16, max_tokens=20)))
        for address in (cluster.address, cluster.workers["w1"].worker.listen_address):
            async with PLAIN.channel(address) as channel:
                call = inference_pb2_grpc.InferenceStub(channel).GetModel(inference_pb2.GetModelRequest())
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
            assert refused.value.code() is Code.UNAVAILABLE


async def test_a_gateway_sees_counts_of_the_cluster_and_no_processes(certificates: Certificates) -> None:
    async with mock_cluster(2, certificates=certificates) as cluster:
        check(await cluster.generate_all(mixed_cases(3)))
        directory = certificates.of("g", Role.GATEWAY)
        async with Client(cluster.address, tls_dir=directory) as gateway:
            status = await gateway.status()
        assert (status.requests.finished, status.num_stages, len(status.workers)) == (3, 2, 0)
        text = str(status)
        assert "127.0.0.1" not in text and "w0" not in text
        assert len((await cluster.client.status()).workers) == 2


async def test_the_end_of_every_certificate_is_in_status_and_metrics(certificates: Certificates) -> None:
    worker = certificates.of("w0", Role.WORKER)
    identity = Identity(cluster="default", role=Role.WORKER, name="w0")
    certificates.write(worker, identity, made_in=-0.9 * LIFE)
    async with mock_cluster(1, certificates=certificates) as cluster:
        status = await cluster.wait_status(lambda status: status.workers[0].HasField("certificate"))
        (found,) = status.workers
        ends = read_certificates(worker / "tls.crt")[0].not_valid_after_utc
        assert (found.certificate.expires_at.ToDatetime(UTC), found.certificate.is_ending) == (ends, True)
        assert status.HasField("certificate")
        assert not status.certificate.is_ending
        console = Console(width=200)
        with console.capture() as captured:
            console.print(status_view(status))
        lines = captured.get()
        assert f"The certificate of worker w0 ends {ends:%Y-%m-%d %H:%M} UTC: renew it" in lines
        assert "certificate of the coordinator" not in lines
        text, _ = await cluster.server.metrics.metrics_text("text/plain")
        assert b"stageline_certificate_time_left_seconds" in text


async def test_an_operator_drains_without_the_token(certificates: Certificates) -> None:
    async with mock_cluster(2, certificates=certificates) as cluster:
        await cluster.client.drain("w0")
        await cluster.wait_status(lambda status: [worker.name for worker in status.workers] == ["w1"])


async def test_a_worker_drains_itself_only(certificates: Certificates) -> None:
    async with mock_cluster(2, certificates=certificates) as cluster:
        async with Client(cluster.address, tls_dir=certificates.of("w0", Role.WORKER)) as worker:
            with pytest.raises(StagelineError, match="worker w0 may not drain 'w1'") as refused:
                await worker.drain("w1")
            assert refused.value.reason == "ACCESS_DENIED"
            await worker.drain("w0")
        status = await cluster.wait_status(lambda status: len(status.workers) == 1)
        assert status.workers[0].name == "w1"


async def test_a_coordinator_whose_certificate_names_another_host_is_not_trusted(
    certificates: Certificates,
) -> None:
    directory = certificates.of("coordinator", Role.COORDINATOR)
    identity = Identity(cluster="default", role=Role.COORDINATOR, name="coordinator")
    certificates.write(directory, identity, hosts=("other.example",))
    async with mock_cluster(1, certificates=certificates, num_workers=0, waits=False) as cluster:
        operator = certificates.of("operator", Role.OPERATOR)
        assert (await model_outcome(operator, cluster.address))[0] is Code.UNAVAILABLE


# Who may call what


def served_methods() -> list[str]:
    """Every method of a coordinator, a worker or a doctor."""
    files = (*(service.DESCRIPTOR for service in (*SERVICES, forward_pb2, doctor_pb2)),)
    services = [service for file in files for service in file.services_by_name.values()]
    found = [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]
    versions = ("v1", "v1alpha")
    reflection = [f"/grpc.reflection.{name}.ServerReflection/ServerReflectionInfo" for name in versions]
    return sorted({*found, *reflection})


def test_the_table_has_every_method_and_no_other() -> None:
    assert sorted(ROLES_OF_METHOD) == served_methods()


@pytest.mark.parametrize("role", Role)
async def test_every_method_is_open_to_its_roles_alone(certificates: Certificates, role: Role) -> None:
    directory = certificates.of("someone", role)
    async with mock_cluster(1, certificates=certificates) as cluster:
        worker = cluster.workers["w0"].worker.listen_address
        for method in served_methods():
            address = worker if method.startswith(ON_WORKERS) else cluster.address
            async with careless_channel(directory, address) as channel:
                begin = partial(channel.unary_stream(method), b"\xff", timeout=DEADLINE_S)
                found = await outcome(begin)
            denied = f"{role.value} someone may not call {method.rpartition('/')[2]}"
            permitted = " or ".join(sorted(other.value for other in ROLES_OF_METHOD[method]))
            advice = f": use a certificate of role {permitted}"
            is_denied = found == (Code.PERMISSION_DENIED, "ACCESS_DENIED", f"{denied}{advice}")
            assert is_denied is (role not in ROLES_OF_METHOD[method]), (method, found)
        assert cluster.epoch == 1


async def test_a_worker_joins_under_its_own_name_only(certificates: Certificates) -> None:
    directory = certificates.of("w7", Role.WORKER)
    async with (
        mock_cluster(1, certificates=certificates, num_workers=0, waits=False) as cluster,
        careless_channel(directory, cluster.address) as channel,
    ):
        stub = join_pb2_grpc.MembershipServiceStub(channel)
        denied = "worker w7 may not join as 'w0': start it with --name w7"
        found = await outcome(partial(stub.Join, timeout=DEADLINE_S), hello_of("w0"))
        assert found == (Code.PERMISSION_DENIED, "ACCESS_DENIED", denied)
        assert await outcome(partial(stub.Join, timeout=DEADLINE_S), hello_of("w7")) == (Code.OK, "", "")
    transport = TransportSettings(tls_directory=directory)
    with pytest.raises(ValueError, match="--name is w0, but the certificate in --tls-dir is of worker w7"):
        Worker(WorkerConfig(name="w0", mock=MockSpec(), transport=transport))
    transport = TransportSettings(tls_directory=certificates.of("me", Role.CLIENT))
    with pytest.raises(OSError, match=r"tls\.crt is of client me, must be of a worker"):
        Worker(WorkerConfig(mock=MockSpec(), transport=transport))


async def test_frames_and_results_are_taken_from_the_worker_that_the_epoch_names(
    certificates: Certificates,
) -> None:
    async with mock_cluster(3, certificates=certificates) as cluster:
        hop = forward_pb2.HopHello(epoch=cluster.epoch, secret=bytes(32))
        last = cluster.workers["w2"].worker.listen_address
        async with careless_channel(certificates.of("w0", Role.WORKER), last) as channel:
            forward = forward_pb2_grpc.StageServiceStub(channel).Forward
            found = await outcome(partial(forward, timeout=DEADLINE_S), forward_pb2.ForwardRequest(hello=hop))
            denied = "worker w0 may not send here: the epoch names worker w1"
            assert found == (Code.PERMISSION_DENIED, "ACCESS_DENIED", denied)
        async with careless_channel(certificates.of("w1", Role.WORKER), cluster.address) as channel:
            deliver = deliver_pb2_grpc.StepResultsServiceStub(channel).Deliver
            found = await outcome(partial(deliver, timeout=DEADLINE_S), deliver_pb2.DeliverRequest(hello=hop))
            denied = "worker w1 may not send here: the epoch names worker w2"
            assert found == (Code.PERMISSION_DENIED, "ACCESS_DENIED", denied)
        check(await cluster.generate_all(mixed_cases(4, max_tokens=8)))
        assert cluster.epoch == 1


# Certificates that are refused


async def check_refused(cluster: Cluster, directory: Path, expected: Outcome | None) -> None:
    """Neither a call nor a join passes, and the epoch goes on; None: refused in the handshake."""
    found = await model_outcome(directory, cluster.address)
    assert (found[0] is Code.UNAVAILABLE and not found[1]) if expected is None else found == expected
    async with careless_channel(directory, cluster.address) as channel:
        join = join_pb2_grpc.MembershipServiceStub(channel).Join
        joined = await outcome(partial(join, timeout=DEADLINE_S), hello_of("x"))
    assert joined[0] is found[0]
    assert (cluster.epoch, len((await cluster.client.status()).workers)) == (1, 1)


WORKER = Identity(cluster="default", role=Role.WORKER, name="x")


@pytest.mark.parametrize("made_in", [-2 * LIFE, timedelta(minutes=10)], ids=["ended", "not yet valid"])
async def test_a_certificate_out_of_its_time_is_refused(
    certificates: Certificates, made_in: timedelta
) -> None:
    async with mock_cluster(1, certificates=certificates) as cluster:
        directory = certificates.of("x", Role.WORKER)
        assert await model_outcome(directory, cluster.address) == (Code.OK, "", "")
        certificates.write(directory, WORKER, made_in=made_in)
        await check_refused(cluster, directory, None)


async def test_a_certificate_of_another_authority_is_refused(certificates: Certificates) -> None:
    async with mock_cluster(1, certificates=certificates) as cluster:
        directory = certificates.of("x", Role.WORKER)
        certificates.write(directory, WORKER, authority=make_authority("another", life=LIFE))
        await check_refused(cluster, directory, None)


async def test_a_certificate_of_another_cluster_is_refused(certificates: Certificates) -> None:
    async with mock_cluster(1, certificates=certificates) as cluster:
        directory = certificates.of("x", Role.WORKER, cluster="other")
        uri = "spiffe://stageline.internal/stageline/other/worker/x"
        text = f"{uri} is of another cluster: this is default of stageline.internal"
        await check_refused(cluster, directory, (Code.UNAUTHENTICATED, "CERTIFICATE_REFUSED", text))


@pytest.mark.parametrize("num_uris", [0, 2])
async def test_a_certificate_with_no_identity_or_several_is_refused_and_audited(
    certificates: Certificates, num_uris: int, tmp_path: Path
) -> None:
    audit = tmp_path / "audit.jsonl"
    async with mock_cluster(1, certificates=certificates, audit_log=audit) as cluster:
        directory = certificates.of("x", Role.WORKER)
        identities = [
            Identity(cluster="default", role=role, name="x") for role in (Role.WORKER, Role.OPERATOR)
        ]
        write_uris(certificates, directory, [identity.uri for identity in identities[:num_uris]])
        text = f"the certificate has {num_uris} URIs, must be 1 SPIFFE id"
        await check_refused(cluster, directory, (Code.UNAUTHENTICATED, "CERTIFICATE_REFUSED", text))
    # A thread writes the records, and has written all when the coordinator has ended.
    records = [json.loads(line) for line in audit.read_text().splitlines()]
    refused = [record for record in records if record["action"] == "access.denied"]
    assert [(record["problem"], record["outcome"]) for record in refused] == [(text, "refused")] * 2


def write_uris(certificates: Certificates, directory: Path, uris: list[str]) -> None:
    """Write a leaf with these URIs, which `issue` would not make."""
    key = new_key()
    leaf = issue(certificates.authority, WORKER, ("127.0.0.1",), key.public_key(), life=LIFE)
    builder = (
        x509.CertificateBuilder()
        .subject_name(leaf.subject)
        .issuer_name(leaf.issuer)
        .public_key(key.public_key())
        .serial_number(leaf.serial_number)
        .not_valid_before(leaf.not_valid_before_utc)
        .not_valid_after(leaf.not_valid_after_utc)
    )
    names = [x509.DNSName("localhost"), *map(x509.UniformResourceIdentifier, uris)]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    made = builder.sign(certificates.authority.key, hashes.SHA256())
    replace(directory, {KEY_FILE: key_pem(key), CERTIFICATE_FILE: certificate_pem(made)})


async def test_denied_names_and_serials_are_refused_as_soon_as_they_are_listed(
    certificates: Certificates,
) -> None:
    async with mock_cluster(1, certificates=certificates) as cluster:
        directory = certificates.of("x", Role.WORKER)
        serial = read_certificates(directory / "tls.crt")[0].serial_number
        text = "the certificate of worker x is on the deny list"
        for entry in ("worker/x  # stolen\n", f"# by number\nserial:{serial:X}\n"):
            certificates.deny_list.write_text("")
            assert await model_outcome(directory, cluster.address) == (Code.OK, "", "")
            certificates.deny_list.write_text(entry)
            await check_refused(cluster, directory, (Code.UNAUTHENTICATED, "CERTIFICATE_REFUSED", text))
            certificates.deny_list.write_text("nonsense\n")
            found = await model_outcome(directory, cluster.address)
            assert found[2] == text  # the entries before stay in force


# Certificates that change


@pytest.mark.full
async def test_leaves_and_authority_change_under_load_without_an_error(certificates: Certificates) -> None:
    """New leaves, then a second authority beside the first, leaves of it, and the first one removed."""
    roles = {"coordinator": Role.COORDINATOR, "w0": Role.WORKER, "w1": Role.WORKER, "operator": Role.OPERATOR}

    def rewrite() -> None:
        for name, role in roles.items():
            directory = certificates.of(name, role)
            certificates.write(directory, Identity(cluster="default", role=role, name=name))

    async with mock_cluster(2, certificates=certificates) as cluster:
        async with cluster.generating(mixed_cases(16, max_tokens=400)) as answers:
            await until(lambda: has_tokens(answers, 3))
            rewrite()
            await cluster.client.status()
            second = make_authority("second", life=LIFE)
            certificates.trusted = [certificates.authority, second]
            rewrite()
            await cluster.client.status()
            first, certificates.authority = certificates.authority, second
            rewrite()
            await cluster.client.status()
            certificates.trusted = [second]
            rewrite()
            async with Client(cluster.address, tls_dir=certificates.of("operator", Role.OPERATOR)) as client:
                assert (await client.status()).state == cluster_pb2.CLUSTER_STATE_SERVING
            stranger = certificates.of("stranger", Role.OPERATOR)
            certificates.write(
                stranger, Identity(cluster="default", role=Role.OPERATOR, name="stranger"), authority=first
            )
            assert (await model_outcome(stranger, cluster.address))[0] is Code.UNAVAILABLE
            await asyncio.sleep(0)
        check(answers)
        assert cluster.epoch == 1
        spare = "w2"
        await cluster.start_worker(spare)
        await cluster.wait_status(lambda status: len(status.workers) == 3)
