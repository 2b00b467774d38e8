"""The chart with real processes: kills, evictions, rollouts and new certificates fail no request."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from certificates.authority import make_authority
from certificates.files import certificate_pem
from stageline.cli import main
from tests.deploy.charts import CAPABILITIES, Objects, rendered
from tests.deploy.gateway_load import GatewayClient, GatewayLoad
from tests.deploy.node import Node
from tests.deploy.pod_engine import PodEngine
from tests.deploy.pods import Pod
from tests.issued import LIFE

pytestmark = [pytest.mark.deploy, pytest.mark.asyncio(loop_scope="module")]

CLUSTER = """\
name: stories
stages: 2
dtype: f32
drain-timeout: 600
timeouts: {recovery: 600}
coordinator: {flags: {max-step-tokens: 64, reattach-timeout: 600}}
gateways:
  - {name: api-0, flags: {coordinator-timeout: 600}}
  - {name: api-1, flags: {coordinator-timeout: 600}}
workers:
  - {name: cpu-0, memory: 200MiB, flags: {threads: 1}}
  - {name: cpu-1, memory: 200MiB, flags: {threads: 1}}
  - {name: cpu-2, memory: 200MiB, flags: {threads: 1}}
security:
  tls-dir: /etc/tls
  keys-file: /etc/keys.toml
  token-file: /etc/operator.token
  deny-list: /etc/denied
