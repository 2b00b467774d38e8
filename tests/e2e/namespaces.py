"""Two hosts on one machine: network namespaces joined by a virtual cable. Linux, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one address besides its loopback."""

    namespace: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Command prefix that runs a command on this host."""
        ip = shutil.which("ip")
        assert ip is not None
        return (ip, "netns", "exec", self.namespace)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach only each other; skips the test without network namespaces."""
    hosts = Host(f"stageline-{os.getpid()}-a", "10.213.7.1"), Host(f"stageline-{os.getpid()}-b", "10.213.7.2")
    try:
        _set_up(hosts)
        yield hosts
    finally:
        for host in hosts:
            # Deleting the namespaces deletes the cable.
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)


def _set_up(hosts: tuple[Host, Host]) -> None:
    with skipping_where_impossible():
        for host in hosts:
            run_ip("netns", "add", host.namespace)
        # Both ends are created inside, so that they never appear in another network of this machine.
        end = ("name", "cable", "netns", hosts[1].namespace)
        run_ip("-n", hosts[0].namespace, "link", "add", "cable", "type", "veth", "peer", *end)
        for host in hosts:
            run_ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                run_ip("-n", host.namespace, "link", "set", device, "up")


@contextmanager
def skipping_where_impossible() -> Iterator[None]:
    """Skip the test if this machine cannot create networks."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux and the ip command")
    try:
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"`{' '.join(error.cmd)}` does not work here: {error.stderr.strip()}")


def run_ip(*arguments: str) -> None:
    """Run `ip ARGUMENTS`. Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=10)
