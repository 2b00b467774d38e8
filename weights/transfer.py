"""Moves ranges of files from a source into a cache, over several connections, in spite of failures."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

import xxhash

from checkpoint.pins import Pins
from weights.cached_model import CachedModel
from weights.errors import RequestAborted, SourceUnavailable
from weights.parallel import CHECK_S
from weights.pieces import FileRange, TensorPiece, TransferPolicy
from weights.source import RangeBody, WeightSource

log = logging.getLogger(__name__)


class Transfer:
    """One fetch of ranges. `run` starts the connections, and returns or raises when all have ended."""

    def __init__(self, source: WeightSource, pins: Pins, target: CachedModel, policy: TransferPolicy) -> None:
        self._source, self._pins, self._target, self._policy = source, pins, target, policy
        self._ranges: deque[FileRange] = deque()
        self._part_bytes = policy.piece_bytes
        self._changed = threading.Condition()
        self._is_stopping = False
        self._fatal: BaseException | None = None
        self._last_failure = ""
        self._resume_at_s = 0.0
        self._last_byte_s = 0.0
        self._num_busy = 0
        self._done_bytes = self._received_bytes = 0

    @property
    def done_bytes(self) -> int:
        """Wanted bytes that arrived."""
        return self._done_bytes

    @property
    def received_bytes(self) -> int:
        """All bytes that arrived, also bytes of gaps."""
        return self._received_bytes

    def run(self, ranges: Iterable[FileRange], check: Callable[[], None]) -> None:
        """Fetch all ranges. `check` is called every 0.2 s by this thread; its exceptions end the transfer.

        Raises:
            SourceUnavailable: No byte has arrived for `give_up_s`.
            SourceError: The source refuses, ignores ranges or has changed.
            CacheFull: The disk is full.
        """
        self._ranges.extend(ranges)
        self._part_bytes = self._policy.part_bytes(sum(wanted.end - wanted.begin for wanted in self._ranges))
        self._last_byte_s = monotonic()
        num_threads = min(self._policy.num_connections, len(self._ranges))
        threads = [
            threading.Thread(target=self._work, name=f"weights-{number}") for number in range(num_threads)
        ]
        self._num_busy = num_threads
        for thread in threads:
            thread.start()
        try:
            self._wait(check)
        finally:
            self._stop(threads)
        if self._fatal is not None:
            raise self._fatal

    def _wait(self, check: Callable[[], None]) -> None:
        while True:
            with self._changed:
                if self._num_busy == 0 or self._fatal is not None:
                    break
                self._changed.wait(CHECK_S)
            check()
            silent_s = monotonic() - self._last_byte_s
            if silent_s > self._policy.give_up_s:
                reason = self._last_failure or "no answer"
                raise SourceUnavailable(f"no byte from {self._pins.source} for {silent_s:.0f} s: {reason}")
        check()

    def _stop(self, threads: Iterable[threading.Thread]) -> None:
        """End the threads. One that was about to send a request is met by the next abort."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        for thread in threads:
            while thread.is_alive():
                self._source.abort()
                thread.join(CHECK_S)

    def _work(self) -> None:
        try:
            writer = _PieceWriter(
                self._target,
                piece_bytes=self._policy.piece_bytes,
                part_bytes=self._part_bytes,
                min_part_s=self._policy.min_part_s,
            )
            files: set[str] = set()
            num_bytes = 0
            while (wanted := self._take()) is not None:
                self._fetch(wanted, writer)
                files.add(wanted.file)
                num_bytes += wanted.end - wanted.begin
                if num_bytes >= self._policy.sync_bytes:
                    self._sync(files)
                    num_bytes = 0
            self._sync(files)
        except _Stopped:
            pass
        except BaseException as error:
            with self._changed:
                self._fatal = self._fatal or error
                self._is_stopping = True
        finally:
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()

    def _sync(self, files: set[str]) -> None:
        for file in files:
            self._target.sync(file)
        files.clear()

    def _take(self) -> FileRange | None:
        with self._changed:
            return None if self._is_stopping or not self._ranges else self._ranges.popleft()

    def _fetch(self, wanted: FileRange, writer: _PieceWriter) -> None:
        """Fetch one range, beginning again at the first missing byte after each failure."""
        progress = _RangeProgress(wanted)
        num_failures = 0
        while progress.pieces:
            before = progress.position
            try:
                self._pause()
                self._stream(progress, writer)
            except RequestAborted as error:
                raise _Stopped from error
            except SourceUnavailable as error:
                num_failures = 1 if progress.position > before else num_failures + 1
                self._note_failure(error, num_failures)

    def _stream(self, progress: _RangeProgress, writer: _PieceWriter) -> None:
        file = self._pins.file(progress.range.file)
        with self._source.open(file, progress.position, progress.range.end) as body:
            while progress.pieces:
                self._read_on(body, progress, writer)

    def _read_on(self, body: RangeBody, progress: _RangeProgress, writer: _PieceWriter) -> None:
        """Read some bytes: of the gap before the next piece, or of the piece."""
        piece = progress.pieces[0]
        gap = piece.start - progress.position
        num_read = body.read_some(writer.room_for_gap(gap) if gap > 0 else writer.room(piece))
        progress.position += num_read
        self._count(num_read, is_wanted=gap <= 0)
        if gap <= 0:
            writer.put(num_read)
        if progress.position == piece.end:
            progress.pieces.popleft()

    def _count(self, num_bytes: int, *, is_wanted: bool) -> None:
        with self._changed:
            if self._is_stopping:
                raise _Stopped
            self._last_byte_s = monotonic()
            self._source.problem = ""
            self._received_bytes += num_bytes
            self._done_bytes += num_bytes if is_wanted else 0

    def _note_failure(self, error: SourceUnavailable, num_failures: int) -> None:
        """Let this connection wait; a source that names a time lets all of them wait."""
        wait_s = self._policy.wait_s(num_failures)
        with self._changed:
            self._last_failure = self._source.problem = str(error)
            if error.retry_after_s is not None:
                self._resume_at_s = max(self._resume_at_s, monotonic() + self._honoured_s(error))
                wait_s = 0.0
        level = logging.WARNING if num_failures == 3 else logging.INFO
        log.log(level, "%s: trying again, num_failures=%d", error, num_failures)
        self._sleep_until(monotonic() + wait_s)

    def _honoured_s(self, error: SourceUnavailable) -> float:
        """The wait that a source asks for, within the policy's limit."""
        wanted_s, limit_s = error.retry_after_s or 0.0, self._policy.max_retry_after_s
        if wanted_s > limit_s:
            log.warning(
                "%s: trying again in %g s although the source asks for %.6g s", error, limit_s, wanted_s
            )
        return min(wanted_s, limit_s)

    def _pause(self) -> None:
        self._sleep_until(self._resume_at_s)

    def _sleep_until(self, at_s: float) -> None:
        with self._changed:
            while not self._is_stopping and (left_s := at_s - monotonic()) > 0:
                self._changed.wait(left_s)
            if self._is_stopping:
                raise _Stopped


