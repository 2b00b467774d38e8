"""The Helm release of a cluster, in the cluster and namespace of the user's Kubernetes context."""

from __future__ import annotations

import tempfile
from pathlib import Path

from deploy.commands import drain_timeout_s
from deploy.engines.kubernetes import render
from deploy.engines.programs import run_program
from deploy.spec.cluster_spec import ClusterSpec

_TIMEOUT_S = 300.0
_GRACE_S = 60.0
"""Time of Kubernetes to end pods beyond their drain."""


class Kubernetes:
    """Every method raises ClusterFailed, and `run` WrongField."""

    def run(self, spec: ClusterSpec) -> list[str]:
        """Install the chart, or change the release to it; values that the user gave to Helm stay."""
        with tempfile.TemporaryDirectory(prefix="stageline-chart-") as chart:
            for file in render(spec):
                path = Path(chart) / file.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(file.text, encoding="utf-8")
            upgrade = ("helm", "upgrade", "--install", "--reset-then-reuse-values")
            return run_program(*upgrade, spec.name, chart, timeout_s=_TIMEOUT_S).splitlines()

    def status(self, spec: ClusterSpec) -> list[str]:
        """The pods."""
        selector = f"app.kubernetes.io/instance={spec.name}"
        return run_program("kubectl", "get", "pods", f"--selector={selector}", "--output=wide").splitlines()

    def stop(self, spec: ClusterSpec) -> list[str]:
        """Drain and remove the pods; the journal's volume stays."""
        timeout_s = round(drain_timeout_s(spec) + _GRACE_S)
        uninstall = ("helm", "uninstall", "--wait", f"--timeout={timeout_s}s", spec.name)
        return run_program(*uninstall, timeout_s=timeout_s + _GRACE_S).splitlines()
