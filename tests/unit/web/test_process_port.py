"""Weights are for workers and coordinators of the cluster, by their certificates."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.identity import Role
from tests.issued import Certificates
from web.connection_limits import FOR_WEIGHTS
from web.process_port import ProcessPort
from weights.errors import SourceRefused
from weights.peers import PeerConnections
from weights.serving import HeldRegistry, WeightsApplication
from wire.addresses import Address, parse_address
from wire.authorization import ROLES_OF_PATH
from wire.peer_secrets import RefusedPeers
from wire.transport import client_transport


@contextmanager
def guarded(certificates: Certificates, role: Role = Role.WORKER) -> Iterator[tuple[str, list[None]]]:
    """The weights of a process with a certificate of `role`; yields HOST:PORT, and its refusals so far."""
    transport = client_transport(certificates.of("server", role))
    refusals: list[None] = []
    refused = RefusedPeers(time.monotonic, lambda: refusals.append(None))
    application = WeightsApplication(HeldRegistry(), lambda fingerprint: [])
    port = ProcessPort(
        application,
        Address("127.0.0.1", 0),
        name="weights",
        limits=FOR_WEIGHTS,
        transport=transport,
        deny_list=certificates.deny_list,
        refused=refused,
    )
    port.start()
    try:
        yield str(port.address), refusals
    finally:
        application.close()
        port.stop()


def ask(address: str, ca: Path, own: Path | None, path: str = "/weights/model") -> tuple[int, str]:
    """Status, and the reason of a refusal."""
    context = ssl.create_default_context(cafile=str(ca / CA_FILE))
    if own is not None:
        context.load_cert_chain(own / CERTIFICATE_FILE, own / KEY_FILE)
    where = parse_address(address)
    connection = http.client.HTTPSConnection(where.host, where.port, timeout=10, context=context)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read()).get("reason", "")
    finally:
        connection.close()


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def test_each_role_is_admitted_as_the_table_says(certificates: Certificates) -> None:
    ca = certificates.of("server", Role.WORKER)
    with guarded(certificates) as (address, refusals):
        for role in Role:
            allowed = role in ROLES_OF_PATH["/weights"]
            found = ask(address, ca, certificates.of("caller", role))
            assert found == ((200, "") if allowed else (403, "ACCESS_DENIED")), role
        assert len(refusals) == 3, "gateway, client and operator"
        worker = certificates.of("caller", Role.WORKER)
        assert ask(address, ca, worker, "/other")[0] == 403, "a path that is not in the table"


def test_callers_without_a_certificate_of_the_cluster_are_refused(certificates: Certificates) -> None:
    ca = certificates.of("server", Role.WORKER)
    with guarded(certificates) as (address, _):
        assert ask(address, ca, None) == (401, "CERTIFICATE_REFUSED")
        foreign = certificates.of("caller", Role.WORKER, cluster="other")
        assert ask(address, ca, foreign) == (401, "CERTIFICATE_REFUSED")
        certificates.deny_list.write_text("worker/caller\n")
        assert ask(address, ca, certificates.of("caller", Role.WORKER)) == (401, "CERTIFICATE_REFUSED")


def test_weights_are_taken_from_workers_and_coordinators_only(certificates: Certificates) -> None:
    own = client_transport(certificates.of("caller", Role.WORKER))
    with closing(PeerConnections("model", own.client_context())) as connections:
        with guarded(certificates, Role.COORDINATOR) as (address, _):
            assert connections.ask_tracker(address) == []
        with (
            guarded(certificates, Role.GATEWAY) as (address, _),
            pytest.raises(SourceRefused, match="has no certificate of a worker or coordinator"),
        ):
            connections.ask_tracker(address)
