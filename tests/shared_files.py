"""Files that lie beside the repository and are not part of it; tests that want them skip without."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_path(relative: str) -> Path:
    """`../shared/<relative>` (or under STAGELINE_SHARED); skips the test when it is not there."""
    root = Path(os.environ.get("STAGELINE_SHARED", REPOSITORY.parent / "shared"))
    path = root / relative
    if not path.exists():
        pytest.skip(f"{path} is not there; it is not part of the project")
    return path
