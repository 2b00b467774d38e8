"""Starts and stops a coordinator, its workers and a gateway as processes on this machine."""

from deploy.local import LocalCluster
from deploy.local_config import ClusterFailed, LocalClusterConfig, LocalRun
from deploy.process import LocalProcess

__all__ = ["ClusterFailed", "LocalCluster", "LocalClusterConfig", "LocalProcess", "LocalRun"]
