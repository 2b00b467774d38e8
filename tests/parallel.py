"""How a parallel run gives tests to processes: by file, by folder where the tests share a cluster, and one by
one where they share nothing.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling

SHARED_CLUSTER = PurePosixPath("tests/e2e/served")
ONE_BY_ONE = frozenset(
    map(PurePosixPath, ("tests/e2e/test_chaos.py", "tests/gpu", "tests/kernels", "tests/unit/bench"))
)
"""A process at a time would run all tests of a file, and others would have none."""


class FileScheduling(LoadFileScheduling):
    """As `--dist loadfile`, but for these files and folders."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        path = PurePosixPath(file)
        if SHARED_CLUSTER in path.parents:
            return str(SHARED_CLUSTER)
        return file if ONE_BY_ONE.isdisjoint((path, *path.parents)) else nodeid
