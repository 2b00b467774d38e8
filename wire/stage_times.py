"""What stages have spent on a step, as it travels: two u32 for each stage, little-endian."""

import struct
from collections.abc import Sequence

from wire.errors import StepFault, StepFaultKind
from wire.steps import StageTime

_MOST_US = 0xFFFFFFFF
_ONE = struct.Struct("<II")


def encode_stage_times(times: Sequence[StageTime]) -> bytes:
    """8 bytes per stage; what is longer than 71 minutes is cut there."""
    return b"".join(
        [_ONE.pack(min(each.wait_us, _MOST_US), min(each.compute_us, _MOST_US)) for each in times]
    )


def decode_stage_times(data: bytes, *, num_stages: int | None = None) -> tuple[StageTime, ...]:
    """Those of `num_stages` stages, or none at all where the sender does not tell.

    Raises StepFault UNDECODABLE for another number, and for half a stage.
    """
    expected = len(data) // _ONE.size * _ONE.size if num_stages is None else num_stages * _ONE.size
    if data and len(data) != expected:
        raise StepFault(
            StepFaultKind.UNDECODABLE,
            f"times of stages in {len(data)} bytes, expected {expected}, {_ONE.size} for each stage",
        )
    return tuple([StageTime(*pair) for pair in _ONE.iter_unpack(data)])
