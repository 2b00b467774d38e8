"""The wheel, installed in an environment without the source tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from deploy.engines import RENDERERS
from tests.fake_processes import wait_until
from tests.repository import REPOSITORY
from tests.unit.deploy.cluster_files import LEAST
from tests.unit.test_packaging import PROJECT

pytestmark = pytest.mark.deploy
PACKAGES = PROJECT["tool"]["importlinter"]["root_packages"]
PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")
NOT_INSTALLED = re.compile(r"\.(c|so)$|(^|/)__pycache__/|^deploy/image/")
"""Sources of extension modules and of the image, and what was built in the source tree."""
IMAGE = REPOSITORY / "deploy" / "image" / "Dockerfile"
TIMEOUT_S = 900.0


def outside() -> dict[str, str]:
    """This environment without variables for Python and make."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MAKE", "MFLAGS"))
    }


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program. Returns its standard output."""
    done = subprocess.run(
        command, cwd=cwd, env=outside(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment of its own for one wheel, and the seconds of its installation."""

    folder: Path
    seconds: float

    def run(self, program: str, *arguments: str | Path, cwd: Path) -> str:
        return run(self.folder / "bin" / program, *arguments, cwd=cwd)

    @property
    def size_bytes(self) -> int:
        files = (path.lstat() for path in self.folder.rglob("*"))
        return sum(found.st_blocks * 512 for found in files if stat.S_ISREG(found.st_mode))


@pytest.fixture(
    scope="module", params=os.environ.get("STAGELINE_TEST_WHEEL_PYTHONS", "").split() or [sys.executable]
)
def python(request: pytest.FixtureRequest) -> str:
    """A Python that Stageline supports."""
    program: str | None = shutil.which(request.param)
    if program is None:
        pytest.skip(f"needs {request.param}: give those of this machine as PYTHONS")
    return program


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, because a build leaves files there."""
    copy = tmp_path_factory.mktemp("source") / "stageline"
    built = (".venv*", ".*_cache", "build", "dist", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(".git", ".hypothesis", "data", *built))
    return copy


def make_wheel(source: Path, python: str, venv: Path, **settings: str) -> Path:
    """The wheel that `make wheel` writes."""
    shutil.rmtree(source / "dist", ignore_errors=True)
    words = [f"{name}={value}" for name, value in settings.items()]
    printed = run("make", "-s", "wheel", f"PYTHON={python}", f"VENV={venv}", *words, cwd=source)
    wheel = source / printed.strip()
    assert {path.name for path in wheel.parent.iterdir()} == {
        wheel.name,
        "constraints.txt",
        "requirements-gateway.txt",
    }
    return Path(shutil.copy(wheel, venv))


@pytest.fixture(scope="module")
def wheel(source: Path, python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(source, python, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def plain_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for every Python, without C kernels."""
    return make_wheel(source, sys.executable, tmp_path_factory.mktemp("plain"), KERNELS="off")


