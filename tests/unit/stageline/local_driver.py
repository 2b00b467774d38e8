"""`stageline` with fake processes for `up` and `demo` to start."""

import functools
import sys

from deploy import LocalClusterConfig
from stageline import cli
from tests.fake_processes import FAKE_COMMAND

if __name__ == "__main__":
    fake_config = functools.partial(LocalClusterConfig, command=FAKE_COMMAND)
    for command in ("up", "demo"):
        sys.modules[f"stageline.cli.{command}"].LocalClusterConfig = fake_config  # type: ignore[attr-defined]
    sys.exit(cli.main())
