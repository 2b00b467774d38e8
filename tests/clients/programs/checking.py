"""Runs the checks of a program, `python PROGRAM URL FACTS.json`, with the Python of its environment."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

URL = sys.argv[1]
FACTS = json.loads(Path(sys.argv[2]).read_text())
MODEL = FACTS["model"]

Check = tuple[str, Callable[[], object]]


def checks_of(program: Mapping[str, Any]) -> list[Check]:
    """The functions without parameters that are called `check_NAME`."""
    return [
        (name, value)
        for name, value in program.items()
        if name.startswith("check_") and not value.__code__.co_argcount
    ]


def run_checks(checks: Iterable[Check]) -> None:
    """Run all checks; exit with 1 after the last one if one fails."""
    has_failed = False
    for name, check in checks:
        try:
            check()
        except Exception:
            has_failed = True
            print(f"FAILED: {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"passed: {name}", flush=True)
    sys.exit(1 if has_failed else 0)
