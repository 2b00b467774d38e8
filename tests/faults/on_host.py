"""Runs `stageline` on the host named after it: `python -m tests.faults.on_host PREFIX ARGUMENTS`.

A worker goes to the network namespace PREFIX and its `--name`, a coordinator to PREFIX and "coordinator".
"""

from __future__ import annotations

import os
import sys

from tests.faults.network import enter_namespace


def main() -> None:
    """Executes the command under the same process id."""
    prefix, *arguments = sys.argv[1:]
    name = arguments[arguments.index("--name") + 1] if "--name" in arguments else arguments[0]
    enter_namespace(prefix + name)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "stageline", *arguments])


if __name__ == "__main__":
    main()
