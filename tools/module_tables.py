"""Writes the tables of modules in docs/structure.md from the first lines of the modules' docstrings.

python tools/module_tables.py [--check]
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "structure.md"
START, END = "<!-- modules: begin -->\n", "<!-- modules: end -->\n"
PACKAGES = (
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


def first_line(path: Path) -> str:
    """The first line of a module's docstring; empty without one."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n", 1)[0]


def table(folder: Path) -> str:
    """The table of one folder's modules; empty for a folder without modules."""
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    if not modules:
        return ""
    rows = "".join(f"| `{path.stem}` | {first_line(path)} |\n" for path in modules)
    return f"### {folder.relative_to(ROOT)}\n\n| module | owns |\n|---|---|\n{rows}\n"


def tables() -> str:
    """All tables, packages in the order of PACKAGES."""
    folders = [
        folder
        for package in PACKAGES
        for folder in (
            ROOT / package,
            *sorted(path.parent for path in (ROOT / package).rglob("*/__init__.py")),
        )
    ]
    return "".join(table(folder) for folder in folders)


def expected_text(text: str) -> str:
    """The document with up-to-date tables."""
    before, rest = text.split(START)
    return before + START + "\n" + tables() + END + rest.split(END)[1]


def main(arguments: list[str]) -> int:
    """The exit code: 1 where `--check` finds tables that differ."""
    text = DOCUMENT.read_text()
    expected = expected_text(text)
    if arguments == ["--check"]:
        return int(text != expected)
    DOCUMENT.write_text(expected)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
