"""Programs of engines, run as a user types them."""

from __future__ import annotations

import shlex
import subprocess

from deploy import ClusterFailed

_TIMEOUT_S = 120.0
_HINTS = ("Run ", "See ", "Usage:")
"""How lines begin that follow an error, such as docker's and systemctl's."""


def run_program(*words: str, stdin: str = "", timeout_s: float = _TIMEOUT_S) -> str:
    """The standard output of a program. Raises ClusterFailed with the last line of its error but hints."""
    line = shlex.join(words)
    try:
        finished = subprocess.run(
            words, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise ClusterFailed(f"{words[0]} not found: run the command on a host that has it") from None
    except subprocess.TimeoutExpired:
        raise ClusterFailed(f"`{line}` still runs after {timeout_s:g} s") from None
    if finished.returncode != 0:
        said = (finished.stderr.strip() or finished.stdout.strip()).splitlines()
        errors = [line for line in said if line and not line.startswith(_HINTS)]
        last = (errors or said or [""])[-1]
        raise ClusterFailed(f"`{line}` ended with exit code {finished.returncode}: {last}")
    return finished.stdout
