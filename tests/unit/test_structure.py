"""docs/structure.md describes the modules and paths that exist."""

import re
import subprocess
import sys

from tests.repository import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "structure.md").read_text()
MODULE_TABLES = REPOSITORY / "tools" / "module_tables.py"


def test_the_tables_of_modules_are_up_to_date() -> None:
    check = subprocess.run([sys.executable, MODULE_TABLES, "--check"], check=False)
    assert check.returncode == 0, "run: python tools/module_tables.py"


def test_every_module_is_in_a_table() -> None:
    assert "| `state_machine` | " in DOCUMENT
    empty = re.findall(r"^\| `(\w+)` \|\s*\|$", DOCUMENT, flags=re.MULTILINE)
    assert not empty, f"modules without a docstring: {empty}"


def test_every_path_that_the_document_names_exists() -> None:
    paths = set(re.findall(r"`([a-z_]+/[\w./]*)`", DOCUMENT))
    missing = sorted(path for path in paths if not (REPOSITORY / path).exists())
    assert not missing
