"""A small trained model that ships with the project, so that the first command needs no download."""

from pathlib import Path

MODEL_NAME = "stageline-stories"
MODEL_DIRECTORY: Path = Path(__file__).parent / "weights"

SELF_CHECK_FILE: Path = Path(__file__).parent / "self_check.json"
"""Its output for a short prompt, recorded by `python -m tools.record_reference`."""

__all__ = ["MODEL_DIRECTORY", "MODEL_NAME", "SELF_CHECK_FILE"]
