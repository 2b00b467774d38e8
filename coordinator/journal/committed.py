"""Committed state of an SQLite database with a write-ahead log, read without changing a file.

SQLite itself takes the log up to its first invalid frame and says nothing about the frames behind it, and
the last connection that closes rewrites both files. So damage can only be told before SQLite opens them.
Format of the log: https://www.sqlite.org/fileformat2.html#walformat
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682
"""Its last bit is set if the words of the checksums are big-endian."""
_VERSION = 3_007_000
_MASK = 0xFFFFFFFF
_BLOCK_BYTES = 4096
_SECTOR_BYTES = 512
_VERSIONS_AT = slice(18, 20)
_WITH_LOG, _WITHOUT_LOG = b"\2\2", b"\1\1"

Checksum = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CommittedState:
    """A database file with the log's committed pages, `image`; empty if nothing was ever committed.

    `damage` tells why the log's end is not what a stopped process leaves, None if it is.
    `may_be_power_loss` means that a power failure of the host, which may write the log in any order, leaves
    such an end. `has_log_mode`: the file's header says that it has a log. `has_log`: there is one, with at
    least one frame.
    """

    image: bytes
    damage: str | None = None
    may_be_power_loss: bool = False
    has_log_mode: bool = True
    has_log: bool = True


def committed_state(path: Path) -> CommittedState:
    """Read `path` and `PATH-wal`. Raises OSError, and ValueError for files without a readable state."""
    database, log = _content(path), _content(Path(f"{path}-wal"))
    if not database:
        if log:
            raise ValueError(f"it is empty or missing, but its log has {len(log)} bytes")
        return CommittedState(b"")
    if database[_VERSIONS_AT] != _WITH_LOG:
        return CommittedState(database, has_log_mode=False)  # another program's, or without tables
    if len(log) < _HEADER.size:
        return CommittedState(_openable(database), has_log=False)
    if not any(log):
        return CommittedState(_openable(database), "its log has no content", may_be_power_loss=True)
    return _Log(log).applied_to(database)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _openable(database: bytes | bytearray) -> bytes:
    """The database as one without a log, which can be opened in memory."""
    image = bytearray(database)
    image[_VERSIONS_AT] = _WITHOUT_LOG
    return bytes(image)


@dataclass(frozen=True, slots=True)
class _Frame:
    """A page in the log. `num_pages` is the database's size if the frame ends a transaction, else 0.

    `is_valid`: SQLite would read it if all before it are valid. `is_whole`: its checksum is right, counted
    from the one in the frame before it, perhaps for another `num_pages`, and then `is_end`. `is_of_log`: its
    salts or its checksum are of this log. `is_former`: its salts are those that SQLite changes into this
    log's when the log begins again; frames of the former log follow until the first commit.
    """

    begin: int
    page: int
    num_pages: int
    is_valid: bool
    is_whole: bool
    is_end: bool
    is_of_log: bool
    is_former: bool

    @property
    def is_evidence(self) -> bool:
        """Whether a process that stops never leaves it behind an invalid frame or as one.

        Frames of this log that end no transaction can be from a write that failed.
        """
        return not self.is_former and (self.is_end or not self.is_of_log)


class _Log:
    """A write-ahead log. Raises ValueError for a damaged header."""

    def __init__(self, content: bytes) -> None:
        header: tuple[int, ...] = _HEADER.unpack_from(content)
        magic, version, self._page_bytes, _, *self._salts = header[:6]
        self._words = ">" if magic & 1 else "<"
        self._checksum = header[6], header[7]
        if (
            magic & ~1 != _MAGIC
            or version != _VERSION
            or self._checksum_of(content[: _HEADER.size - 8], (0, 0)) != self._checksum
        ):
            raise ValueError("the header of its log does not match its checksum")
        self._content = content
        self._frame_bytes = _FRAME.size + self._page_bytes
        one = struct.pack(f"{self._words}2I", 0, 1)
        self._slopes = self._checksum_of(one + bytes(self._page_bytes), (0, 0))
        self._frames = list(self._read())

    def applied_to(self, database: bytes) -> CommittedState:
        """The database with the transactions of all valid frames."""
        invalid = (index for index, frame in enumerate(self._frames) if not frame.is_valid)
        num_valid = next(invalid, len(self._frames))
        image = _openable(self._image(database, self._frames[:num_valid]))
        lost = self._lost(num_valid)
        if lost is None:
            return CommittedState(image, has_log=bool(self._frames))
        return CommittedState(
            image,
            f"frame {num_valid + 1} of {len(self._frames)} in its log is invalid, and frame {lost + 1} "
            "was written completely",
            may_be_power_loss=self._may_be_unwritten(num_valid, lost),
        )

    def _image(self, database: bytes, frames: Sequence[_Frame]) -> bytes | bytearray:
        """The database with all transactions that end in these frames."""
        ends = [index for index, frame in enumerate(frames) if frame.num_pages]
        if not ends:
            return database
        num_bytes = frames[ends[-1]].num_pages * self._page_bytes
        image = bytearray(database[:num_bytes].ljust(num_bytes, b"\0"))
        for frame in frames[: ends[-1] + 1]:
            begin = (frame.page - 1) * self._page_bytes
            if begin < num_bytes:  # a later transaction may have shortened the database
                image[begin : begin + self._page_bytes] = self._page_of(frame)
        return image

    def _lost(self, num_valid: int) -> int | None:
        """Index of a frame that was written completely, at or behind the first invalid one; None without one.

        It was if it is whole, or anything but the former log is behind it, or the file ends with it: a
        process that stops while it writes a frame leaves a shorter file, or frames of the log before behind
        it. A frame of zeros was lost by the file system.
        """
        for index in range(num_valid, len(self._frames)):
            frame = self._frames[index]
            if frame.is_evidence and (frame.is_whole or not self._is_before_former_log(index)):
                return index
            if index == num_valid and not any(self._bytes_of(frame)):
                return index
        return None

    def _is_before_former_log(self, index: int) -> bool:
        return index + 1 < len(self._frames) and self._frames[index + 1].is_former

    def _may_be_unwritten(self, first: int, last: int) -> bool:
        """Whether a block among these frames, or a sector of the log's last commit, has not been written."""
        begin, frame = self._frames[first].begin, self._frames[last]
        end = frame.begin + self._frame_bytes
        if self._has_zeros(begin, end, _BLOCK_BYTES) or self._has_old_header(first, last):
            return True
        is_last = not any(each.is_evidence for each in self._frames[last + 1 :])
        # Free space of a page has zeros, too: they must not excuse the loss of more than its transaction.
        return is_last and not frame.is_whole and self._has_zeros(frame.begin, end, _SECTOR_BYTES)

    def _has_old_header(self, first: int, last: int) -> bool:
        """Whether the first invalid frame lies in a block with bytes from before it was written there.

        Such a block has the header of this frame or of the next one, since a block is shorter than a frame.
        It is the former log's, or it has zeros from this frame on if the file ended there.
        """
        if any(frame.is_former for frame in self._frames[first : min(first + 1, last) + 1]):
            return True
        begin = self._frames[first].begin
        rest = self._content[begin : begin + _BLOCK_BYTES - begin % _BLOCK_BYTES]
        return len(rest) >= _FRAME.size and not any(rest)

    def _has_zeros(self, begin: int, end: int, unit: int) -> bool:
        """Whether an aligned unit of the file that overlaps this range has only zeros."""
        units = range(begin - begin % unit, end, unit)
        return any(not any(self._content[offset : offset + unit]) for offset in units)

    def _read(self) -> Iterator[_Frame]:
        """Complete frames; a last one that the end of the file cuts short is left out."""
        before, is_of_log = self._checksum, True
        last = len(self._content) - self._frame_bytes
        for begin in range(_HEADER.size, last + 1, self._frame_bytes):
            page, num_pages, *salts, first, second = _FRAME.unpack_from(self._content, begin)
            written = self._written_num_pages(begin, before, (first, second)) if page else None
            is_whole = written is not None
            # A whole frame behind one of this log is of it, too, even if its salts are damaged.
            is_of_log = salts == self._salts or (is_whole and is_of_log)
            is_former = not is_of_log and self._is_former(*salts)
            is_valid = written == num_pages and salts == self._salts
            is_end = bool(num_pages or written)
            yield _Frame(begin, page, num_pages, is_valid, is_whole, is_end, is_of_log, is_former)
            before = (first, second)

    def _is_former(self, count: int, number: int) -> bool:
        """Whether these are the salts before the last restart: it adds 1 to the first and draws the other."""
        return count == (self._salts[0] - 1) & _MASK and number != self._salts[1]

    def _written_num_pages(self, begin: int, before: Checksum, checksum: Checksum) -> int | None:
        """The `num_pages` with which the frame has this checksum; None without one.

        Checksums are linear in each word. Their slopes in one word are Fibonacci numbers that follow each
        other, of which one at least is odd and has an inverse.
        """
        rises = [
            (right - other) & _MASK
            for right, other in zip(checksum, self._frame_checksum(begin, before), strict=True)
        ]
        odd = 0 if self._slopes[0] & 1 else 1
        rise = rises[odd] * pow(self._slopes[odd], -1, 1 << 32) & _MASK
        is_solution = [rise * slope & _MASK for slope in self._slopes] == rises
        if not is_solution:
            return None
        [word] = struct.unpack_from(f"{self._words}I", self._content, begin + 4)
        return int.from_bytes(struct.pack(f"{self._words}I", (word + rise) & _MASK), "big")

    def _frame_checksum(self, begin: int, before: Checksum) -> Checksum:
        checksum = self._checksum_of(self._content[begin : begin + 8], before)
        return self._checksum_of(self._content[begin + _FRAME.size : begin + self._frame_bytes], checksum)

    def _bytes_of(self, frame: _Frame) -> bytes:
        return self._content[frame.begin : frame.begin + self._frame_bytes]

    def _page_of(self, frame: _Frame) -> bytes:
        return self._bytes_of(frame)[_FRAME.size :]

    def _checksum_of(self, data: bytes, before: Checksum) -> Checksum:
        first, second = before
        words = iter(struct.unpack(f"{self._words}{len(data) // 4}I", data))
        for word, following in zip(words, words, strict=True):
            first = (first + word + second) & _MASK
            second = (second + following + first) & _MASK
        return first, second