class _PieceWriter:
    """Takes one piece after the other, each in order; writes and records it in parts.

    A kill loses less than `part_bytes`, or what came within `min_part_s`.
    """

    def __init__(self, target: CachedModel, *, piece_bytes: int, part_bytes: int, min_part_s: float) -> None:
        """`piece_bytes` is the maximum size of a piece."""
        self._target, self._part_bytes, self._min_part_s = target, part_bytes, min_part_s
        self._buffer = memoryview(bytearray(piece_bytes))
        self._written_s = monotonic()
        self._piece: TensorPiece | None = None
        self._hash = xxhash.xxh3_128()
        self._position = self._num_held = 0

    def room_for_gap(self, num_bytes: int) -> memoryview:
        """Room for bytes between two pieces, which are not written."""
        assert not self._num_held
        return self._buffer[:num_bytes]

    def room(self, piece: TensorPiece) -> memoryview:
        """Room for the next bytes of a piece, the first ones behind its present part.

        Raises PieceDamaged if that part is not as it was written.
        """
        if piece is not self._piece:
            self._hash = self._target.hash_present(piece)
            self._piece, self._position, self._num_held = piece, piece.start, 0
        return self._buffer[self._num_held : piece.end - self._position]

    def put(self, num_bytes: int) -> None:
        """Take bytes that were put into the room. Raises CacheFull."""
        assert self._piece is not None
        self._num_held += num_bytes
        end = self._position + self._num_held
        if end == self._piece.end or self._is_part():
            held = self._buffer[: self._num_held]
            self._target.write(self._piece, self._position, held, self._hash)
            self._position, self._num_held = end, 0
            self._written_s = monotonic()

    def _is_part(self) -> bool:
        return self._num_held >= self._part_bytes and monotonic() - self._written_s >= self._min_part_s


class _RangeProgress:
    """A range that one thread fetches: its missing pieces, and the next byte to request."""

    def __init__(self, wanted: FileRange) -> None:
        self.range = wanted
        self.pieces: deque[TensorPiece] = deque(wanted.pieces)
        self.position = wanted.begin


class _Stopped(Exception):
    """The transfer ends before this range is complete."""
