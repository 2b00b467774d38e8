"""Sizes of the memory in which steps travel: between a host and its GPU, pinned on the host with twins on the
device, and between two stages on one host, in slots that both have mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from checkpoint.boundary import BoundaryTensor
from wire.tensors import WireDType, payload_bytes

NUM_SLOTS = 4
"""Of a ring: a step that is uploaded, one that is computed, one that is downloaded, and one that is sent."""
MAX_EDIT_BYTES = 2 << 20
"""Of the edits of a step's rows that a device samples: 100,000 distinct tokens with two penalties each."""
_ALIGNMENT = 64
"""Bytes, for any dtype and for coalesced reads."""
NUM_HOP_SLOTS = 8
"""Of a hop: payloads that are written and not returned; then the sender waits."""
HOP_DATA_OFFSET = 64
"""Of the payload in a hop's slot, behind its stamp."""
PAGE_BYTES = 4096
WORD_BYTES = 4
"""Of a device's checksum: payloads stay there if they are whole words."""


def hop_slot_bytes(max_bytes: int) -> int:
    """Size of a hop's slots for payloads of up to `max_bytes`."""
    return -(-(HOP_DATA_OFFSET + max_bytes) // PAGE_BYTES) * PAGE_BYTES


def hop_segment_bytes(max_bytes: int) -> int:
    """Size of all slots of a hop."""
    return NUM_HOP_SLOTS * hop_slot_bytes(max_bytes)


def aligned(num_bytes: int) -> int:
    """The next place for an array in staging memory."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingSizes:
    """Bytes of one step's arrays and of its output, at most."""

    input_bytes: int
    output_bytes: int

    @classmethod
    def of(
        cls,
        *,
        max_step_tokens: int,
        max_step_sequences: int,
        max_sequence_tokens: int,
        block_size: int,
        num_groups: int,
        has_head: bool,
        boundary: Sequence[BoundaryTensor],
        dtypes: Iterable[WireDType],
    ) -> StagingSizes:
        """For steps within these limits; hidden states come and go in `dtypes`."""
        num_tokens, num_rows = max_step_tokens, max_step_sequences
        pages_per_row = -(-max_sequence_tokens // block_size) + 1
        # Of each group: slots by write and by row, rows and pages that are written; rows, ranges and pages,
        # or an attention work list of half as wide elements.
        of_group = 10 * num_tokens + (13 + pages_per_row) * num_rows
        # Positions and token ids; rows of logits, and rows, parameters and top_k of random rows; rows and
        # slots of recurrent states.
        columns = 2 * num_tokens + 10 * num_rows + num_groups * of_group
        num_arrays = 32 + num_groups * (8 + num_rows) + len(boundary)
        states = [
            sum(
                aligned(payload_bytes(tensor.dtype or dtype, (num_tokens, tensor.width)))
                for tensor in boundary
            )
            for dtype in dtypes
        ]
        edit_bytes = MAX_EDIT_BYTES if has_head else 0
        return cls(
            input_bytes=8 * columns + edit_bytes + _ALIGNMENT * num_arrays + max(states),
            output_bytes=aligned(8 * num_rows) + _ALIGNMENT + max(states),
        )

    def with_input(self, num_bytes: int) -> StagingSizes:
        """These sizes, with an input that is larger by `num_bytes`."""
        return replace(self, input_bytes=self.input_bytes + num_bytes)

    @property
    def total_bytes(self) -> int:
        """Memory of all slots, on the device, and as much on the host."""
        return NUM_SLOTS * (self.input_bytes + self.output_bytes)
