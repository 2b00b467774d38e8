"""Where the repository is, and the data that tests read from it."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DATA = REPOSITORY / "tests" / "data"
STORIES260K = DATA / "stories260k"
"""A trained checkpoint, with the tokens that an independent implementation generates."""
