"""How many files and connections a process may have open."""

import resource

RESERVED = 256
"""Descriptors that connections of callers leave to hops, files, the journal and the dashboard."""


def raise_file_limit() -> int:
    """Raises the limit of this process to the hard one; returns it. Changes nothing where that is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return soft
    return hard


def max_connections() -> int:
    """Connections that a server accepts at once, so that descriptors are left for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 2**31 - 1
    return max(soft - RESERVED, soft // 2)
