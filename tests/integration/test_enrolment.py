"""Workers with a join token: they get a certificate, join with it, and renew it; all others are refused."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from httpx2 import AsyncClient, Response

import stage_worker.enrolment
from certificates.authority import hosts_of, make_authority, new_key
from certificates.files import UnusableTlsFiles, read_tls_material, write_authority
from certificates.identity import Identity, Role
from certificates.join_tokens import NEW_TOKEN, JoinToken, JoinTokenStore
from certificates.requests import make_request
from coordinator.enrolment.server import MAX_BODY_BYTES, MAX_TRIES
from stage_worker.config import WorkerConfig
from stage_worker.enrolment import Renewal, enrolled
from stage_worker.server import Worker
from tests.faults.byte_proxy import ByteProxy
from tests.integration.calls import until
from tests.integration.cluster import Cluster, RunningWorker
from tests.integration.test_mock_cluster import mock_cluster
from tests.issued import LIFE, Certificates
from tests.ports import unused_address
from wire.errors import CertificateRefused
from wire.transport import TransportSettings
from wire.user_files import write_secret


class Enrolment:
    """A coordinator that signs certificates, and a client of its own."""

    def __init__(self, folder: Path) -> None:
        self.certificates = Certificates(folder / "tls")
        self.directory, self.audit, self.state = folder / "ca", folder / "audit.jsonl", folder / "state"
        write_authority(self.directory, self.certificates.authority)
        self.tokens = JoinTokenStore(self.directory / "tokens.json")
        self.token_file = folder / "secrets" / "join.token"

    def cluster(self) -> Cluster:
        return mock_cluster(
            1,
            certificates=self.certificates,
            num_workers=0,
            waits=False,
            enrolment=self.directory,
            audit_log=self.audit,
        )

    def token(self, *, uses: int = 1, life: timedelta = LIFE) -> JoinToken:
        sha256 = read_sha256(self.certificates)
        token = self.tokens.create(sha256, Role.WORKER, life=life, uses=uses)
        write_secret(self.token_file, token.text)
        return token

    def worker(self, cluster: Cluster, name: str = "w0") -> WorkerConfig:
        assert cluster.server.enrolment is not None
        config = cluster.worker_config(name)
        return replace(
            config,
            transport=TransportSettings(),
            join_token_file=self.token_file,
            enroll=str(cluster.server.enrolment.address),
            state_directory=self.state,
        )

    def records(self, action: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.audit.read_text().splitlines()]
        return [record for record in found if record["action"] == action]

    def http(self, cluster: Cluster, directory: Path | None = None) -> AsyncClient:
        context = ssl.create_default_context(
            cafile=self.certificates.of("coordinator", Role.COORDINATOR) / "ca.crt"
        )
        if directory is not None:
            context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
        assert cluster.server.enrolment is not None
        return AsyncClient(base_url=f"https://{cluster.server.enrolment.address}", verify=context)


def read_sha256(certificates: Certificates) -> str:
    from cryptography.hazmat.primitives import hashes

    return certificates.authority.certificate.fingerprint(hashes.SHA256()).hex()


@pytest.fixture
def enrolment(tmp_path: Path) -> Enrolment:
    (tmp_path / "tls").mkdir()
    return Enrolment(tmp_path)


def csr(name: str = "w0", *hosts: str) -> str:
    return make_request(name, hosts, new_key()).decode()


async def post(http: AsyncClient, path: str, **fields: str) -> tuple[int, str, str]:
    answer: Response = await http.post(path, json=fields)
    body = answer.json()
    return answer.status_code, body.get("reason", ""), body.get("error", "")


async def test_a_worker_enrols_joins_and_starts_again_without_its_token(enrolment: Enrolment) -> None:
    token = enrolment.token()
    async with enrolment.cluster() as cluster:
        config = await enrolled(enrolment.worker(cluster))
        material = read_tls_material(enrolment.state / "certificates" / "w0")
        assert material.identity == Identity(cluster="default", role=Role.WORKER, name="w0")
        assert hosts_of(material.leaf) == ["127.0.0.1"]
        assert 0.99 < material.life_left(datetime.now(UTC)) <= 1
        worker = Worker(config)
        await worker.start()
        cluster.workers["w0"] = RunningWorker(worker, None)
        await cluster.wait_status(lambda status: [known.name for known in status.workers] == ["w0"])
        (record,) = enrolment.records("certificate.enrol")
        assert (record["who"], record["token"]) == (material.identity.uri, token.token_id)
        enrolment.token_file.unlink()
        assert await enrolled(enrolment.worker(cluster)) == config
    assert token.secret not in enrolment.audit.read_text()


async def test_a_certificate_is_renewed_and_a_failure_keeps_the_former(
    enrolment: Enrolment, caplog: pytest.LogCaptureFixture
) -> None:
    enrolment.token()
    async with enrolment.cluster() as cluster:
        config = await enrolled(enrolment.worker(cluster))
        directory = config.transport.tls_directory
        assert directory is not None
        first = read_tls_material(directory)
        late = datetime.now(UTC) + timedelta(hours=16, minutes=5)
        denied = enrolment.certificates.deny_list
        denied.write_text("worker/w0\n")
        with patch.object(stage_worker.enrolment, "RETRY_S", (0.01, 0.02)):
            renewing = asyncio.create_task(Renewal(config.enroll_address, directory, lambda: late).run())
            try:
                await until(lambda: "could not be renewed" in caplog.text)
                assert read_tls_material(directory) == first
                denied.write_text("")
                await until(lambda: current(directory, first) != first.leaf.serial_number)
            finally:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
        second = read_tls_material(directory)
        assert (second.identity, hosts_of(second.leaf)) == (first.identity, hosts_of(first.leaf))
        assert second.key_pem != first.key_pem
    assert enrolment.records("certificate.renew")[0]["who"] == first.identity.uri


def current(directory: Path, first: Any) -> int:
    """Serial number of a directory's certificate; the first one's while its files change."""
    try:
        return read_tls_material(directory).leaf.serial_number
    except UnusableTlsFiles:
        return int(first.leaf.serial_number)


@pytest.mark.parametrize("elapsed_h", [0, 15])
def test_a_renewal_waits_for_two_thirds_of_the_life(tmp_path: Path, elapsed_h: int) -> None:
    certificates = Certificates(tmp_path)
    directory = certificates.of("w0", Role.WORKER)
    leaf = read_tls_material(directory).leaf
    life = leaf.not_valid_after_utc - leaf.not_valid_before_utc
    now = leaf.not_valid_before_utc + life * elapsed_h / 24
    left_s = (life * (16 - elapsed_h) / 24).total_seconds()
    waits = {Renewal("h:1", directory, lambda: now)._wait_s() for _ in range(20)}
    assert len(waits) > 1
    assert all(0.9 * left_s - 1 <= wait_s <= left_s + 1 for wait_s in waits)


async def test_tokens_that_do_not_count_are_refused(enrolment: Enrolment) -> None:
    token = enrolment.token()
    ended = enrolment.token(life=timedelta(0))
    unknown = (403, "JOIN_TOKEN_REFUSED", f"the join token is unknown: {NEW_TOKEN}")
    async with enrolment.cluster() as cluster, enrolment.http(cluster) as http:
        for token_id, secret in (("0" * 12, token.secret), (token.token_id, ended.secret)):
            found = await post(http, "/enroll", token_id=token_id, secret=secret, csr=csr())
            assert found == unknown
        fields = {"token_id": ended.token_id, "secret": ended.secret, "csr": csr()}
        status, reason, text = await post(http, "/enroll", **fields)
        assert (status, reason) == (403, "JOIN_TOKEN_REFUSED")
        assert text.startswith(f"join token {ended.token_id} ended at ")
        fields = {"token_id": token.token_id, "secret": token.secret}
        assert (await post(http, "/enroll", **fields, csr=csr()))[0] == 200
        status, _, text = await post(http, "/enroll", **fields, csr=csr("w1"))
        assert (status, text) == (
            403,
            f"join token {token.token_id} was used 1 times, the limit: {NEW_TOKEN}",
        )
        denials = enrolment.records("access.denied")
        assert [record["problem"] for record in denials][:2] == [unknown[2]] * 2
        assert {record["call"] for record in denials} == {"POST /enroll"}
        assert cluster.epoch == 0


async def test_applicants_get_neither_hosts_nor_names_of_others(enrolment: Enrolment) -> None:
    coordinator = Identity(cluster="default", role=Role.COORDINATOR, name="coordinator")
    directory = enrolment.certificates.of("coordinator", Role.COORDINATOR)
    enrolment.certificates.write(directory, coordinator, hosts=("127.0.0.1", "head.lan"))
    token = enrolment.token(uses=9)
    secret = {"token_id": token.token_id, "secret": token.secret}
    async with enrolment.cluster() as cluster, enrolment.http(cluster) as http:
        found = await post(http, "/enroll", **secret, csr=csr("w0", "HEAD.lan"))
        assert found == (403, "ACCESS_DENIED", "host HEAD.lan is the coordinator's")
        status, reason, _ = await post(http, "/enroll", **secret, csr=csr("a/../operator/me"))
        assert (status, reason) == (400, "INVALID_REQUEST")
        assert (await post(http, "/renew", csr=csr()))[:2] == (401, "CERTIFICATE_REFUSED")
        assert enrolment.tokens.records()[0].uses_left == 9
        for name, role, asked in (("w9", Role.WORKER, "w0"), ("me", Role.OPERATOR, "me")):
            async with enrolment.http(cluster, enrolment.certificates.of(name, role)) as known:
                assert (await post(known, "/renew", csr=csr(asked)))[:2] == (403, "ACCESS_DENIED")
        other = enrolment.certificates.of("w0", Role.WORKER, cluster="other")
        async with enrolment.http(cluster, other) as stranger:
            assert (await post(stranger, "/renew", csr=csr()))[:2] == (401, "CERTIFICATE_REFUSED")
        assert enrolment.records("certificate.renew") == []


async def test_requests_are_limited_in_size_and_number(enrolment: Enrolment) -> None:
    async with enrolment.cluster() as cluster, enrolment.http(cluster) as http:
        answer = await http.post("/enroll", content=b"x" * (MAX_BODY_BYTES + 1))
        assert answer.json()["error"] == f"the body exceeds the limit of {MAX_BODY_BYTES} bytes"
        no_text = b'{"csr": "\\udcff", "secret": "", "token_id": ""}'
        for content in (b"", b"[" * 9000, b'{"csr": 1}', b"[]", no_text):
            assert (await http.post("/enroll", content=content)).status_code == 400
        statuses = [(await http.get("/ca")).status_code for _ in range(MAX_TRIES)]
        assert statuses == [200] * (MAX_TRIES - 6) + [429] * 6


async def test_a_token_is_not_sent_to_another_authority_or_to_a_worker(enrolment: Enrolment) -> None:
    token = enrolment.token()
    foreign = JoinToken("0" * 64, token.token_id, token.secret)
    async with enrolment.cluster() as cluster:
        config = enrolment.worker(cluster)
        for change, problem in (
            (lambda: write_secret(enrolment.token_file, foreign.text), "has another authority"),
            (lambda: pose(enrolment, token), "has no certificate of a coordinator"),
        ):
            change()
            with pytest.raises(CertificateRefused, match=problem):
                await enrolled(config)
        assert enrolment.tokens.records()[0].uses_left == 1
        assert not (enrolment.state / "certificates").exists()


def pose(enrolment: Enrolment, token: JoinToken) -> None:
    """Let a worker's certificate answer in the coordinator's place."""
    write_secret(enrolment.token_file, token.text)
    directory = enrolment.certificates.of("coordinator", Role.COORDINATOR)
    enrolment.certificates.write(directory, Identity(cluster="default", role=Role.WORKER, name="w9"))


async def test_a_worker_waits_for_the_coordinator_and_logs_it_once(
    enrolment: Enrolment, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stage_worker.enrolment")
    enrolment.token()
    async with enrolment.cluster() as cluster:
        config = enrolment.worker(cluster)
        async with ByteProxy(unused_address()) as proxy:
            waiting = asyncio.create_task(enrolled(replace(config, enroll=proxy.address)))
            await until(lambda: proxy.num_connections >= 3)
            proxy.target = config.enroll_address
            assert (await waiting).transport.tls_directory is not None
    waits = [text for text in caplog.messages if text.startswith("waiting for the coordinator: cannot enrol")]
    assert len(waits) == 1


async def test_a_token_that_others_can_read_is_refused(enrolment: Enrolment) -> None:
    enrolment.token()
    async with enrolment.cluster() as cluster:
        enrolment.token_file.chmod(0o644)
        with pytest.raises(OSError, match="has mode 0644"):
            await enrolled(enrolment.worker(cluster))


def test_enrolment_needs_certificates_authority_and_tokens(enrolment: Enrolment, tmp_path: Path) -> None:
    other = make_authority("other", life=LIFE)
    write_authority(tmp_path / "other", other)
    (tmp_path / "other" / "ca.key").write_bytes((enrolment.directory / "ca.key").read_bytes())
    enrolment.directory = tmp_path / "other"
    with pytest.raises(OSError, match=r"other/ca\.key is not the key of .*other/ca\.crt"):
        enrolment.cluster()
    with pytest.raises(ValueError, match="--enroll-listen needs --tls-dir"):
        mock_cluster(1, enrolment=tmp_path)
