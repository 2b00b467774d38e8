"""A node for pods: a network namespace with a switch, from which probes and requests come."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tests.e2e.namespaces import run_ip, skipping_where_impossible

_CLONE_NEWNET = 0x40000000
_SWITCH = "pods"


class Node:
    """Networks of pods, which have a new address at each start, and names that all pods resolve."""

    def __init__(self, folder: Path) -> None:
        self.namespace = f"stageline-{os.getpid()}-node"
        self.hosts = folder / "names" / "hosts"
        self._numbers = count(2)
        self._pods: list[str] = []
        self.threads: ThreadPoolExecutor
        """Threads in the network of the node."""

    @contextmanager
    def running(self) -> Iterator[Node]:
        """Skips the test where the machine cannot have it."""
        _remove_abandoned()
        self.hosts.parent.mkdir()
        self.resolve({})
        try:
            with skipping_where_impossible():
                self._connect()
            self.threads = ThreadPoolExecutor(64, initializer=self._enter)
            yield self
            self.threads.shutdown(cancel_futures=True)
        finally:
            for namespace in (*self._pods, self.namespace):
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)

    def add_pod(self) -> tuple[str, str]:
        """The namespace and address of a new pod."""
        number = next(self._numbers)
        namespace, address = f"stageline-{os.getpid()}-pod{number}", f"10.213.9.{number}"
        run_ip("netns", "add", namespace)
        self._pods.append(namespace)
        end = ("name", "eth0", "netns", namespace)
        run_ip("-n", self.namespace, "link", "add", f"pod{number}", "type", "veth", "peer", *end)
        run_ip("-n", self.namespace, "link", "set", f"pod{number}", "master", _SWITCH, "up")
        run_ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run_ip("-n", namespace, "link", "set", device, "up")
        return namespace, address

    def remove_pod(self, namespace: str) -> None:
        self._pods.remove(namespace)
        run_ip("netns", "delete", namespace)

    def resolve(self, names: dict[str, str]) -> None:
        """Addresses by name, as the DNS of a cluster has them."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items()), ""]
        fresh = self.hosts.with_name("hosts.new")
        fresh.write_text("\n".join(lines))
        fresh.rename(self.hosts)

    def _connect(self) -> None:
        run_ip("netns", "add", self.namespace)
        run_ip("-n", self.namespace, "link", "add", _SWITCH, "type", "bridge")
        run_ip("-n", self.namespace, "address", "add", "10.213.9.1/24", "dev", _SWITCH)
        for device in ("lo", _SWITCH):
            run_ip("-n", self.namespace, "link", "set", device, "up")

    def _enter(self) -> None:
        """Moves the calling thread alone."""
        with open(f"/run/netns/{self.namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")


def _remove_abandoned() -> None:
    """Networks of test runs that were ended before they could remove them."""
    for path in Path("/run/netns").glob("stageline-*"):
        found = re.fullmatch(r"stageline-(\d+)-(?:node|pod\d+)", path.name)
        if found is not None and not Path("/proc", found[1]).exists():
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, check=False)
