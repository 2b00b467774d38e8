"""The wheel, installed in an environment without the source tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.engines import RENDERERS
from tests.repository import REPOSITORY
from tests.unit.deploy.cluster_files import LEAST
from tests.unit.test_packaging import PROJECT

pytestmark = pytest.mark.deploy
PACKAGES = PROJECT["tool"]["importlinter"]["root_packages"]
PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")
NOT_INSTALLED = re.compile(r"\.(c|so)$|(^|/)__pycache__/|^deploy/image/")
"""Sources of extension modules and of the image, and what was built in the source tree."""
TIMEOUT_S = 900.0


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program without this environment's variables for Python. Returns its standard output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the source tree, because a build leaves files there."""
    source, out = tmp_path_factory.mktemp("source") / "stageline", tmp_path_factory.mktemp("wheel")
    built = (".venv*", ".*_cache", "build", "dist", "*.egg-info", "__pycache__", "*.so")
    left_out = shutil.ignore_patterns(".git", ".hypothesis", "data", *built)
    shutil.copytree(REPOSITORY, source, ignore=left_out)
    run(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", out, ".", cwd=source)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The programs of an environment with the wheel and its dependencies; removed afterwards."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", environment, cwd=wheel.parent)
    constraints = REPOSITORY / "constraints.txt"
    (torch,) = re.findall(r"^torch==.+$", constraints.read_text(), re.MULTILINE)
    for wanted in (torch, str(wheel)):
        run(
            environment / "bin" / "python",
            *PIP,
            "install",
            "--no-compile",
            "-c",
            constraints,
            wanted,
            cwd=wheel.parent,
        )
    yield environment / "bin"
    shutil.rmtree(environment)


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


def test_the_installed_wheel_runs_the_demo(installed: Path, tmp_path: Path) -> None:
    home = run(installed / "python", "-c", "import deploy; print(*deploy.__path__)", cwd=tmp_path).strip()
    assert Path(home).is_relative_to(installed.parent)
    output = run(installed / "stageline", "demo", cwd=tmp_path)
    assert "answers a client of OpenAI's API" in output
    assert "All processes stopped." in output


@pytest.mark.parametrize("engine", RENDERERS)
def test_the_installed_wheel_renders_a_cluster(installed: Path, engine: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(LEAST + "security: {insecure: true}\n")
    command = (installed / "stageline", "deploy", "render", engine, "-f", "cluster.yaml", "-o", "out")
    written = run(*command, cwd=tmp_path).splitlines()
    assert written
    assert all((tmp_path / file).stat().st_size for file in written)
