"""What stages have spent on a step, as it travels.

8 bytes: when the sender had this ready to send, in microseconds of the coordinator's clock since 1970, or 0;
then 16 bytes for each stage, from FIRST on: hop (signed), receive, wait, compute. All of it little-endian.
"""

import struct
from collections.abc import Sequence

from wire.errors import StepFault, StepFaultKind
from wire.steps import StageTime

_MOST_US = 0xFFFFFFFF
_MOST_SIGNED_US = 0x7FFFFFFF
_READY_AT = struct.Struct("<Q")
_ONE = struct.Struct("<iIII")


def encode_stage_times(times: Sequence[StageTime], *, ready_at_us: int = 0) -> bytes:
    """Nothing where nothing is known; what is longer than 71 minutes (hops: 35) is cut there."""
    if not times and not ready_at_us:
        return b""
    return _READY_AT.pack(ready_at_us) + b"".join(
        [
            _ONE.pack(
                max(-_MOST_SIGNED_US, min(each.hop_us, _MOST_SIGNED_US)),
                min(each.receive_us, _MOST_US),
                min(each.wait_us, _MOST_US),
                min(each.compute_us, _MOST_US),
            )
            for each in times
        ]
    )


def decode_stage_times(data: bytes, *, num_stages: int | None = None) -> tuple[tuple[StageTime, ...], int]:
    """Those of `num_stages` stages (None: of any number), and when the sender had this ready; nothing and 0
    where it does not tell.

    Raises StepFault UNDECODABLE for another number, and for half a stage.
    """
    if not data:
        return (), 0
    size_bytes = len(data) - _READY_AT.size
    expected = size_bytes // _ONE.size * _ONE.size if num_stages is None else num_stages * _ONE.size
    if size_bytes < 0 or size_bytes != expected:
        raise StepFault(
            StepFaultKind.UNDECODABLE,
            f"times of stages in {len(data)} bytes, expected {_READY_AT.size + max(0, expected)}: "
            f"{_READY_AT.size}, and {_ONE.size} for each stage",
        )
    (ready_at_us,) = _READY_AT.unpack_from(data)
    times = tuple(
        [
            StageTime(wait_us, compute_us, hop_us, receive_us)
            for hop_us, receive_us, wait_us, compute_us in _ONE.iter_unpack(data[_READY_AT.size :])
        ]
    )
    return times, ready_at_us
