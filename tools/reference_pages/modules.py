"""docs/reference/modules.md: the first lines of the modules' docstrings."""

import ast
from pathlib import Path

from tools.reference_pages.markdown import GENERATED, table
from tools.reference_pages.source import ROOT

_MODULES = f"""\
# Modules

Every module and what it owns, by folder. {GENERATED}
[architecture.md](../architecture.md) shows how the folders depend on each other.

"""
_PACKAGES = (
    "coordinator",
    "text",
    "stage_worker",
    "wire",
    "telemetry",
    "kvcache",
    "checkpoint",
    "deploy",
    "stageline",
)


def modules() -> str:
    """The first lines of the modules' docstrings."""
    folders = [
        folder
        for package in _PACKAGES
        for folder in (
            ROOT / package,
            *sorted(path.parent for path in (ROOT / package).rglob("*/__init__.py")),
        )
    ]
    return _MODULES + "\n".join(filter(None, map(_folder_section, folders)))


def _folder_section(folder: Path) -> str:
    """Empty for a folder without modules."""
    paths = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    rows = [(f"`{path.stem}`", _first_line(path)) for path in paths]
    return f"## {folder.relative_to(ROOT)}\n\n{table(('module', 'owns'), rows)}" if rows else ""


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return (docstring or "").split("\n", 1)[0]
