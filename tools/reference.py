"""Writes docs/models.md and docs/reference/ from the code.

python tools/reference.py [--check]
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.reference_pages import cluster_file, errors, flags, limits, models, modules, python_api, telemetry
from tools.reference_pages.source import ROOT

DIRECTORY = ROOT / "docs" / "reference"

DOCUMENTS: dict[str, Callable[[], str]] = {
    "../models": models.models,
    "flags": flags.flags,
    "metrics": telemetry.metrics,
    "spans": telemetry.spans,
    "errors": errors.errors,
    "python": python_api.python,
    "limits": limits.limits,
    "cluster-file": cluster_file.cluster_file,
    "modules": modules.modules,
}


def main(arguments: list[str]) -> int:
    """The exit code: 1 where `--check` finds documents that differ, which it names."""
    DIRECTORY.mkdir(exist_ok=True)
    differing = []
    for name, document in DOCUMENTS.items():
        path, expected = (DIRECTORY / f"{name}.md").resolve(), document()
        if not path.exists() or path.read_text(encoding="utf-8") != expected:
            differing.append(str(path.relative_to(ROOT)))
            if arguments != ["--check"]:
                path.write_text(expected, encoding="utf-8")
    if arguments != ["--check"] or not differing:
        return 0
    print(f"not up to date, run python tools/reference.py: {', '.join(differing)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
