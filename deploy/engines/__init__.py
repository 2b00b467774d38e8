"""Engines that run a cluster: rendered files for other programs, and those programs as a user runs them."""

from collections.abc import Callable, Mapping
from typing import Protocol

from deploy.engines import compose, kubernetes, slurm, systemd
from deploy.engines.helm_release import Kubernetes
from deploy.engines.host_services import Compose, Systemd
from deploy.engines.rendered import RenderedFile
from deploy.engines.slurm_jobs import Slurm
from deploy.spec.cluster_spec import ClusterSpec

RENDERERS: Mapping[str, Callable[[ClusterSpec], tuple[RenderedFile, ...]]] = {
    "systemd": systemd.render,
    "compose": compose.render,
    "slurm": slurm.render,
    "kubernetes": kubernetes.render,
}
"""By engine. Each raises WrongField for what the engine cannot do."""


class Runner(Protocol):
    """Starts, shows and stops a cluster; returns lines for the user. Raises ClusterFailed or WrongField."""

    def run(self, spec: ClusterSpec) -> list[str]: ...

    def status(self, spec: ClusterSpec) -> list[str]: ...

    def stop(self, spec: ClusterSpec) -> list[str]: ...


RUNNERS: Mapping[str, Runner] = {
    "systemd": Systemd(),
    "compose": Compose(),
    "slurm": Slurm(),
    "kubernetes": Kubernetes(),
}
"""By engine."""

__all__ = ["RENDERERS", "RUNNERS", "RenderedFile", "Runner"]
