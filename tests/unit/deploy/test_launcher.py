"""The file of a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import ClusterFailed
from deploy.launcher import Launcher


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"pid": "x", "started_s": 1}', '{"pid": -5, "started_s": 1.0}']
)
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "stories.json"
    path.write_text(text)
    with pytest.raises(ClusterFailed, match=r"stories\.json cannot be read: .*: delete it"):
        Launcher(path).stop(timeout_s=1)
