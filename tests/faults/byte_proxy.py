"""A TCP proxy between any two parties that delays, stalls, cuts and falsifies the bytes that pass it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType
from typing import Self

from wire.addresses import parse_address

READ_BYTES = 64 * 1024
Connect = Callable[[str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Direction(Enum):
    """`FORTH` is from the client to the target."""

    FORTH = auto()
    BACK = auto()


@dataclass(eq=False)
class Flip:
    """One bit of one byte: the byte is `after_bytes` further on in `direction`, counted over all connections
    from the moment that it was asked for. `happened` is set once it has passed.
    """

    direction: Direction
    after_bytes: int
    bit: int
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def apply(self, direction: Direction, data: bytes) -> bytes:
        if direction is not self.direction or self.happened.is_set():
            return data
        if self.after_bytes >= len(data):
            self.after_bytes -= len(data)
            return data
        altered = bytearray(data)
        altered[self.after_bytes] ^= 1 << self.bit
        self.happened.set()
        return bytes(altered)


async def connect_directly(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to the target at HOST:PORT from this process."""
    address = parse_address(target)
    return await asyncio.open_connection(address.host, address.port)


class ByteProxy:
    """Listens at `address` while entered and passes everything on to `target` (HOST:PORT).

    Connections before a target is set wait for one. Delays and positions of flipped bits follow from `seed`;
    a stall delays bytes without losing any.
    """

    def __init__(self, target: str = "", *, seed: int = 0, connect: Connect = connect_directly) -> None:
        self.address = ""
        self.num_connections = 0
        self.num_bytes = 0
        self.most_delay_s = 0.0
        self.heard: bytearray | None = None
        """All bytes of both directions, once set to a bytearray."""
        self.resets_after_bytes: int | None = None
        self._connect = connect
        self._has_target = asyncio.Event()
        self.target = target
        self._generator = random.Random(seed)
        self._is_flowing = asyncio.Event()
        self._is_flowing.set()
        self._flips: list[Flip] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def target(self) -> str:
        return self._target

    @target.setter
    def target(self, address: str) -> None:
        """Target of new connections; with "" they wait."""
        self._target = address
        if address:
            self._has_target.set()
        else:
            self._has_target.clear()

    def delay(self, most_s: float) -> None:
        """Delays every read by a random time of at most `most_s` seconds; 0 ends the delay."""
        self.most_delay_s = most_s

    def stall(self) -> None:
        """Drop all bytes silently until `flow`."""
        self._is_flowing.clear()

    def flow(self) -> None:
        """Ends a stall and passes the held bytes."""
        self._is_flowing.set()

    def cut(self) -> None:
        """Resets every connection in both directions; new ones are accepted."""
        for writer in self._writers:
            _reset(writer)
        self._writers.clear()

    def reset_after(self, num_bytes: int | None) -> None:
        """Every connection from now on is reset once it has carried this many bytes to the target; None ends
        that.
        """
        self.resets_after_bytes = num_bytes

    def flip(self, direction: Direction, *, within_bytes: int) -> Flip:
        """Flips one bit in the next `within_bytes` bytes of this direction."""
        flip = Flip(direction, self._generator.randrange(within_bytes), self._generator.randrange(8))
        self._flips.append(flip)
        return flip

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A coroutine here would be a task that asyncio itself complains about when it is cancelled.
        task = asyncio.create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        # The target may be gone or not started yet; then connections are refused.
        with contextlib.suppress(OSError):
            await self._has_target.wait()
            await self._is_flowing.wait()
            far_reader, far_writer = await self._connect(self._target)
            self._writers.add(far_writer)
            await asyncio.gather(
                self._pass_on(Direction.FORTH, reader, far_writer),
                self._pass_on(Direction.BACK, far_reader, writer),
            )
        _reset(writer)
        self._writers.discard(writer)

    async def _pass_on(
        self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        limit, num_bytes = self.resets_after_bytes, 0
        try:
            while data := await reader.read(READ_BYTES):
                num_bytes += len(data)
                self.num_bytes += len(data)
                if self.heard is not None:
                    self.heard += data
                if limit is not None and direction is Direction.FORTH and num_bytes > limit:
                    _reset(writer)
                    return
                if self.most_delay_s:
                    await asyncio.sleep(self._generator.uniform(0, self.most_delay_s))
                await self._is_flowing.wait()
                writer.write(self._flipped(direction, data))
                await writer.drain()
        except ConnectionError:
            _reset(writer)
        finally:
            writer.close()
            self._writers.discard(writer)

    def _flipped(self, direction: Direction, data: bytes) -> bytes:
        for flip in self._flips:
            data = flip.apply(direction, data)
        self._flips = [flip for flip in self._flips if not flip.happened.is_set()]
        return data


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends the connection as a crash would: with RST, dropping unsent bytes."""
    if writer.transport.is_closing():
        return
    # With a linger time of 0, close() sends RST and not FIN (man 7 socket).
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
