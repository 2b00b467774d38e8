"""The operator token that a coordinator generates."""

from pathlib import Path

import pytest

from coordinator.api.call_context import TokenFile


def test_a_token_that_cannot_be_written_names_the_remedies(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in place of the directory")
    with pytest.raises(OSError, match="give --token-file FILE, or set XDG_STATE_HOME") as error:
        TokenFile(tmp_path / "state" / "tokens").write("127.0.0.1:7480")
    assert f"cannot be written to {tmp_path}/state/tokens/127.0.0.1_7480" in str(error.value)
