"""How a parallel run gives tests to processes: by file, and by folder where the tests share a cluster."""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling

SHARED_CLUSTER = PurePosixPath("tests/e2e/served")


class FileScheduling(LoadFileScheduling):
    """As `--dist loadfile`, with the folder of a shared cluster as one file."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return str(SHARED_CLUSTER) if SHARED_CLUSTER in PurePosixPath(file).parents else file