"""
PROMPTS = ("Once upon a time", "The cat sat", "One day a girl", "Tom had a red ball")
NUM_STREAMS = 4
OPERATOR = "spiffe://stageline.internal/stageline/stories/operator/me"
# Of everything that should happen soon: processes start slowly on a machine with much else to do.
TIMEOUT_S = 600.0


@dataclass
class Cluster:
    """The chart of CLUSTER as it runs."""

    engine: PodEngine
    client: GatewayClient
    chart: Path
    folder: Path

    def objects(self, *words: str) -> Objects:
        quick = "--set=probes.readinessPeriodSeconds=1,endpointRemoval=2,certificates.issuer.name=ca"
        return rendered(self.chart, quick, *words, capabilities=CAPABILITIES)

    def load(self) -> GatewayLoad:
        return GatewayLoad(self.client, PROMPTS, max_tokens=48)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("kubernetes")
    (folder / "cluster.yaml").write_text(CLUSTER)
    assert (
        main(["deploy", "render", "kubernetes", "-f", f"{folder}/cluster.yaml", "-o", f"{folder}/chart"]) == 0
    )
    authority = make_authority("authority of a cluster", life=LIFE)
    (folder / "ca.crt").write_bytes(certificate_pem(authority.certificate))
    (folder / "pods").mkdir()
    with Node(folder).running() as node:
        async with PodEngine(node, folder / "pods", authority).running() as engine:
            key = _write_secrets(engine, folder)
            client = GatewayClient(
                engine=engine,
                service="stories-api",
                port=7482,
                threads=node.threads,
                authorities=folder / "ca.crt",
                api_key=key,
            )
            cluster = Cluster(engine, client, folder / "chart", folder)
            try:
                await engine.apply(cluster.objects(), timeout_s=TIMEOUT_S)
            except TimeoutError:
                raise AssertionError(engine.report()) from None
            yield cluster


def _write_secrets(engine: PodEngine, folder: Path) -> str:
    """Secrets of the names and keys that the chart asks for; the API key."""
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert main(["keys", "create", "--keys-file", f"{folder}/keys.toml", "--tenant", "acme"]) == 0
    engine.secrets["stories-keys-file"] = {"keys.toml": (folder / "keys.toml").read_bytes()}
    engine.secrets["stories-token-file"] = {"operator.token": b"a-token-of-an-operator-0123456789abcdef\n"}
    engine.secrets["stories-deny-list"] = {"denied": b"worker/stolen\n"}
    return shown.getvalue().strip()


async def test_a_killed_worker_is_replaced_and_no_request_fails(cluster: Cluster) -> None:
    engine = cluster.engine
    async with cluster.load().running(num_streams=NUM_STREAMS) as load:
        await load.until_finished(NUM_STREAMS, timeout_s=TIMEOUT_S)
        for pod in engine.pods(component="worker"):
            await _kill(engine, pod)
            await load.until_finished(NUM_STREAMS, timeout_s=TIMEOUT_S)
    assert not load.problems, [*load.problems, engine.report()]


async def _kill(engine: PodEngine, pod: Pod) -> None:
    """Until it is ready again."""
    starts = pod.starts
    pod.kill()
    await engine.until(lambda: pod.starts > starts and pod.is_ready, timeout_s=TIMEOUT_S)


async def test_workers_are_evicted_one_at_a_time(cluster: Cluster) -> None:
    engine = cluster.engine
    first, second, _ = engine.pods(component="worker")
    async with cluster.load().running(num_streams=NUM_STREAMS) as load:
        eviction = asyncio.create_task(engine.evict(first.name))
        await engine.until(lambda: first.deleted_s is not None, timeout_s=TIMEOUT_S)
        assert not await engine.evict(second.name)
        assert await eviction
        assert not await engine.evict(second.name), "the other one has not joined yet"
        await engine.apply(cluster.objects(), timeout_s=TIMEOUT_S)
        assert await engine.evict(second.name)
        await engine.apply(cluster.objects(), timeout_s=TIMEOUT_S)
        await load.until_finished(NUM_STREAMS, timeout_s=TIMEOUT_S)
    assert not load.problems, [*load.problems, engine.report()]


async def test_a_rollout_of_workers_and_gateways_fails_no_request(cluster: Cluster) -> None:
    await _roll_out(cluster, "workers.cpu", "gateways.api", component=("worker", "gateway"))


async def test_a_rollout_of_the_coordinator_fails_no_accepted_request(cluster: Cluster) -> None:
    """New ones are refused meanwhile, with a retry time."""
    again = replace(cluster, client=replace(cluster.client, asks_again=True))
    await _roll_out(again, "workers.cpu", "gateways.api", "coordinator", component=("coordinator",))


async def _roll_out(cluster: Cluster, *changed: str, component: tuple[str, ...]) -> None:
    """Change the templates of some sets under load."""
    engine = cluster.engine
    changes = [f'--set-json={path}={{"nodeSelector":{{"pool":"other"}}}}' for path in changed]

    def addresses() -> dict[str, str]:
        return {pod.name: pod.address for name in component for pod in engine.pods(component=name)}

    before = addresses()
    async with cluster.load().running(num_streams=NUM_STREAMS) as load:
        await load.until_finished(NUM_STREAMS, timeout_s=TIMEOUT_S)
        await engine.apply(cluster.objects(*changes), timeout_s=TIMEOUT_S)
        await load.until_finished(NUM_STREAMS, timeout_s=TIMEOUT_S)
    assert not load.problems, [*load.problems, engine.report()]
    assert len(addresses()) == len(before)
    assert not before.items() & addresses().items()


async def test_certificates_and_their_authority_change_under_load(cluster: Cluster) -> None:
    engine, former = cluster.engine, cluster.engine.trusted[0]
    fresh = make_authority("another authority", life=LIFE)
    (cluster.folder / "fresh.crt").write_bytes(certificate_pem(fresh.certificate))
    with_fresh = replace(cluster.client, authorities=cluster.folder / "fresh.crt")
    async with cluster.load().running(num_streams=NUM_STREAMS) as load:
        for trusted, signing in (([former, fresh], former), ([former, fresh], fresh)):
            engine.trusted = trusted
            engine.change_authority(signing)
            engine.issue_certificates()
            engine.refresh_volumes()
            if signing is former:
                await load.until_finished(NUM_STREAMS, timeout_s=TIMEOUT_S)
        (cluster.folder / "ca.crt").write_bytes(
            certificate_pem(former.certificate) + certificate_pem(fresh.certificate)
        )
        await load.until_finished(2 * NUM_STREAMS, timeout_s=TIMEOUT_S)
        engine.trusted = [fresh]
        engine.issue_certificates()
        engine.refresh_volumes()
        await _kill(engine, engine.pods(component="worker")[0])
        await load.until_finished(2 * NUM_STREAMS, timeout_s=TIMEOUT_S)
    assert not load.problems, [*load.problems, engine.report()]
    assert await with_fresh.story(PROMPTS[0], max_tokens=8)
    for pod in engine.pods():
        await _check_presented(cluster, pod, cluster.folder / "fresh.crt")
    (cluster.folder / "former.crt").write_bytes(certificate_pem(former.certificate))
    with pytest.raises(ssl.SSLCertVerificationError):
        await replace(cluster.client, authorities=cluster.folder / "former.crt").story(
            PROMPTS[0], max_tokens=8
        )


async def _check_presented(cluster: Cluster, pod: Pod, authorities: Path) -> None:
    """The pod's certificate is of these authorities. Raises SSLCertVerificationError."""
    directory = cluster.folder / f"operator-of-{pod.name}"
    directory.mkdir()
    for name, content in cluster.engine.issue([OPERATOR], ["operator"]).items():
        (directory / name).write_bytes(content)
    context = ssl.create_default_context(cafile=str(authorities))
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    context.set_alpn_protocols(["h2", "http/1.1"])
    hosts = {"gateway": "stories-api", "coordinator": "stories-coordinator"}
    component = pod.labels["app.kubernetes.io/component"]
    host = hosts.get(component, f"{pod.name}.stories-workers")
    port = 7482 if component == "gateway" else 7480

    def shake_hands() -> None:
        with socket.create_connection((pod.address, port), timeout=TIMEOUT_S) as plain:
            context.wrap_socket(plain, server_hostname=host).close()

    await asyncio.get_running_loop().run_in_executor(cluster.client.threads, shake_hands)