@contextmanager
def new_environment(python: str, folder: Path, *installs: Sequence[str | Path]) -> Iterator[Environment]:
    """Removed afterwards."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    begin = time.monotonic()
    for words in installs:
        run(folder / "bin" / "python", *PIP, "install", *words, cwd=folder.parent)
    environment = Environment(folder, time.monotonic() - begin)
    print(f"{folder.name}: {environment.seconds:.0f} s, {environment.size_bytes / 2**20:.0f} MiB")
    yield environment
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def installed(python: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """The wheel and its dependencies."""
    constraints = REPOSITORY / "constraints.txt"
    (torch,) = re.findall(r"^torch==.+$", constraints.read_text(), re.MULTILINE)
    folder = tmp_path_factory.mktemp("installed") / wheel.name.split("-")[2]
    common = ("--no-compile", "-c", constraints)
    with new_environment(python, folder, [*common, torch], [*common, wheel]) as environment:
        yield environment


@pytest.fixture(scope="module")
def bare(python: str, plain_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """The wheel without C kernels and the packages of hosts without a worker."""
    folder = tmp_path_factory.mktemp("bare") / f"{Path(python).name}-gateway"
    pinned = REPOSITORY / "requirements-gateway.txt"
    with new_environment(python, folder, ["--no-deps", "-r", pinned, plain_wheel]) as environment:
        yield environment


def test_the_wheel_has_every_file_of_its_packages_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    folders = {name: REPOSITORY / name for name in PACKAGES}
    folders["stageline_rpc"] = REPOSITORY / "proto" / "stageline_rpc"
    wanted = {
        (Path(name) / file.relative_to(folder)).as_posix()
        for name, folder in folders.items()
        for file in folder.rglob("*")
        if file.is_file()
    }
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    assert {name for name in wanted if not NOT_INSTALLED.search(name)} == {
        name for name in names if not NOT_INSTALLED.search(name)
    }


@pytest.mark.parametrize(
    "name",
    [
        *("deploy/observability/dashboard.json", "deploy/observability/alerts.yaml"),
        *("stageline_rpc/v1/inference.proto", "builtin_model/self_check.json"),
        *("coordinator/dashboard/static/index.html", "gateway/page/static/index.html"),
    ],
)
def test_the_wheel_has_what_is_no_module(wheel: Path, name: str) -> None:
    assert name in zipfile.ZipFile(wheel).namelist()


def test_a_run_writes_what_the_page_about_uninstalling_says(installed: Environment, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "installing.md").read_text()
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    settings = ("-u", "XDG_CACHE_HOME", "-u", "XDG_STATE_HOME", f"HOME={home}", f"TMPDIR={temporary}")
    run("env", *settings, installed.folder / "bin" / "stageline", "demo", cwd=tmp_path)
    files = [path.relative_to(home) for path in home.rglob("*") if path.is_file()]
    depth = {".cache": 3, ".local": 4}
    found = {"/".join(("~", *path.parts[: depth.get(path.parts[0], 1)])) for path in files}
    named = {re.sub(r"/[0-9a-f]{64}$", "/DIGEST", name) for name in found}
    assert "~/.cache/stageline/DIGEST" in named
    assert [name for name in sorted(named) if f"`{name}`" not in page] == []
    assert list(temporary.glob("stageline*")) == []


def test_a_wheel_is_for_the_machines_that_its_name_says(wheel: Path, plain_wheel: Path) -> None:
    for found, has_kernels in ((wheel, True), (plain_wheel, False)):
        libraries = [entry for entry in zipfile.ZipFile(found).namelist() if entry.endswith(".so")]
        assert len(libraries) == has_kernels
        assert found.name.endswith("-py3-none-any.whl") != has_kernels


def test_a_wheel_without_kernels_is_made_on_request_only(source: Path, tmp_path: Path) -> None:
    command = ("make", "-s", "wheel", f"PYTHON={sys.executable}", f"VENV={tmp_path}")
    environment = {**outside(), "CC": "/bin/false"}
    done = subprocess.run(
        command, cwd=source, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode != 0
    assert (
        "no C compiler made the kernels; install gcc and Python's headers, or run: make wheel" in done.stdout
    )


def test_the_installed_wheel_runs_the_demo(installed: Environment, plain_wheel: Path, tmp_path: Path) -> None:
    home = installed.run("python", "-c", "import deploy; print(*deploy.__path__)", cwd=tmp_path).strip()
    assert Path(home).is_relative_to(installed.folder)
    missing = ("-c", "from stage_worker.model import kernels; print(kernels.missing_because())")
    assert "not built" not in installed.run("python", *missing, cwd=tmp_path)
    for _ in ("with kernels", "without"):
        output = installed.run("stageline", "demo", cwd=tmp_path)
        assert "answers a client of OpenAI's API" in output
        assert "All processes stopped." in output
        installed.run("python", *PIP, "install", "--no-deps", "--force-reinstall", plain_wheel, cwd=tmp_path)
    assert "not built" in installed.run("python", *missing, cwd=tmp_path)


@contextmanager
def started(*command: str | Path, cwd: Path) -> Iterator[Callable[[str], str]]:
    """A program in the background; yields a wait for a line of its output, which returns the first group."""
    log = cwd / "output"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=outside(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )

    def read(pattern: str) -> str:
        wait_until(
            lambda: re.search(pattern, log.read_text()) is not None or process.poll() is not None,
            timeout_s=120,
        )
        found = re.search(pattern, log.read_text())
        assert found is not None, log.read_text()
        return found[1]

    try:
        yield read
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130), log.read_text()
    finally:
        process.kill()
        process.wait()


def test_hosts_without_a_worker_need_no_torch(bare: Environment, tmp_path: Path) -> None:
    absent = "import importlib.util as u; print([n for n in ('torch', 'transformers') if u.find_spec(n)])"
    assert bare.run("python", "-c", absent, cwd=tmp_path) == "[]\n"
    up = ("up", "--mock", "step=1ms", "--workers", "2", "--listen", "127.0.0.1:0", "--gateway", "127.0.0.1:0")
    with started(bare.folder / "bin" / "stageline", *up, cwd=tmp_path) as read:
        url, address = read(r"OpenAI's API at (http://\S+)/v1"), read(r"Serving at (\S+)\.")
        text = bare.run("stageline", "generate", "Once", "--coordinator", address, cwd=tmp_path)
        assert text.strip()
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 4}).encode()
        asked = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4


def test_the_gateway_stage_of_the_image_has_no_torch(tmp_path: Path) -> None:
    """The steps of the stage, run here: in other folders, and with the files that the engine sends."""
    root, source = tmp_path / "root", tmp_path / "source"
    kept = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    built = shutil.ignore_patterns("__pycache__", "*.so")
    source.mkdir()
    for word, rest in image_stage("build-gateway"):
        if word == "COPY":
            what, where = rest.split()
            assert where == "."
            for name in kept if what == "." else [what]:
                if (REPOSITORY / name).is_dir():
                    shutil.copytree(REPOSITORY / name, source / name, ignore=built)
                else:
                    shutil.copy(REPOSITORY / name, source / name)
        elif word == "RUN":
            line = rest.replace("/opt/stageline", f"{root}/opt/stageline")
            run("sh", "-e", "-c", line.replace("python3 -m venv", f"{sys.executable} -m venv"), cwd=source)
        else:
            assert (word, rest) == ("WORKDIR", "/source")
    assert image_stage("gateway") == [("COPY", "--from=build-gateway /opt/stageline /opt/stageline")]
    program = root / "opt" / "stageline" / "bin" / "stageline"
    with started(
        program, "gateway", "--coordinator", "127.0.0.1:1", "--listen", "127.0.0.1:0", cwd=tmp_path
    ) as read:
        assert read(r"gateway: (bound) to ")
    assert not list((root / "opt").rglob("torch")) and not list((root / "opt").rglob("transformers"))
    size_bytes = sum(path.stat().st_size for path in (root / "opt").rglob("*") if path.is_file())
    assert size_bytes < 400 * 2**20


def image_stage(name: str) -> list[tuple[str, str]]:
    """Instructions of a stage of the image, without FROM."""
    text = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", IMAGE.read_text(), flags=re.MULTILINE))
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    (stage,) = (found for found in stages if found.splitlines()[0].endswith(f" AS {name}"))
    lines = [line for line in stage.splitlines()[1:] if line.strip()]
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("engine", RENDERERS)
def test_the_installed_wheel_renders_a_cluster(installed: Environment, engine: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(LEAST + "security: {insecure: true}\n")
    words = ("deploy", "render", engine, "-f", "cluster.yaml", "-o", "out")
    written = installed.run("stageline", *words, cwd=tmp_path).splitlines()
    assert written
    assert all((tmp_path / file).stat().st_size for file in written)
