"""Interface of a source of weights: files of one version, and byte ranges of them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

from checkpoint.files import CONFIG_FILE, PARAMS_FILE
from checkpoint.headers import TensorEntry
from checkpoint.pins import PinnedFile
from weights.location import RemoteModel

TIMEOUT_S = 30.0
"""Of a connection, and of a wait for more bytes."""
CONFIG_FILES = (CONFIG_FILE, PARAMS_FILE, "generation_config.json", "hf_quant_config.json")
"""What a worker reads beside the headers; a checkpoint has one of the first two at least."""


class RangeBody(ABC):
    """Bytes of one range, for one thread."""

    @abstractmethod
    def read_some(self, view: memoryview) -> int:
        """Write the next bytes to the start of `view`, and return their number, at least 1.

        Raises SourceUnavailable when they end early or stall; the bytes of earlier calls are good.
        """

    @abstractmethod
    def close(self) -> None:
        """End the transfer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WeightSource(ABC):
    """A checkpoint at one version. Methods may be called by several threads."""

    location: RemoteModel | str
    """For messages; with a revision that does not move, where there are revisions."""
    problem: str = ""
    """Why the last request failed, set by fetches that try again; empty while bytes arrive."""

    def where(self, name: str) -> str:
        """Address of a file, for messages."""
        location = self.location
        return f"{location}/{name}" if isinstance(location, str) else location.address_of(name)

    @abstractmethod
    def find(self, names: Iterable[str]) -> dict[str, PinnedFile]:
        """The files among `names` that the source has, as they are now. Raises SourceError."""

    @abstractmethod
    def open(self, file: PinnedFile, begin: int, end: int) -> RangeBody:
        """Request bytes [begin, end) of `file`; the range is not empty.

        Raises:
            SourceChanged: The file is another one by now.
            SourceUnavailable: Try again.
            SourceError: Do not.
        """

    @abstractmethod
    def close(self) -> None:
        """Close idle connections. The source may be used again."""

    @abstractmethod
    def abort(self) -> None:
        """End the requests of other threads, with RequestAborted, if this kind of source can.

        Later requests are not affected.
        """

    def blame(self, wrong: Mapping[str, TensorEntry]) -> bool:
        """Note that the bytes of tensors were wrong, which have a place in their file.

        Returns whether each of them came from a process that is not asked again.
        """
        return False

    def read(self, file: PinnedFile, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of `file`. Raises like `open` and `RangeBody.read_some`."""
        data, done = memoryview(bytearray(end - begin)), 0
        if data:
            with self.open(file, begin, end) as body:
                while done < len(data):
                    done += body.read_some(data[done:])
        return bytes(data)


FIRST_BYTES = 16 * 1024
MOST_BYTES = 4 * 1024 * 1024
"""Of one range. Each range is as long as all before it, so less than half of the bytes are not needed."""


class RangeStream:
    """The first bytes of a file, for a parser that finds out how many there are.

    Reads a file of `size_bytes`, and keeps what it has read. `read` returns bytes [begin, end).
    """

    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int) -> None:
        self._read, self._size_bytes = read, size_bytes
        self._kept = bytearray()
        self._position = 0

    def read(self, size: int, /) -> bytes:
        """See `ByteStream`. Raises like the function of ranges."""
        begin = self._position
        self._position = max(begin, min(begin + size, self._size_bytes))
        self._fill(self._position)
        return bytes(self._kept[begin : self._position])

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """See `ByteStream`."""
        self._position = offset if whence == os.SEEK_SET else self._position + offset
        return self._position

    def before(self, end: int) -> bytes:
        """All bytes before `end`. Raises like the function of ranges."""
        self._fill(end)
        return bytes(self._kept[:end])

    def _fill(self, end: int) -> None:
        while len(self._kept) < end:
            begin = len(self._kept)
            step = min(max(FIRST_BYTES, begin), MOST_BYTES)
            self._kept += self._read(begin, min(begin + step, self._size_bytes))
