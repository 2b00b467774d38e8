"""The guide of docs/deploy/kubernetes.md, word for word: its commands, and its cluster with pods that run.

`kubectl create` and `helm lint` are real. There is no API server: `helm install` and `helm upgrade` render,
and the pod runner takes the Secrets and the release. GPUs and the model's directory are replaced.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from certificates.authority import make_authority
from tests.deploy.charts import Objects, program
from tests.deploy.gateway_load import GatewayClient
from tests.deploy.node import Node
from tests.deploy.pod_engine import PodEngine
from tests.fake_processes import ROOT
from tests.issued import LIFE

pytestmark = pytest.mark.deploy

REPLACED = {
    "model: /models/m\n": "dtype: f32\n",
    "device: cuda, memory: 20GiB, resources: {cpus: 8, memory: 64GiB, gpus: 1}": "flags: {threads: 1}",
}
TIMEOUT_S = 600.0
PROGRAMS = {
    "stageline": 'exec {python} -P -m stageline "$@"',
    "kubectl": 'exec {kubectl} "$@" --dry-run=client -o yaml > applied-$(date +%s%N).yaml',
    "helm": """\
case $1 in
    install | upgrade) action=$1; shift; exec {helm} template "$@" > "$action.yaml" ;;
    *) exec {helm} "$@" ;;
esac""",
}


def _blocks() -> tuple[str, list[str], str]:
    """The cluster file, the commands, and the file of own settings."""
    guide = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text().partition("## Certificates")[0]
    blocks = re.findall(r"^```(yaml)?\n(.*?)^```$", guide, re.M | re.S)
    cluster, site = (text for kind, text in blocks if kind)
    return cluster, [text for kind, text in blocks if not kind], site


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with the cluster file, own settings, and the programs of the commands in `bin`."""
    cluster, _, site = _blocks()
    for text, instead in REPLACED.items():
        assert text in cluster
        cluster = cluster.replace(text, instead)
    (tmp_path / "cluster.yaml").write_text(cluster)
    (tmp_path / "site.yaml").write_text(site)
    places = {"python": sys.executable, "kubectl": program("kubectl"), "helm": program("helm")}
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        made = tmp_path / "bin" / name
        made.write_text(f"#!/bin/sh\n{text.format(**places)}\n")
        made.chmod(0o755)
    return tmp_path


def _run(commands: str, home: Path) -> None:
    environment = {**os.environ, "PATH": f"{home}/bin:{os.environ['PATH']}", "HOME": str(home)}
    command = ["bash", "-euo", "pipefail", "-c", commands]
    finished = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert finished.returncode == 0, finished.stderr + finished.stdout


def _applied(file: Path) -> Objects:
    return Objects(tuple(item for item in yaml.safe_load_all(file.read_text()) if item is not None))


async def test_the_commands_of_the_guide_end_with_a_story(home: Path) -> None:
    _, (render, install, _), _ = _blocks()
    _run(render, home)
    _run(install, home)
    objects = _applied(home / "install.yaml")
    with Node(home).running() as node:
        authority = make_authority("unused", life=LIFE)
        async with PodEngine(node, home / "pods", authority).running() as engine:
            for file in home.glob("applied-*.yaml"):
                for secret in _applied(file).all:
                    data = {name: base64.b64decode(text) for name, text in secret["data"].items()}
                    engine.secrets[secret["metadata"]["name"]] = data
            await engine.apply(objects, timeout_s=TIMEOUT_S)
            client = GatewayClient(
                engine=engine,
                service="stories-api",
                port=7482,
                threads=node.threads,
                authorities=home / "certs" / "ca" / "ca.crt",
                api_key=(home / "api.key").read_text().strip(),
            )
            assert len(await client.story("Once upon a time", max_tokens=32)) > 32


def test_own_settings_are_merged_into_the_values(home: Path) -> None:
    cluster, (render, _, upgrade), _ = _blocks()
    (home / "cluster.yaml").write_text(cluster)
    _run(render + upgrade, home)
    pod = _applied(home / "upgrade.yaml").get("StatefulSet", "stories-gpu")["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "64Gi", "amd.com/gpu": 1}
    (model,) = [volume for volume in pod["volumes"] if volume["name"] == "model"]
    assert model == {"name": "model", "persistentVolumeClaim": {"claimName": "models"}}
