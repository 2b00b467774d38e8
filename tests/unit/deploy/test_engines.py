"""Rendered files: as recorded, valid for the tools that read them, and with the processes' own words."""

import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.commands import ProcessCommand, commands, read_cluster_spec
from deploy.engines import RENDERERS
from deploy.engines.compose import with_worker_ports
from stageline.cli import main
from tests.fake_processes import wait_until
from tests.unit.deploy.cluster_files import HOSTS, JOB, LEAST, write

GOLDEN = Path(__file__).parent / "golden"
FILES = {"systemd": HOSTS, "compose": HOSTS, "slurm": JOB}


def _render(engine: str, text: str, directory: Path) -> dict[str, str]:
    """Texts of the files that the command writes, by their paths."""
    out = directory / "out"
    file = write(directory, text)
    assert main(["deploy", "render", engine, "-f", str(file), "-o", str(out)]) == 0
    return {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("engine", [engine for engine in RENDERERS if engine != "kubernetes"])
def test_files_are_as_recorded(engine: str, tmp_path: Path) -> None:
    """To record them: delete the directory of the engine in `golden` and run the test twice."""
    rendered, recorded = _render(engine, FILES[engine], tmp_path), GOLDEN / engine
    if not recorded.exists():
        shutil.copytree(tmp_path / "out", recorded)
        pytest.fail(f"recorded {recorded}")
    found = {str(path.relative_to(recorded)): path.read_text() for path in recorded.rglob("*.*")}
    assert rendered == found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("text", [LEAST, HOSTS], ids=["least", "hosts"])
def test_systemd_accepts_its_units_and_finds_them_little_exposed(text: str, tmp_path: Path) -> None:
    _render("systemd", f"{text}engine: {{program: {shutil.which('true')}, user: daemon}}\n", tmp_path)
    units = [str(path) for path in (tmp_path / "out").rglob("*.service")]
    assert len(units) >= 4
    verified = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    exposed = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", "--no-pager", *units]
    assert subprocess.run(exposed, capture_output=True).returncode == 0


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_engines_without_files_say_what_to_run(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, LEAST)
    assert main(["deploy", "render", engine, "-f", str(file), "-o", str(tmp_path)]) == 2
    assert f"engine '{engine}' has no files: use stageline deploy run {engine}" in capsys.readouterr().err


def test_a_job_reserves_a_gpu_for_each_worker_on_one(tmp_path: Path) -> None:
    (script,) = _render("slurm", f"{LEAST}security: {{insecure: true}}\n", tmp_path).values()
    assert "#SBATCH --gpus-per-task=1" in script.splitlines()
    assert script.count(" --gpus=1 ") == 2


def test_variables_of_the_file_win_over_those_of_a_unit(tmp_path: Path) -> None:
    units = _render("systemd", f"{LEAST}environment: {{XDG_STATE_HOME: /srv/state}}\n", tmp_path)
    for text in units.values():
        assert text.index("Environment=XDG_STATE_HOME=%S/") < text.index(
            "Environment=XDG_STATE_HOME=/srv/state"
        )


def test_units_load_secrets_as_credentials_and_no_other_file(tmp_path: Path) -> None:
    units = _render("systemd", HOSTS, tmp_path)
    assert [path for path, text in units.items() if "LoadCredential" in text] == [
        "head/stories-coordinator.service"
    ]
    unit = units["head/stories-coordinator.service"]
    assert "LoadCredential=token-file:/etc/stageline/operator.token\n" in unit
    assert "--token-file %d/token-file " in unit
    assert unit.count("operator.token") == 1
    assert "ReadWritePaths=/var/lib/stories\n" in unit


def _services(directory: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for text in _render("compose", HOSTS, directory).values():
        found |= yaml.safe_load(text)["services"]
    return found


def test_compose_services_have_the_words_and_files_of_their_processes(tmp_path: Path) -> None:
    services = _services(tmp_path)
    spec = with_worker_ports(read_cluster_spec(write(tmp_path, HOSTS)))
    found: tuple[ProcessCommand, ...] = commands(spec)
    assert set(services) == {command.name for command in found}
    for command in found:
        service = services[command.name]
        assert tuple(shlex.split(service["command"].replace("$$", "$"))) == command.argv
        assert service["environment"]["GREETING"] == "a $$b 100%"
        mounted = [volume.replace("$$", "$").split(":")[1] for volume in service["volumes"]]
        for used in command.paths:
            assert any(used.path.is_relative_to(target) for target in mounted), used
    assert "/models/m:/models/m:ro" in services["gpu-a"]["volumes"]
    assert services["spare"].get("deploy") is None
    assert services["gpu-a"]["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"


def test_a_long_drain_is_a_whole_number_of_seconds(tmp_path: Path) -> None:
    text = f"{LEAST}drain-timeout: 1000000.5\n"
    texts = {**_render("systemd", text, tmp_path), **_render("compose", text, tmp_path)}
    assert yaml.safe_load(texts.pop("compose.yaml"))["x-process"]["stop_grace_period"] == "1000031s"
    assert texts and all("TimeoutStopSec=1000031\n" in unit for unit in texts.values())


def test_compose_services_have_the_directory_of_a_gguf_file(tmp_path: Path) -> None:
    text = LEAST.replace("/models/m", "/models/m-00001-of-00003.gguf")
    (rendered,) = _render("compose", text, tmp_path).values()
    services = yaml.safe_load(rendered)["services"].values()
    assert any("--model /models/m-00001-of-00003.gguf" in service["command"] for service in services)
    assert all(
        "/models:/models:ro" in service["volumes"] for service in services if "--model" in service["command"]
    )


@pytest.mark.parametrize("name", ["7", "on", "null"])
def test_names_that_yaml_takes_for_other_values_are_texts_in_a_compose_file(
    name: str, tmp_path: Path
) -> None:
    text = f"name: '{name}'\ncoordinator: {{name: '{name}'}}\nworkers: [{{name: w}}]\n"
    (rendered,) = _render("compose", text, tmp_path).values()
    found = yaml.safe_load(rendered)
    assert found["name"] == name
    assert set(found["services"]) == {name, "gateway", "w"}
    assert set(found["services"]["w"]["depends_on"]) == {name}


_FAKE = """\
#!/bin/bash
# Logs its start. SIGTERM ends it with code 0.
case $* in *coordinator*) role=coordinator ;; esac
case $* in *gateway*--coordinator*) role=gateway ;; esac
echo "start $role $*" >> "$LOG"
trap 'echo "end $role" >> "$LOG"; exit 0' TERM
while true; do /bin/sleep 0.05; done
"""
_FAKE_SRUN = """\
#!/bin/bash
# Runs until scancel. The node of gpu-a is lost at its first start, and its job has no other.
case $* in *gpu-a*) role=worker-a ;; *) role=worker-b ;; esac
echo "start $role job=$SLURM_JOB_ID $*" >> "$LOG"
case $role.$(grep -c "^start $role" "$LOG") in worker-a.1) exit 0 ;; worker-a.2) exit 65 ;; esac
until [ -e "$LOG.cancelled" ]; do /bin/sleep 0.05; done
echo "end $role" >> "$LOG"
exit 64
"""
_FAKES = {
    "stageline": _FAKE,
    "srun": _FAKE_SRUN,
    "squeue": "#!/bin/bash\necho 1-02:00:00\n",
    "scancel": '#!/bin/bash\ncase $* in *--signal=TERM*) touch "$LOG.cancelled" ;; esac\n',
    "sleep": "#!/bin/bash\nexec /bin/sleep 0.05\n",
}


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """Starts the job script with programs that log how they are started, and returns it with the log."""
    text = JOB.replace("/opt/stage line/bin/stageline", str(tmp_path / "stageline"))
    (script,) = _render("slurm", text, tmp_path).values()
    for program, fake in _FAKES.items():
        (tmp_path / program).write_text(fake)
        (tmp_path / program).chmod(0o755)
    (tmp_path / "log").touch()
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "SLURMD_NODENAME": "node-1",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "stageline",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_CONF": "/etc/slurm.conf",
    }
    process = subprocess.Popen(["bash", "-c", script], env=environment, stderr=subprocess.DEVNULL)
    yield process, tmp_path / "log"
    process.kill()
    process.wait()


def test_a_slurm_job_replaces_lost_steps_and_drains_in_order(job: Any) -> None:
    process, log = job
    wait_until(lambda: log.read_text().count("start ") == 6)
    started = [line for line in log.read_text().splitlines() if line.startswith("start worker-a")]
    assert [" --immediate=10 " in line for line in started] == [True, True, False]
    assert "start worker-a job= --job-name=stageline-7 --partition=gpu --time=1-02:00:00 " in started[2]
    assert log.read_text().count("--coordinator node-1:7480") == 5
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    ended = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("end")]
    assert set(ended[:2]) == {"gateway", "coordinator"}
    assert set(ended[2:]) == {"worker-a", "worker-b"}


@pytest.mark.parametrize("process", ["coordinator: {", "gateways: [{name: api, "])
def test_slurm_reserves_for_workers_only(
    process: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, JOB.replace(process, f"{process}resources: {{cpus: 1}}, "))
    assert main(["deploy", "render", "slurm", "-f", str(file), "-o", str(tmp_path)]) == 2
    assert "resources: the batch step has the resources of the first node" in capsys.readouterr().err


def test_fractions_of_cpus_are_for_engines_that_can_divide_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LEAST.replace("memory: 20GiB}", "memory: 20GiB, resources: {cpus: 0.5}}", 1)
    file = write(tmp_path, text + "security: {insecure: true}\n")
    for engine, text in (("systemd", "CPUQuota=50%"), ("compose", "cpus: 0.5"), ("kubernetes", "cpu: 0.5")):
        out = tmp_path / engine
        assert main(["deploy", "render", engine, "-f", str(file), "-o", str(out)]) == 0
        assert any(text in path.read_text() for path in out.rglob("*") if path.is_file()), engine
    assert main(["deploy", "render", "slurm", "-f", str(file), "-o", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "workers[0].resources.cpus: is 0.5, but Slurm gives whole CPUs to a task: round it up" in shown


@pytest.mark.parametrize(
    ("cpus", "problem"),
    [("0.005", "out of range: must be in [0.01, 4096]"), ("0.125", "finer than 0.01"), ("nan", "nan is out")],
)
def test_cpus_are_hundredths(cpus: str, problem: str, tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path, JOB.replace("cpus: 8", f"cpus: {cpus}"))
    assert main(["deploy", "render", "systemd", "-f", str(file), "-o", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err


def test_slurm_chooses_the_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, HOSTS)
    assert main(["deploy", "render", "slurm", "-f", str(file), "-o", str(tmp_path)]) == 2
    assert f"{file}:7: coordinator.host: Slurm chooses the hosts" in capsys.readouterr().err


def test_an_unknown_engine_is_rejected_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, LEAST)
    assert main(["deploy", "render", "nomad", "-f", str(file), "-o", str(tmp_path)]) == 2
    assert "engine 'nomad' is unknown, must be one of systemd, compose, slurm" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["systemd", "compose"])
def test_two_processes_of_a_host_on_one_port_are_refused(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = "workers: [{name: a, listen: '127.0.0.1:7600'}, {name: b, listen: '127.0.0.1:7600'}]"
    for text, error in (
        (both, "workers: 'b' and 'a' both listen on port 7600"),
        ("workers: [{name: a, listen: '127.0.0.1:7480'}]", "'a' and 'coordinator' both listen on port 7480"),
        (
            "coordinator: {listen: '127.0.0.1:7481'}\nworkers: [{name: a}]",
            "coordinator: 'coordinator' listens twice on port 7481",
        ),
    ):
        file = str(write(tmp_path, text))
        assert main(["deploy", "render", engine, "-f", file, "-o", str(tmp_path / "out")]) == 2
        assert error in " ".join(capsys.readouterr().err.split())
