"""Starts and stops a coordinator, its workers and a gateway as processes on this machine.

What this package exports is loaded when it is first used: most commands start no process.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from wire.exit_codes import with_log

if TYPE_CHECKING:
    from deploy.local import LocalCluster
    from deploy.local_config import LocalClusterConfig, LocalRun
    from deploy.process import LocalProcess
else:  # hidden from type checkers, which would take every name for one of ours
    _HOMES = {
        "LocalCluster": "local",
        "LocalClusterConfig": "local_config",
        "LocalProcess": "process",
        "LocalRun": "local_config",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'deploy' has no attribute {name!r}")
        value = getattr(import_module(f"deploy.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


class ClusterFailed(Exception):
    """The cluster did not start, or lost a process; the message names it, with its last log lines."""

    def __init__(self, message: str, *, log_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message, self.log_lines = message, log_lines

    def __str__(self) -> str:
        return with_log(self.message, self.log_lines)


__all__ = ["ClusterFailed", "LocalCluster", "LocalClusterConfig", "LocalProcess", "LocalRun"]
