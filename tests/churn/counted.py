"""`python -m tests.churn.counted`: the `stageline` command, which counts its objects on SIGUSR1.

Each count is one line of JSON in the file that STAGELINE_TEST_CHURN_COUNTS names. Objects from before
the coordinator listened are frozen (`gc.freeze`) and do not count.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

from stageline.__main__ import main

COUNTS_VARIABLE = "STAGELINE_TEST_CHURN_COUNTS"
ALLOCATED = "allocated blocks"
"""All blocks of Python's allocator, including objects that the collector does not track."""


def count_objects() -> dict[str, int]:
    """Live objects by type, after a collection."""
    gc.collect()
    allocated = sys.getallocatedblocks()
    counts = Counter(type(value).__qualname__ for value in gc.get_objects())
    return {ALLOCATED: allocated, **counts}


def allocator_bytes() -> dict[str, int]:
    """Bytes in use by glibc's allocator, and bytes held free (fragmentation, not a leak)."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _Mallinfo2
    found = info()
    return {"in_use": found.uordblks + found.hblkhd, "free": found.fordblks}


class _Mallinfo2(ctypes.Structure):
    """malloc.h"""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in (*_names, "keepcost")]


def _append_counts(path: Path) -> None:
    line = json.dumps({"objects": count_objects(), "allocator": allocator_bytes()})
    with path.open("a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    counts_path = os.environ.get(COUNTS_VARIABLE)
    if counts_path is not None:
        signal.signal(signal.SIGUSR1, lambda *_: _append_counts(Path(counts_path)))
    sys.exit(main())
