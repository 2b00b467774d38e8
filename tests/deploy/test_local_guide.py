"""The guide of docs/deploy/local.md, word for word, on a host of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.deploy.pages import commands_of, file_of
from tests.e2e.commands import ENVIRONMENT, STAGELINE

pytestmark = pytest.mark.deploy


def test_the_guide_runs_shows_and_stops_a_cluster(network: str, tmp_path: Path) -> None:
    def start(line: str) -> subprocess.Popen[str]:
        """A command of the guide in a terminal of its own."""
        program, *words = shlex.split(line)
        assert program == "stageline"
        return subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{network}", *STAGELINE, *words],
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def type_in(line: str) -> str:
        with start(line) as process:
            output, errors = process.communicate(timeout=180)
        assert process.returncode == 0, f"{line}: {errors}"
        return output

    (tmp_path / "cluster.yaml").write_text(file_of("local"))
    runs, shows, stops = (each.line for each in commands_of("local"))
    with start(runs) as cluster:
        try:
            type_in("stageline status --wait serving --timeout 120s")
            shown = type_in(shows)
            assert all(name in shown for name in ("w0", "w1"))
            type_in(stops)
            assert cluster.wait(timeout=60) == 0
        finally:
            cluster.kill()
