"""Relays that delay and slow down connections, as a process: `python -m tests.faults.slow_links LINK...`.

A link is LISTEN,TARGET,DELAY_S,BYTES_PER_S; both ways have its delay, and its rate is shared by all
connections of a way.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field

from wire.addresses import parse_address

CHUNK_BYTES = 16 * 1024
MAX_CHUNKS = 4
"""On the way at once and way: senders must feel the rate."""


@dataclass(slots=True)
class SlowWay:
    """One direction of a link. `free_s` is when the bytes before have left."""

    delay_s: float
    bytes_per_s: float
    free_s: float = field(default=0.0)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy until the end of the input; then close the output."""
        arrivals: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        delivery = asyncio.create_task(self._deliver(arrivals, writer))
        loop = asyncio.get_running_loop()
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                self.free_s = max(self.free_s, loop.time()) + len(chunk) / self.bytes_per_s
                await arrivals.put((self.free_s + self.delay_s, chunk))
        except ConnectionError:
            pass  # as if it had ended
        await arrivals.put((0.0, b""))
        await delivery

    @staticmethod
    async def _deliver(arrivals: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while (arrival := await arrivals.get())[1]:
            await asyncio.sleep(arrival[0] - loop.time())
            if not writer.is_closing():
                writer.write(arrival[1])
        writer.close()


async def relay(listen: str, target: str, delay_s: float, bytes_per_s: float) -> asyncio.Server:
    """Listen; each connection is carried to `target`."""
    here, there = parse_address(listen), parse_address(target)
    forth, back = SlowWay(delay_s, bytes_per_s), SlowWay(delay_s, bytes_per_s)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(there.host, there.port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(forth.carry(reader, far_writer), back.carry(far_reader, writer))

    return await asyncio.start_server(connected, here.host, here.port)


async def main(links: list[str]) -> None:
    for link in links:
        listen, target, delay_s, bytes_per_s = link.split(",")
        await relay(listen, target, float(delay_s), float(bytes_per_s))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
