"""A client that sends hostile bodies to a gateway until it is killed.

    python -m bench.harness.hostile_client HOST:PORT CONNECTIONS

Prints a line for every response: its status.
"""

from __future__ import annotations

import asyncio
import sys

from tests.hostile_bodies import HOSTILE_BODIES, HostileBody


async def send(address: str, hostile: HostileBody) -> int:
    """Return the status of the response."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = (
            f"POST {hostile.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(hostile.body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + hostile.body)
        status = (await reader.readline()).split()[1]
        await reader.read()
        return int(status)
    finally:
        writer.close()


async def _run(address: str, num_connections: int) -> None:
    async def send_all(begin: int) -> None:
        bodies = list(HOSTILE_BODIES.values())
        while True:
            for hostile in (*bodies[begin:], *bodies[:begin]):
                print(await send(address, hostile), flush=True)

    step = max(1, len(HOSTILE_BODIES) // num_connections)
    await asyncio.gather(*(send_all(number * step) for number in range(num_connections)))


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], int(sys.argv[2])))
