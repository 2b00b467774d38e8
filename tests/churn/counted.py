"""`python -m tests.churn.counted`: the `stageline` command, which counts its objects on SIGUSR1.

Each count is one line of JSON in the file that STAGELINE_CHURN_COUNTS names. Objects from before
the coordinator listened are frozen (`gc.freeze`) and do not count.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from stageline.entry import main

COUNTS_VARIABLE = "STAGELINE_CHURN_COUNTS"
ALLOCATED = "allocated blocks"
"""All blocks of Python's allocator, including objects that the collector does not track."""


def count_objects() -> dict[str, int]:
    """Live objects by type, after a collection."""
    gc.collect()
    allocated = sys.getallocatedblocks()
    counts = Counter(type(value).__qualname__ for value in gc.get_objects())
    return {ALLOCATED: allocated, **counts}


def _append_counts(path: Path) -> None:
    line = json.dumps(count_objects())
    with path.open("a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    counts_path = os.environ.get(COUNTS_VARIABLE)
    if counts_path is not None:
        signal.signal(signal.SIGUSR1, lambda *_: _append_counts(Path(counts_path)))
    sys.exit(main())
