"""docs/structure.md names every module of the product and no module that is gone."""

import re

import pytest

from tests.repository import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "structure.md").read_text()
PACKAGES = (
    "coordinator",
    "coordinator/api",
    "coordinator/cluster",
    "coordinator/dashboard",
    "coordinator/journal",
    "coordinator/observing",
    "coordinator/planning",
    "coordinator/requests",
    "coordinator/scheduling",
    "coordinator/text",
    "coordinator/tracing",
    "stage_worker",
    "stage_worker/mock",
    "stage_worker/models",
    "stage_worker/sampling",
    "telemetry",
    "telemetry/trace_view",
    "telemetry/metrics",
    "wire",
    "kvcache",
    "checkpoint",
    "stageline/load",
    "deploy",
)


def modules_in_document(package: str) -> set[str]:
    section = DOCUMENT.split(f"\n### {package}\n", 1)[1].split("\n### ", 1)[0]
    first_cells = re.findall(r"^\| (`[^|]*) \|", section, flags=re.MULTILINE)
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_document_names_exactly_the_modules_of(package: str) -> None:
    modules = {path.stem for path in (REPOSITORY / package).glob("*.py")} - {"__init__"}
    assert modules_in_document(package) == modules


def test_every_path_that_the_document_names_exists() -> None:
    paths = set(re.findall(r"`([a-z_]+/[\w./]*)`", DOCUMENT))
    missing = sorted(path for path in paths if not (REPOSITORY / path).exists())
    assert not missing
