"""Packages and type information in the installed wheel, and packages in the image."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from tests.repository import REPOSITORY

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
