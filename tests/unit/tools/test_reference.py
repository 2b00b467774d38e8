"""docs/reference/ describes the flags that exist."""

import subprocess
import sys

from tests.repository import REPOSITORY

TOOL = REPOSITORY / "tools" / "reference.py"


def test_the_reference_of_flags_is_up_to_date() -> None:
    check = subprocess.run([sys.executable, TOOL, "--check"], check=False)
    assert check.returncode == 0, "run: python tools/reference.py"
