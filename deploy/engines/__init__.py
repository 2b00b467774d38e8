"""Engines that run a cluster, one module each: rendered files for other programs to start."""

from collections.abc import Callable, Mapping

from deploy.engines import compose, slurm, systemd
from deploy.engines.rendered import RenderedFile
from deploy.spec.cluster_spec import ClusterSpec

RENDERERS: Mapping[str, Callable[[ClusterSpec], tuple[RenderedFile, ...]]] = {
    "systemd": systemd.render,
    "compose": compose.render,
    "slurm": slurm.render,
}
"""By engine. Each raises WrongField for what the engine cannot do."""

__all__ = ["RENDERERS", "RenderedFile"]
