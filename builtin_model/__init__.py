"""A small trained model that ships with the project, so that the first command needs no download."""

from pathlib import Path

MODEL_NAME = "stageline-stories"
MODEL_DIRECTORY: Path = Path(__file__).parent / "weights"

__all__ = ["MODEL_DIRECTORY", "MODEL_NAME"]
