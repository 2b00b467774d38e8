"""`stageline up` and `stageline demo` as processes, with fake processes under them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from deploy.local import GRACE_S
from stageline.cli import main, up
from tests.fake_processes import FAKE_ENVIRONMENT, is_running, wait_until

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts `stageline ARGUMENTS...`; its temporary files go to this test's folder."""
    with ExitStack() as processes:

        def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.unit.stageline.local_driver", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    **FAKE_ENVIRONMENT,
                    "TMPDIR": str(tmp_path),
                    "COLUMNS": "120",
                    **variables,
                },
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield start


def _start_up(launch: Launch, *flags: str, **variables: str) -> tuple[subprocess.Popen[str], list[int], str]:
    """The serving launcher, its process ids (coordinator, gateway, workers) and its output so far."""
    addresses = ("--listen", "127.0.0.1:0", "--gateway", "127.0.0.1:0")
    launcher = launch("up", "--workers", "2", *addresses, *flags, **variables)
    printed = _read_until(launcher, "Press Ctrl-C to stop")
    children = sorted(psutil.Process(launcher.pid).children(), key=lambda child: child.create_time())
    return launcher, [child.pid for child in children], printed


def _read_until(launcher: subprocess.Popen[str], text: str) -> str:
    """Output of the process up to the line with this text."""
    assert launcher.stdout is not None
    printed = ""
    while text not in printed:
        line = launcher.stdout.readline()
        assert line, f"ended after {printed!r}: {launcher.communicate()[1]}"
        printed += line
    return printed


def _all_ended(pids: list[int]) -> bool:
    return not any(is_running(pid) for pid in pids)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_shows_the_topology_and_a_signal_ends_it_in_order(
    launch: Launch, number: signal.Signals, tmp_path: Path
) -> None:
    launcher, pids, printed = _start_up(launch)
    rows = [line.split() for line in printed.splitlines() if "worker-" in line]
    assert [row[:3] for row in rows] == [["0", "FIRST", "worker-0"], ["1", "LAST", "worker-1"]]
    assert "0 to 1 (2)" in printed
    assert "3.0 MiB" in printed
    assert len(pids) == 4

    launcher.send_signal(number)
    output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert output.endswith("All processes stopped.\n")
    assert errors == ""
    assert _all_ended(pids)
    assert list(tmp_path.glob("stageline-*")) == []


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--layers 5,5,5", "layers 5,5,5 sum to 15, the model has 12"),
        ("--memory 1MiB", "but worker-0 has 1.0 MiB"),
        ("--workers 13", "13 stages for a model of 12 layers"),
        ("--max-model-len 2049", "--max-model-len is 2049, but the model's limit is 2048"),
    ],
)
def test_up_rejects_an_impossible_plan_before_starting_processes(
    launch: Launch, flags: str, words: str
) -> None:
    output, errors = (up := launch("up", *flags.split())).communicate(timeout=30)
    assert up.returncode == 1
    assert words in errors
    assert errors.count("\n") == 1
    assert output == ""


@pytest.mark.matrix(1)
@pytest.mark.parametrize("flags", ["--memory 999TiB", "--threads 100000000"])
def test_up_rejects_missing_resources_before_starting_processes(
    launch: Launch, flags: str, tmp_path: Path
) -> None:
    output, errors = (up := launch("up", *flags.split())).communicate(timeout=30)
    assert up.returncode == 2
    assert errors.count("\n") == 1
    assert output == ""
    assert list(tmp_path.glob("stageline-*")) == []


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("has_tokenizer", "prompt"), [("1", '"Once upon a time"'), ("0", "--token-ids 1,2,3")]
)
def test_up_suggests_a_prompt_that_the_model_takes(launch: Launch, has_tokenizer: str, prompt: str) -> None:
    launcher, _, _ = _start_up(launch, FAKE_TOKENIZER=has_tokenizer)
    _read_until(launcher, f"stageline generate {prompt} --coordinator")


