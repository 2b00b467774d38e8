"""Raw TCP on loopback, the bound of big frames: a process that receives, and the sending side.

python -m bench.harness.tcp_sink

Question: {"size_bytes": N}. Answer: {"port": ...}; one connection to it may send any number of frames of N
bytes. After each one the process writes when it was complete, in nanoseconds of the machine's monotonic
clock.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

from bench.harness.figure import NotMeasured

_TIME = struct.Struct("<q")
_TIMEOUT_S = 30.0


def send_frames(port: int, frame: bytes, num_frames: int) -> list[float]:
    """Seconds from the begin of sending until the frame was received, one after another. Blocks."""
    times_s = []
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(num_frames):
            began_ns = time.monotonic_ns()
            connection.sendall(frame)
            answer = connection.recv(_TIME.size, socket.MSG_WAITALL)
            if len(answer) < _TIME.size:
                raise NotMeasured("the receiver of raw TCP ended")
            times_s.append((_TIME.unpack(answer)[0] - began_ns) / 1e9)
    return times_s


def _receive_frames(listener: socket.socket, size_bytes: int) -> None:
    connection, _ = listener.accept()
    connection.settimeout(_TIMEOUT_S)
    buffer = memoryview(bytearray(size_bytes))
    with connection:
        while _fill(connection, buffer):
            connection.sendall(_TIME.pack(time.monotonic_ns()))


def _fill(connection: socket.socket, buffer: memoryview) -> bool:
    """Receive a whole frame; False if the connection ended before."""
    received = 0
    while received < len(buffer):
        count = connection.recv_into(buffer[received:])
        if not count:
            return False
        received += count
    return True


def main() -> None:
    for line in sys.stdin:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_TIMEOUT_S)
            print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
            _receive_frames(listener, json.loads(line)["size_bytes"])


if __name__ == "__main__":
    main()
