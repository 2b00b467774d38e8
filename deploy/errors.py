"""What can go wrong while a local cluster comes up."""


class ClusterFailed(Exception):
    """The cluster did not come up, or lost a process; the text says which one, with its last log lines."""
