"""Which ranges of a file to request: tensors are cut into pieces, neighbouring pieces joined to ranges.

`TransferPolicy` has every size, wait and limit of the transfer of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from checkpoint.headers import TensorEntry

MiB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPolicy:
    """Sizes in bytes, times in seconds."""

    num_connections: int = 12
    """One stream of an object store gives some 50 MB/s; more than 16 gain nothing there."""
    range_bytes: int = 16 * MiB
    """Maximum range of one request: amortises its round trip, and is small enough to balance connections."""
    gap_bytes: int = MiB
    """Unwanted bytes that are fetched rather than making two requests."""
    max_waste: float = 0.005
    """Maximum share of such bytes in a request."""
    piece_bytes: int = MiB
    """Maximum of bytes that are written, hashed and recorded at once."""
    max_lost: float = 0.001
    """Share of a fetch that a kill may lose: smaller fetches record their bytes in smaller parts."""
    min_part_bytes: int = 4096
    """Of a part of a piece: to record one takes as long as to receive some KiB."""
    min_part_s: float = 0.02
    """Between two parts of a connection: a fast one receives larger parts than it may lose."""
    sync_bytes: int = 256 * MiB
    """Bytes of a connection after which they are flushed: hashes find what a loss of power takes."""
    give_up_s: float = 300.0
    """A transfer without a byte on any connection for this time fails."""
    first_wait_s: float = 0.5
    """Before the second try of a range; doubles with each further one."""
    max_wait_s: float = 30.0
    max_retry_after_s: float = 120.0
    """Maximum wait that a source may ask for; less than `give_up_s`, so that it is asked again."""
    max_damaged: int = 3
    """Fetches of a tensor whose bytes do not match the manifest, before its source counts as damaged."""

    def wait_s(self, num_failures: int) -> float:
        """Wait after a range has failed this often in a row."""
        return min(self.max_wait_s, self.first_wait_s * 2.0 ** min(num_failures - 1, 16))

    def wait_after_s(self, asked_s: float | None, num_failures: int) -> float:
        """Wait before another try; one that the source asks for counts up to a limit."""
        if asked_s and asked_s <= self.max_retry_after_s:
            return min(asked_s, self.max_wait_s)
        return self.wait_s(num_failures)

    def part_bytes(self, fetch_bytes: int) -> int:
        """Bytes after which a connection records what it has received, but for `min_part_s`."""
        share = int(fetch_bytes * self.max_lost / self.num_connections)
        return min(max(share, self.min_part_bytes), self.piece_bytes)


DEFAULT_TRANSFER = TransferPolicy()


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Bytes [begin, end) of `file`, all of one tensor, with one hash; the first ones may be in the cache."""

    file: str
    begin: int
    end: int
    tensor: str
    present_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def start(self) -> int:
        """Position of the first missing byte."""
        return self.begin + self.present_bytes

    @property
    def missing_bytes(self) -> int:
        return self.end - self.start


def pieces_of(tensor: str, entry: TensorEntry, piece_bytes: int) -> Iterator[TensorPiece]:
    """Cut a tensor; an empty one has no pieces."""
    for begin in range(entry.begin, entry.end, piece_bytes):
        yield TensorPiece(entry.file, begin, min(begin + piece_bytes, entry.end), tensor)


@dataclass(frozen=True, slots=True)
class FileRange:
    """One request: missing bytes of pieces of one file in order, and the gaps between them."""

    pieces: tuple[TensorPiece, ...]

    @property
    def file(self) -> str:
        return self.pieces[0].file

    @property
    def begin(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        return self.pieces[-1].end


def ranges_of(pieces: Iterable[TensorPiece], policy: TransferPolicy) -> list[FileRange]:
    """Join pieces to requests, within the policy's limits of size and of bytes that nobody wants."""
    ranges: list[FileRange] = []
    joined: list[TensorPiece] = []
    wasted = 0
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.begin)):
        if joined:
            gap = piece.start - joined[-1].end
            size = piece.end - joined[0].start
            is_near = piece.file == joined[0].file and 0 <= gap <= policy.gap_bytes
            if is_near and size <= policy.range_bytes and wasted + gap <= size * policy.max_waste:
                joined.append(piece)
                wasted += gap
                continue
            ranges.append(FileRange(tuple(joined)))
        joined, wasted = [piece], 0
    if joined:
        ranges.append(FileRange(tuple(joined)))
    return ranges
