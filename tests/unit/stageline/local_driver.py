"""`stageline` with fake processes for `up` and `demo` to start."""

import functools
import sys
from importlib import import_module
from typing import Any

from deploy import LocalClusterConfig
from stageline import cli
from tests.fake_processes import FAKE_COMMAND

if __name__ == "__main__":
    fake_config = functools.partial(LocalClusterConfig, command=FAKE_COMMAND)
    for command in ("up", "demo"):
        module: Any = import_module(f"stageline.cli.{command}")
        module.LocalClusterConfig = fake_config
    sys.exit(cli.main())