def test_with_keys_up_prints_a_command_with_a_key(launch: Launch, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    assert main(["keys", "create", "--tenant", "ann", "--keys-file", str(keys)]) == 0
    _, _, printed = _start_up(launch, "--keys-file", str(keys))
    assert f"With KEY, which `stageline keys create --keys-file {keys} ...` prints:" in printed
    assert '/chat/completions -H "authorization: Bearer $KEY" -H ' in printed


def test_flags_and_settings_of_up_reach_its_processes(launch: Launch) -> None:
    of_coordinator = {
        "--queue-size": "7",
        "--recovery-timeout": "9.0",
        "--hidden-states": "grpc",
        "--trace-store": "5",
    }
    of_workers = ["--payload-listen", "127.0.0.1:0", "--payload-min", "1MiB"]
    flags = (*(word for setting in of_coordinator.items() for word in setting), *of_workers)
    launcher, pids, _ = _start_up(launch, *flags, STAGELINE_LOG_FORMAT="json", STAGELINE_LOG_LEVEL="debug")
    lines = [psutil.Process(pid).cmdline() for pid in pids]
    assert {flag: lines[0][lines[0].index(flag) + 1] for flag in of_coordinator} == of_coordinator
    assert ["worker" in line for line in lines] == [False, False, True, True]
    for pid, line in zip(pids, lines, strict=True):
        assert line[line.index("--log-format") :][:4] == ["--log-format", "json", "--log-level", "debug"]
        assert not {"STAGELINE_LOG_FORMAT", "STAGELINE_LOG_LEVEL"} & psutil.Process(pid).environ().keys()
        assert (" ".join(of_workers) in " ".join(line)) == ("worker" in line)
    launcher.terminate()
    assert launcher.wait(GRACE_S) == 0


def test_up_reports_a_lost_worker_and_continues(launch: Launch) -> None:
    launcher, pids, _ = _start_up(launch, "--no-restart")
    os.kill(pids[2], signal.SIGKILL)
    printed = _read_until(launcher, "stageline worker --coordinator")
    assert f"worker-0 (pid {pids[2]}) ended: killed by SIGKILL" in printed
    assert "| stageline worker worker-0 listening on" in printed
    assert "--name worker-0" in printed
    assert is_running(pids[0])
    assert launcher.poll() is None

    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert _all_ended(pids)


@pytest.mark.full
def test_up_does_not_ask_for_a_worker_that_has_left(launch: Launch) -> None:
    launcher, pids, _ = _start_up(launch)
    os.kill(pids[2], signal.SIGINT)
    printed = _read_until(launcher, "worker-0")
    assert "worker-0 drained" in printed
    assert "To start it again" not in printed
    assert " | " not in printed
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 0


@pytest.mark.full
def test_up_ends_with_exit_code_1_when_the_coordinator_is_lost(launch: Launch) -> None:
    launcher, pids, _ = _start_up(launch)
    os.kill(pids[0], signal.SIGKILL)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert errors.startswith(
        f"stageline: error[CLUSTER_FAILED]: coordinator (pid {pids[0]}) ended: killed by SIGKILL"
    )
    assert _all_ended(pids)


@pytest.mark.full
def test_a_second_signal_does_not_wait_for_processes_that_hang(launch: Launch) -> None:
    launcher, pids, _ = _start_up(launch, FAKE_HANGS="1")
    start = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    _read_until(launcher, "Stopping all processes")
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert time.monotonic() - start < GRACE_S
    assert launcher.returncode == 0
    assert _all_ended(pids)


def test_processes_of_up_do_not_outlive_a_killed_launcher(launch: Launch) -> None:
    launcher, pids, _ = _start_up(launch, FAKE_HANGS="1")
    launcher.kill()
    wait_until(lambda: _all_ended(pids))


def test_the_demo_shows_stages_text_and_speed(launch: Launch, tmp_path: Path) -> None:
    demo = launch("demo")
    output, errors = demo.communicate(timeout=60)
    assert demo.returncode == 0, errors
    assert errors == ""
    assert [row in output for row in ("worker-0", "MIDDLE", "4 to 5 (2)")] == [True] * 3
    assert "Once upon a time 0 1 2" in output
    assert "300 tokens in " in output
    assert " tokens/s" in output
    assert "answers a client of OpenAI's API:\nA fake answer.\n" in output
    assert output.endswith("All processes stopped.\n")
    assert list(tmp_path.glob("stageline-*")) == []


def test_the_gateway_takes_a_free_port_where_the_default_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        default = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(up, "DEFAULT_HTTP_ADDRESS", default)
        assert up.gateway_listen(None) == "127.0.0.1:0"
        with pytest.raises(OSError, match=rf"gateway on {default}: .* in use .* --gateway HOST:PORT"):
            up.gateway_listen(default)
    assert up.gateway_listen(None) == default
    assert up.gateway_listen("off") is None


@pytest.mark.full
def test_a_demo_that_fails_ends_with_the_last_lines_of_the_log(launch: Launch) -> None:
    demo = launch("demo", FAKE_FAILING_WORKER="worker-2")
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert errors.startswith("stageline: error[CLUSTER_FAILED]: worker-2 (pid ")
    assert errors.endswith("  | first line\n  | out of memory\n")


def _cluster_file(directory: Path) -> Path:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], second.getsockname()[1]
    file = directory / "cluster.yaml"
    file.write_text(
        f"name: stories\ncoordinator: {{listen: '127.0.0.1:{ports[0]}', http: off}}\n"
        f"gateways: [{{name: api, listen: '127.0.0.1:{ports[1]}'}}]\n"
        "workers: [{name: left}, {name: right, flags: {threads: 1}}]\n"
        "environment: {FAKE_TOKENIZER: '1'}\n"
    )
    return file


def test_a_cluster_file_is_run_once_shown_and_stopped(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(_cluster_file(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    launcher = launch("deploy", "run", "local", "-f", file)
    printed = _read_until(launcher, "Press Ctrl-C to stop")
    assert "0 FIRST left" in " ".join(printed.split())
    children = [child.pid for child in psutil.Process(launcher.pid).children()]
    lines = [psutil.Process(pid).cmdline() for pid in children]
    (right,) = [line for line in lines if "right" in line]
    assert len(lines) == 4
    assert right[right.index("--threads") + 1] == "1"
    assert "--memory" in right

    assert main(["deploy", "run", "local", "-f", file]) == 1
    assert f"cluster stories runs already, started by process {launcher.pid}" in capsys.readouterr().err
    assert main(["deploy", "status", "local", "-f", file]) == 0
    assert "left" in capsys.readouterr().out
    coordinator = lines[0][lines[0].index("--listen") + 1]
    assert main(["status", "--wait", "serving", "--timeout", "60s", "--coordinator", coordinator]) == 0
    assert "left" in capsys.readouterr().out
    assert main(["deploy", "stop", "local", "-f", file]) == 0
    assert capsys.readouterr().out == "cluster stories stopped\n"
    assert launcher.wait(timeout=10) == 0
    assert _all_ended(children)
    assert main(["deploy", "stop", "local", "-f", file]) == 1
    assert "cluster stories is not running on this machine" in capsys.readouterr().err


def test_a_local_cluster_has_one_machine_and_no_certificates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("workers: [{name: a}]\nsecurity:\n  tls-dir: /tls\n")
    assert main(["deploy", "run", "local", "-f", str(file)]) == 2
    assert f"{file}:3: security.tls-dir: the engine local speaks plain text" in capsys.readouterr().err
