"""Ports for servers that need a fixed address; most choose a port themselves."""

from __future__ import annotations

import os
import random
import socket

_FIRST, _PER_PROCESS = 20_000, 500
"""Below the ports that Linux gives to connections; each process of a parallel run has its own."""


def unused_address() -> str:
    """A free address of this machine, unique to one test."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + worker * _PER_PROCESS
    while True:
        address = ("127.0.0.1", random.randrange(first, first + _PER_PROCESS))
        with socket.socket() as probe:
            if probe.connect_ex(address) == 0:
                continue
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return f"{address[0]}:{address[1]}"
