"""Writes requirements-gateway.txt: the packages of hosts without a worker, as constraints.txt pins them.

They are the dependencies of pyproject.toml and theirs, on every Python that Stageline supports, without torch
and transformers and those that only these need. `--check` compares instead.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[1]
FILE = ROOT / "requirements-gateway.txt"
LEFT_OUT = frozenset({"torch", "transformers"})
PYTHONS = ("3.11", "3.12", "3.13")
HEAD = """\
# Packages of hosts without a worker (gateways, coordinators, clients), without torch and transformers:
# pip install --no-deps -r requirements-gateway.txt stageline-VERSION-py3-none-any.whl
# Written by tools/gateway_requirements.py.
"""


def closure(wanted: Iterable[str], environment: Mapping[str, str]) -> set[NormalizedName]:
    """Names of the installed packages that `wanted` needs in an environment of markers, without LEFT_OUT."""
    found: dict[NormalizedName, set[str]] = {}
    left = [Requirement(text) for text in wanted]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if name in LEFT_OUT or (marker is not None and not marker.evaluate(dict(environment))):
            continue
        new = {"", *requirement.extras} - found.setdefault(name, set())
        found[name] |= new
        left += _needed(name, new, environment)
    return set(found)


def _needed(name: str, extras: Iterable[str], environment: Mapping[str, str]) -> Iterator[Requirement]:
    """Requirements of the package that hold with one of `extras`, without their markers."""
    for extra in extras:
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            marker, requirement.marker = requirement.marker, None
            if marker is None or marker.evaluate({**environment, "extra": extra}):
                yield requirement


def content() -> str:
    """The file. Raises KeyError for a package that constraints.txt does not pin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names: set[NormalizedName] = set()
    for python in PYTHONS:
        environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        names |= closure(project["dependencies"], environment)
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {canonicalize_name(line.partition("==")[0]): line for line in lines}
    return HEAD + "".join(f"{pins[name]}\n" for name in sorted(names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the file differs")
    if not parser.parse_args().check:
        FILE.write_text(content())
        return 0
    if FILE.read_text() == content():
        return 0
    print("requirements-gateway.txt has drifted; run: python tools/gateway_requirements.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
