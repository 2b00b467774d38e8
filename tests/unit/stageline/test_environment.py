"""Variables of the environment that nothing reads."""

from __future__ import annotations

import pytest

from stageline.cli import main
from stageline.cli.commands import unknown_variable


@pytest.mark.parametrize("command", ["coordinator", "worker", "status", "generate"])
def test_a_misspelt_variable_is_an_error_with_the_nearest_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAGELINE_STAGSE", "3")
    assert main([command]) == 2
    assert capsys.readouterr() == (
        "",
        "stageline: error[USAGE]: no command reads the environment variable STAGELINE_STAGSE, "
        "the nearest known one is STAGELINE_STAGES\n",
    )


def test_variables_of_other_processes_and_of_tests_are_no_error() -> None:
    """A host has one environment for its coordinator, worker and gateway."""
    known = ("STAGELINE_STAGES", "STAGELINE_MEMORY", "STAGELINE_KEYS_FILE", "STAGELINE_LOG_FORMAT")
    assert unknown_variable(known) is None
    assert unknown_variable(("STAGELINE_COORDINATOR", "STAGELINE_GATEWAY", "STAGELINE_TLS_DIR")) is None
    assert unknown_variable(("STAGELINE_TEST_FAMILIES", "OTHER_STAGES")) is None
    assert unknown_variable(("STAGELINE_ZZZZZZZZ",)) == (
        "no command reads the environment variable STAGELINE_ZZZZZZZZ"
    )
