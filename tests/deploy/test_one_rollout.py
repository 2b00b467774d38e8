"""One rollout of the chart's workers with real processes, which `make test-full` has time for."""

from __future__ import annotations

from pathlib import Path

import pytest

from certificates.authority import make_authority
from certificates.files import certificate_pem
from stageline.cli import main
from tests.deploy.charts import program, rendered
from tests.deploy.gateway_load import GatewayClient, GatewayLoad
from tests.deploy.node import Node
from tests.deploy.pod_engine import PodEngine
from tests.issued import LIFE

pytestmark = pytest.mark.full

CLUSTER = """\
name: stories
stages: 1
dtype: f32
drain-timeout: 600
timeouts: {recovery: 600}
gateways: [{name: api}]
workers: [{name: cpu-0, flags: {threads: 1}}, {name: cpu-1, flags: {threads: 1}}]
security: {tls-dir: /etc/tls}
"""
TIMEOUT_S = 600.0
CSI = ("--set=certificates.provider=csi", "--set=certificates.issuer.name=ca")
ANOTHER = '--set-json=workers.cpu={"nodeSelector":{"pool":"other"}}'


async def test_a_rollout_of_the_workers_fails_no_request(tmp_path: Path) -> None:
    program("helm")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    chart = tmp_path / "chart"
    assert main(["deploy", "render", "kubernetes", "-f", f"{tmp_path}/cluster.yaml", "-o", str(chart)]) == 0
    with Node(tmp_path).running() as node:
        authority = make_authority("authority of a cluster", life=LIFE)
        (tmp_path / "ca.crt").write_bytes(certificate_pem(authority.certificate))
        async with PodEngine(node, tmp_path / "pods", authority).running() as engine:
            await engine.apply(rendered(chart, *CSI), timeout_s=TIMEOUT_S)
            client = GatewayClient(
                engine=engine,
                service="stories-api",
                port=7482,
                threads=node.threads,
                authorities=tmp_path / "ca.crt",
            )
            before = {pod.name: pod.address for pod in engine.pods(component="worker")}
            load = GatewayLoad(client, ["Once upon a time", "The cat sat"], max_tokens=24)
            async with load.running(num_streams=2):
                await load.until_finished(2, timeout_s=TIMEOUT_S)
                await engine.apply(rendered(chart, *CSI, ANOTHER), timeout_s=TIMEOUT_S)
                await load.until_finished(2, timeout_s=TIMEOUT_S)
            assert not load.problems, [*load.problems, engine.report()]
            after = {pod.name: pod.address for pod in engine.pods(component="worker")}
            assert after.keys() == before.keys()
            assert not after.items() & before.items()
