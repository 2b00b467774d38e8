"""What a run needs from its environment: packages that are missing, and the device. Standard library only."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROJECT_FILE = Path(__file__).resolve().parents[2] / "pyproject.toml"
VERSIONS_OF = ("torch", "triton", "transformers", "grpcio", "protobuf", "numpy", "uvloop")
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?:>=(?P<least>[0-9.]+))?[^;]*(?:;(?P<marker>.*))?")
BRING = (
    "bring them as wheels: pip download -d wheels PACKAGE ... on a host with network, "
    "then pip install --no-index --find-links wheels PACKAGE ... here"
)


def missing_packages(project_file: Path = PROJECT_FILE) -> list[str]:
    """Requirements of the project that this Python does not meet, such as "uuid6" or "grpcio>=1.85.1"."""
    requirements = tomllib.loads(project_file.read_text())["project"]["dependencies"]
    return [text for text in map(_unmet, requirements) if text is not None]


def _unmet(requirement: str) -> str | None:
    found = _REQUIREMENT.fullmatch(requirement)
    assert found is not None, f"requirement {requirement!r} of pyproject.toml"
    name, least = found["name"], found["least"]
    try:
        installed = version(name)
    except PackageNotFoundError:
        return name
    if least is not None and _numbers(installed) < _numbers(least):
        return f"{name}>={least} (installed: {installed})"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 11, 0) of 2.11.0+cu130."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def versions() -> dict[str, str]:
    """Versions of the packages that figures depend on, if they are installed."""
    found = {}
    for name in VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def missing_compiler() -> str | None:
    """Triton compiles a launcher per kernel with the host's C compiler."""
    if any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return None
    return "no C compiler found (cc, gcc or clang): Triton kernels cannot be launched"


def nvidia_smi(query: str) -> list[str]:
    """Values of `nvidia-smi --query-gpu` for the first GPU; empty where it is missing."""
    try:
        run = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [value.strip() for value in run.stdout.strip().split(",")]
