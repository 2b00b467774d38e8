"""Hosts on one machine with network partitions: network namespaces on a bridge. Linux, as root."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.namespaces import Host, run_ip, skipping_where_impossible
from tests.faults.byte_proxy import Connect
from wire.addresses import parse_address

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>


class Network:
    """Hosts by name, initially all connected. The tests run on none of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"stageline-{os.getpid()}-"
        self._bridge = f"{self._prefix}bridge"
        self.hosts = {
            name: Host(self._prefix + name, f"10.213.8.{number}") for number, name in enumerate(names, 1)
        }

    @property
    def prefix(self) -> str:
        """Namespace name prefix before the host name."""
        return self._prefix

    def part(self, one: str, other: str) -> None:
        """Drop all packets between these two hosts silently."""
        for here, there in ((one, other), (other, one)):
            run_ip("-n", self.hosts[here].namespace, "route", "add", "blackhole", self._route(there))

    def join(self, one: str, other: str) -> None:
        """Undoes `part`."""
        for here, there in ((one, other), (other, one)):
            run_ip("-n", self.hosts[here].namespace, "route", "delete", "blackhole", self._route(there))

    def pull_cable(self, name: str) -> None:
        """Isolate the host."""
        run_ip("-n", self._bridge, "link", "set", _port(self.hosts[name]), "down")

    def plug_cable(self, name: str) -> None:
        """Undoes `pull_cable`."""
        run_ip("-n", self._bridge, "link", "set", _port(self.hosts[name]), "up")

    def connect_from(self, name: str) -> Connect:
        """Connects from that host's namespace."""
        namespace = self.hosts[name].namespace

        async def connect(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            address = parse_address(target)
            made = await asyncio.to_thread(_socket_in, namespace)
            await asyncio.get_running_loop().sock_connect(made, (address.host, address.port))
            return await asyncio.open_connection(sock=made)

        return connect

    def _route(self, name: str) -> str:
        return f"{self.hosts[name].address}/32"

    def set_up(self) -> None:
        """Raises CalledProcessError if this machine does not permit it."""
        run_ip("netns", "add", self._bridge)
        run_ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        run_ip("-n", self._bridge, "link", "set", "bridge", "up")
        for host in self.hosts.values():
            run_ip("netns", "add", host.namespace)
            end = ("name", _port(host), "netns", self._bridge)
            run_ip("-n", host.namespace, "link", "add", "cable", "type", "veth", "peer", *end)
            run_ip("-n", self._bridge, "link", "set", _port(host), "master", "bridge", "up")
            run_ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                run_ip("-n", host.namespace, "link", "set", device, "up")

    def tear_down(self) -> None:
        for namespace in (self._bridge, *(host.namespace for host in self.hosts.values())):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


@contextmanager
def network_of(*names: str) -> Iterator[Network]:
    """A network with these hosts; skips the test if unsupported."""
    network = Network(names)
    try:
        with skipping_where_impossible():
            network.set_up()
        yield network
    finally:
        network.tear_down()


def enter_namespace(name: str) -> None:
    """Moves this thread and its children into the network namespace. Raises OSError."""
    with Path(f"/var/run/netns/{name}").open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({name})")


def _port(host: Host) -> str:
    return "port-" + host.address.rpartition(".")[2]


def _socket_in(namespace: str) -> socket.socket:
    """Creates a socket in the namespace from a temporary thread; the socket stays there."""
    made: list[socket.socket] = []

    def make() -> None:
        enter_namespace(namespace)
        made.append(socket.socket())
        made[0].setblocking(False)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
