"""Interface of a source of weights: files of one version, and byte ranges of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

from checkpoint.headers import TensorEntry
from checkpoint.pins import PinnedFile
from weights.location import RemoteModel

TIMEOUT_S = 30.0
"""Of a connection, and of a wait for more bytes."""
CONFIG_FILES = ("config.json", "generation_config.json", "hf_quant_config.json")
"""What a worker reads beside the headers; a checkpoint has the first one at least."""


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
