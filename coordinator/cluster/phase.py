"""What the cluster is doing as a whole. Pure."""

from enum import Enum, auto


class ClusterPhase(Enum):
    """What the cluster is doing as a whole."""

    WAITING_FOR_WORKERS = auto()
    LOADING = auto()
    STARTING_EPOCH = auto()
    CHECKING = auto()
    SERVING = auto()
    BLOCKED = auto()


ACTIVE = (ClusterPhase.STARTING_EPOCH, ClusterPhase.CHECKING, ClusterPhase.SERVING)
"""An epoch has begun and is not over."""
