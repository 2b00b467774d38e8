"""Startup of commands, while Python imports."""

from __future__ import annotations

import json
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


PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}


def run_in(encoding: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Runs Python with standard streams of this encoding, which refuse other characters."""
    environment = {**os.environ, **PATHS, "PYTHONIOENCODING": f"{encoding}:strict"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, env=environment, timeout=120, check=False
    )


@pytest.mark.parametrize("as_json", [False, True])
def test_text_that_the_terminal_cannot_show_is_escaped(as_json: bool, tmp_path: Path) -> None:
    directory = tmp_path / "né 😀"
    directory.mkdir()
    words = ["-m", "stageline", "plan", "--check", str(directory), *(["--json"] if as_json else [])]
    run = run_in("ascii", *words)
    assert (run.returncode, run.stderr) == (1, b"")
    if as_json:
        assert json.loads(run.stdout)["directory"] == str(directory)
        return
    assert run.stdout.decode("ascii").startswith(f"{tmp_path}/n\\u00e9 \\ud83d\\ude00 is not served:")
    shown = run_in("latin-1", *words).stdout.decode("latin-1")
    assert shown.startswith(f"{tmp_path}/né \\ud83d\\ude00 is not served:")


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SHOW_ARGUMENTS = """
import stageline.__main__ as entry, sys
sys.modules["stageline.cli"] = type(sys)("stageline.cli")
sys.modules["stageline.cli"].main = lambda: print(ascii(sys.argv[1:]), open(sys.argv[2]).read()) or 0
entry.main()
"""


def test_arguments_are_utf8_texts_and_paths_where_the_locale_cannot_decode_them(tmp_path: Path) -> None:
    path = tmp_path / "né"
    path.write_text("found")
    script = tmp_path / "show.py"
    script.write_text(SHOW_ARGUMENTS)
    run = subprocess.run(
        [sys.executable, "-P", str(script), "né 😀", str(path)],
        capture_output=True,
        env={**os.environ, **PATHS, **C_LOCALE},
        timeout=120,
        check=True,
    )
    assert run.stdout.decode("ascii") == f"{['né 😀', str(path)]!a} found\n"


SHOW_JSON = """
import json, stageline.__main__ as entry
entry._accept_all_text()
print(json.dumps("né 😀", ensure_ascii=False))
"""


def test_an_escape_in_json_is_one_that_json_has() -> None:
    assert json.loads(run_in("ascii", "-c", SHOW_JSON).stdout.decode("ascii")) == "né 😀"


def test_a_closed_standard_output_is_no_error(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "stageline", "plan", "--check", str(tmp_path)]
    run = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *words],
        stderr=subprocess.PIPE,
        env={**os.environ, **PATHS},
        timeout=120,
        check=False,
    )
    assert (run.returncode, run.stderr) == (1, b"")
