"""Hosts on one machine: network namespaces joined by virtual cables. Linux, as root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class NamedHost(Host):
    """A host with a name, which the others resolve, and a home directory."""

    name: str
    home: Path

    def shell(self, line: str) -> tuple[str, ...]:
        """Command that runs a line of a shell in the home directory."""
        prepare = (
            f"echo {self.name} > /proc/sys/kernel/hostname && mount --bind {shlex.quote(str(self._hosts))} "
            f"/etc/hosts && cd {shlex.quote(str(self.home))} || exit 99"
        )
        return (*self.prefix, "unshare", "--uts", "sh", "-c", f"{prepare}\nexec {line}")

    @property
    def _hosts(self) -> Path:
        return self.home.parent / "hosts"


@contextmanager
def named_hosts(names: Sequence[str], folder: Path) -> Iterator[dict[str, NamedHost]]:
    """Hosts on one switch, which reach only each other; skips the test where that does not work."""
    hosts = {
        name: NamedHost(f"stageline-{os.getpid()}-{name}", f"10.213.8.{number}", name, folder / name)
        for number, name in enumerate(names, 1)
    }
    lines = [f"{host.address} {host.name}" for host in hosts.values()]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    try:
        with skipping_where_impossible():
            _connect(list(hosts.values()))
            for host in hosts.values():
                host.home.mkdir()
                subprocess.run(host.shell("true"), capture_output=True, text=True, check=True, timeout=10)
        yield hosts
    finally:
        for host in hosts.values():
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)


def _connect(hosts: Sequence[NamedHost]) -> None:
    """The first host has the switch; both ends of a cable are created inside."""
    switch = hosts[0].namespace
    for host in hosts:
        run_ip("netns", "add", host.namespace)
    run_ip("-n", switch, "link", "add", "lan", "type", "bridge")
    for number, host in enumerate(hosts[1:]):
        end = ("name", "lan", "netns", host.namespace)
        run_ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", *end)
        run_ip("-n", switch, "link", "set", f"port{number}", "master", "lan", "up")
    for host in hosts:
        run_ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "lan")
        for device in ("lo", "lan"):
            run_ip("-n", host.namespace, "link", "set", device, "up")


@contextmanager
def skipping_where_impossible() -> Iterator[None]:
    """Skip the test if this machine cannot create networks."""
    if sys.platform != "linux" or None in map(shutil.which, ("ip", "unshare")):
        pytest.skip("network namespaces need Linux and the commands ip and unshare")
    try:
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"`{' '.join(error.cmd)}` does not work here: {error.stderr.strip()}")


def run_ip(*arguments: str) -> None:
    """Run `ip ARGUMENTS`. Raises CalledProcessError."""
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=10)
