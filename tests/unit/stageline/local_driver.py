"""`stageline` with fake processes for `up`, `demo` and `deploy run` to start."""

import functools
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

from deploy import LocalClusterConfig
from deploy.local_config import local_run
from stageline import cli
from tests.fake_processes import FAKE_COMMAND

if __name__ == "__main__":
    fake_config = functools.partial(LocalClusterConfig, command=FAKE_COMMAND)
    for command in ("up", "demo"):
        module: Any = import_module(f"stageline.cli.{command}")
        module.LocalClusterConfig = fake_config
    deploy: Any = import_module("stageline.cli.deploy")
    deploy.local_run = lambda spec: replace(local_run(spec), command=FAKE_COMMAND)
    sys.exit(cli.main())
