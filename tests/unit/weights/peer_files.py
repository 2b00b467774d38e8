"""Peers that serve a cache or a directory, and fetches that ask them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.unit.weights.remote_files import Fetch
from web.connection_limits import FOR_WEIGHTS
from web.server import HttpServer
from web.server_thread import ServerThread
from weights.fetching import TensorFetcher
from weights.peers import PeerAddress, PeerConnections, SharedSource
from weights.serving import CachedFiles, HeldFiles, HeldRegistry, Tracker, WeightsApplication
from wire.addresses import Address

FINGERPRINT = "0123-4567-89ab"


@contextmanager
def serving(held: HeldFiles | None, tracker: Tracker | None = None) -> Iterator[str]:
    """Serve files on loopback while the block runs; yields HOST:PORT."""
    registry = HeldRegistry()
    if held is not None:
        registry.put(held)
    application = WeightsApplication(registry, tracker)
    server = HttpServer(application, Address("127.0.0.1", 0), name="weights", hint="none", limits=FOR_WEIGHTS)
    thread = ServerThread(server, name="weights of tests")
    thread.start()
    try:
        yield str(thread.address)
    finally:
        application.close()
        thread.stop()


def held_of(fetch: Fetch, *, has_manifest: bool = False) -> CachedFiles:
    return CachedFiles(fetch.model, FINGERPRINT, has_manifest=has_manifest)


def peer(name: str, address: str, *, units: Iterable[str] | None = None) -> PeerAddress:
    return PeerAddress(name=name, address=address, units=None if units is None else frozenset(units))


def run_shared(
    fetch: Fetch, tensors: list[str], *peers: PeerAddress, timeout_s: float = 10.0
) -> SharedSource:
    """Fetch tensors from peers, and from the server of `fetch` what they lack."""
    connections = PeerConnections(FINGERPRINT, None, timeout_s=timeout_s)
    source = SharedSource(fetch.source, lambda: peers, connections, fetch.model.unit_at)
    fetcher = TensorFetcher(
        fetch.cache,
        source,
        fetch.pins,
        sha256s=fetch.sha256s,
        progress=fetch.progress,
        check=lambda: None,
        policy=fetch.policy,
    )
    fetcher.fetch(fetch.model, tensors)
    return source


def flip(path: Path, position: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
