"""The file limit of a process."""

import resource
import subprocess
import sys

import pytest

from wire.channels import max_connections

PROGRAM = """
import resource
from wire.channels import max_connections, raise_file_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
assert raise_file_limit() == hard
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_the_soft_file_limit_is_raised_to_the_hard_limit() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


@pytest.mark.parametrize(("soft", "connections"), [(1024, 768), (300, 150), (8000, 7744), (20000, 8192)])
def test_the_connection_limit_reserves_file_descriptors(
    soft: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, 20000))
    assert max_connections() == connections
