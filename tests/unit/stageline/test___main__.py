"""Startup of commands, while Python imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stageline
from tests.fake_processes import ROOT

SLOW_GRPC = """
import os, time
print(os.environ.get("GRPC_VERBOSITY"), flush=True)
print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"), flush=True)
time.sleep(60)
"""


def start_with_slow_imports(folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Starts `stageline status` with an endless import of gRPC."""
    (folder / "grpc.py").write_text(SLOW_GRPC)
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "proto")])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "stageline", "status"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )


def test_ctrl_c_during_the_imports_is_a_silent_exit_code_130(tmp_path: Path) -> None:
    with start_with_slow_imports(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.parametrize(("given", "used"), [({}, "NONE"), ({"GRPC_VERBOSITY": "DEBUG"}, "DEBUG")])
def test_grpc_logs_nothing_by_default(
    tmp_path: Path, given: dict[str, str], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    with start_with_slow_imports(tmp_path, **given) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == used
        process.kill()


def test_grpc_does_not_handle_forks_which_can_crash_started_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    with start_with_slow_imports(tmp_path) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(2)][1] == "false"
        process.kill()


def test_everything_that_the_package_exports_can_be_imported() -> None:
    for name in stageline.__all__:
        assert getattr(stageline, name).__module__.startswith(("stageline.", "types", "typing")), name
    assert set(stageline.__all__) <= set(dir(stageline))


def test_a_name_that_the_package_does_not_export_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'stageline' has no attribute 'Clinet'"):
        stageline.Clinet  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("command", ["worker", "status"])
def test_a_command_loads_no_library_of_other_commands(command: str) -> None:
    code = f"import sys; from stageline.cli import make_app; make_app({command!r}); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "llguidance", "tokenizers", "sqlite3"} & set(run.stdout.split())
