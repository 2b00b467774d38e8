"""Packages and type information in the installed wheel, and packages in the image."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from stageline.version import VERSION
from tests.repository import REPOSITORY
from tools.gateway_requirements import FILE, content

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PACKAGES_FOUND = PROJECT["tool"]["setuptools"]["packages"]["find"]


def folders_of_packages() -> dict[str, Path]:
    """The packages that a wheel has, by dotted name."""
    return {
        name: REPOSITORY / root / Path(*name.split("."))
        for root in PACKAGES_FOUND["where"]
        for name in find_packages(str(REPOSITORY / root), include=PACKAGES_FOUND["include"])
    }


@pytest.mark.parametrize("name", [name for name in folders_of_packages() if "." not in name])
def test_every_package_of_the_wheel_has_a_py_typed_marker(name: str) -> None:
    assert (folders_of_packages()[name] / "py.typed").exists()


def test_the_wheel_has_every_package_with_a_python_file_as_a_package_of_its_own() -> None:
    # A folder without __init__.py is found at run time all the same, but mypy does not see its content.
    folders = {
        file.parent
        for package in PROJECT["tool"]["importlinter"]["root_packages"]
        for root in PACKAGES_FOUND["where"]
        for file in (REPOSITORY / root / package).rglob("*.py")
    }
    assert folders == set(folders_of_packages().values())


def test_the_wheel_takes_the_markers_and_the_stubs_along() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    assert {"py.typed", "*.pyi"} <= set(data)


@pytest.mark.parametrize(
    ("file", "extra"),
    [
        ("checkpoint/errors.py", "transformers"),
        ("deploy/engines/ray.py", "ray"),
        ("stageline/load/report.py", "bench"),
        ("weights/store_source.py", "object-stores"),
    ],
)
def test_an_error_names_the_package_of_an_extra_as_pip_finds_it(file: str, extra: str) -> None:
    # Stageline is on no index, so that pip finds no 'stageline[ray]'.
    (requirement,) = PROJECT["project"]["optional-dependencies"][extra]
    assert f"pip install '{requirement}'" in (REPOSITORY / file).read_text()


def test_no_text_installs_from_an_index_what_is_on_none() -> None:
    folders = ("docs", *PROJECT["tool"]["importlinter"]["root_packages"])
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    texts = {
        path: path.read_text()
        for path in (*paths, REPOSITORY / "README.md", REPOSITORY / "SECURITY.md")
        if path.suffix in (".md", ".py", ".yaml")
    }
    assert len(texts) > 500
    found = re.compile(r"pip install [^\n]*'stageline\[")
    assert [str(path) for path, text in texts.items() if found.search(text)] == []


def test_the_page_about_installing_names_wheels_of_this_version() -> None:
    page = (REPOSITORY / "docs" / "installing.md").read_text()
    assert set(re.findall(r"stageline-(\d[^-]*)-", page)) == {VERSION}


@pytest.mark.parametrize(("target", "has_tools"), [("demo", False), ("test", True)])
def test_make_installs_development_tools_for_tests_only(target: str, has_tools: bool, tmp_path: Path) -> None:
    command = ("make", "--dry-run", target, f"VENV={tmp_path}/venv")
    steps = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    (torch,) = re.findall(r"^torch==.+$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    installs = re.findall(r"pip install .* -c constraints\.txt (.+)$", steps, re.MULTILINE)
    assert installs == [torch, "-e '.[dev]'" if has_tools else "-e '.'"]


def test_requirements_of_hosts_without_a_worker_are_those_of_the_package() -> None:
    assert FILE.read_text() == content(), "run: python tools/gateway_requirements.py"
    names = {line.split("==")[0] for line in FILE.read_text().splitlines() if line[0] != "#"}
    assert {"grpcio", "fastapi", "tokenizers", "Jinja2"} <= names
    assert not {"torch", "transformers", "safetensors", "regex", "sympy"} & names


def test_the_image_is_built_from_every_package() -> None:
    sources = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().split() if line[0] == "!"}
    folders = {folder.relative_to(REPOSITORY).parts[0] for folder in folders_of_packages().values()}
    assert folders <= sources


def test_the_tested_versions_leave_those_that_a_build_of_torch_needs_to_it() -> None:
    # Builds of torch for CUDA require one version of triton and of each library of NVIDIA.
    pinned = {
        line.split("==")[0].lower() for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    }
    assert not {name for name in pinned if name == "triton" or name.startswith(("nvidia-", "cuda-"))}
