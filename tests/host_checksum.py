"""The checksum of payloads on a device, by numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stage_worker.model.checksums import FIRST, PLACE, SECOND


def host_checksum(payload: bytes | memoryview) -> int:
    """Of a whole payload in memory of the host, by numpy: in [0, 2**64)."""
    words: NDArray[np.int64] = np.frombuffer(payload, "<i4").astype(np.int64)
    with np.errstate(over="ignore"):
        places = np.arange(1, 1 + len(words), dtype=np.int64) * np.int64(PLACE)
        mixed = (words + places) * np.int64(FIRST)
        mixed = (mixed ^ (mixed >> 32)) * np.int64(SECOND)
        return int((mixed ^ (mixed >> 29)).sum(dtype=np.int64)) % (1 << 64)
