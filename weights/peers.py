"""Weights from processes of the cluster: those that have them are asked before the source."""

from __future__ import annotations

import json
import logging
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from certificates.identity import Role, parse_identity
from checkpoint.headers import TensorEntry
from checkpoint.pins import PinnedFile
from weights.errors import RangeNotHeld, RequestAborted, SourceError, SourceRefused, SourceUnavailable
from weights.http_source import HttpRanges
from weights.source import RangeBody, WeightSource
from wire.addresses import parse_peer_address

log = logging.getLogger(__name__)

PEER_TIMEOUT_S = 10.0
"""Of a connection to a peer, and of a wait for more bytes; then the next source is asked."""
WEIGHTS_PATH = "/weights"
MAX_TRACKER_BYTES = 16 * 1024 * 1024
_SERVERS = (Role.WORKER, Role.COORDINATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """A process with weights; `units` are those it has, None for all of the model."""

    name: str
    address: str
    units: frozenset[str] | None = None


class PeerConnections:
    """Connections to the processes of a cluster, for weights of one fingerprint."""

    def __init__(
        self, fingerprint: str, context: ssl.SSLContext | None, *, timeout_s: float = PEER_TIMEOUT_S
    ) -> None:
        """`context` has this process's certificate; None for plain text."""
        self.fingerprint = fingerprint
        self._scheme = "http" if context is None else "https"
        self._ranges = HttpRanges(
            context=context, timeout_s=timeout_s, uses_proxies=False, check_server=_check_role
        )

    def close(self) -> None:
        """Close idle connections."""
        self._ranges.close()

    def abort(self) -> None:
        """End the requests of other threads with RequestAborted."""
        self._ranges.abort()

    def open_part(self, address: str, file: str, begin: int, end: int) -> tuple[RangeBody, int]:
        """See `HttpRanges.open_part`."""
        return self._ranges.open_part(self._url(address, file), begin, end)

    def ask_tracker(self, address: str) -> list[PeerAddress]:
        """Processes with these weights, as a coordinator knows them. Raises SourceError."""
        url = self._url(address)
        text = self._ranges.read_text(url, max_bytes=MAX_TRACKER_BYTES)
        try:
            return [_parse_peer(entry) for entry in json.loads(text)["peers"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SourceRefused(f"{url} did not answer a list of peers: {type(error).__name__}") from None

    def _url(self, address: str, *file: str) -> str:
        parts = [quote(part, safe="") for part in (self.fingerprint, *file)]
        return "/".join((f"{self._scheme}://{address}{WEIGHTS_PATH}", *parts))


def peer_entry(peer: PeerAddress) -> dict[str, Any]:
    """For the list of a tracker."""
    units = None if peer.units is None else sorted(peer.units)
    return {"name": peer.name, "address": peer.address, "units": units}


def _parse_peer(entry: Any) -> PeerAddress:
    """Raises ValueError, KeyError or TypeError."""
    units = entry["units"]
    return PeerAddress(
        name=str(entry["name"])[:255],
        address=str(parse_peer_address(entry["address"])),
        units=None if units is None else frozenset(map(str, units)),
    )


def _check_role(connection: ssl.SSLSocket) -> None:
    """Weights come from workers and coordinators only. Raises SourceRefused."""
    names: Any = (connection.getpeercert() or {}).get("subjectAltName", ())
    uris = [value for kind, value in names if kind == "URI"]
    try:
        role = parse_identity(uris[0]).role if len(uris) == 1 else None
    except ValueError:
        role = None
    if role not in _SERVERS:
        host, port = connection.getpeername()[:2]
        raise SourceRefused(f"{host}:{port} has no certificate of a worker or coordinator")


class _Peer:
    """A peer during one fetch."""

    def __init__(self, at: PeerAddress) -> None:
        self.at = at
        self.problem = ""
        self.num_open = self.received_bytes = 0
        self.lacks: set[str] = set()
        """Units that it turned out not to have."""

    def may_have(self, unit: str) -> bool:
        known = self.at.units is None or unit in self.at.units
        return known and unit not in self.lacks and not self.problem


@dataclass(frozen=True, slots=True)
class _Part:
    """An open transfer of bytes [begin, end) of a file; `peer` is None for the last source."""

    body: RangeBody
    file: str
    begin: int
    end: int
    peer: _Peer | None

    def overlaps(self, entry: TensorEntry) -> bool:
        """Whether some bytes are of a tensor."""
        return self.file == entry.file and self.begin < entry.end and entry.begin < self.end


class _PartSource(Protocol):
    """Opens parts of ranges."""

    def open_part(self, file: PinnedFile, begin: int, end: int) -> _Part: ...

    def note_failure(self, part: _Part, error: SourceUnavailable) -> None: ...

    def note_end(self, part: _Part, num_bytes: int) -> None: ...


UnitAt = Callable[[str, int], tuple[str, int]]
"""The unit with a byte of a file, and where its tensor ends. Beside tensors the unit is ""."""


class SharedSource(WeightSource):
    """Asks the peers that have the bytes, the least busy first, and at last `origin`.

    A peer that fails, stalls or sends wrong bytes is not asked again.
    """

    def __init__(
        self,
        origin: WeightSource,
        find_peers: Callable[[], Iterable[PeerAddress]],
        connections: PeerConnections,
        unit_at: UnitAt,
    ) -> None:
        """`find_peers` is called once, before the first transfer.

        Peers with all units are asked after the others.
        """
        self.location = origin.location
        self._origin, self._connections, self._unit_at = origin, connections, unit_at
        self._find_peers = find_peers
        self._peers: list[_Peer] | None = None
        self._parts: list[_Part] = []
        self._lock = threading.Lock()

    @property
    def peer_bytes(self) -> int:
        """Bytes that peers have sent."""
        return sum(peer.received_bytes for peer in self._peers or ())

    @property
    def left(self) -> list[str]:
        """Abandoned peers, each with the reason."""
        return [f"{peer.at.name}: {peer.problem}" for peer in self._peers or () if peer.problem]

    def find(self, names: Iterable[str]) -> dict[str, PinnedFile]:
        return self._origin.find(names)

    def open(self, file: PinnedFile, begin: int, end: int) -> RangeBody:
        return _JoinedBody(self, file, begin, end)

    def close(self) -> None:
        self._connections.close()
        self._origin.close()

    def abort(self) -> None:
        self._connections.abort()
        self._origin.abort()

    def blame(self, wrong: Mapping[str, TensorEntry]) -> bool:
        with self._lock:
            parts, self._parts = self._parts, []
        senders = {
            tensor: [part.peer for part in parts if part.peer is not None and part.overlaps(entry)]
            for tensor, entry in wrong.items()
        }
        for tensor, peers in senders.items():
            for peer in peers:
                self._leave(peer, f"sent wrong bytes of tensor {tensor}")
        return all(senders.values())

    def open_part(self, file: PinnedFile, begin: int, end: int) -> _Part:
        """Open a part of a range at the best source. Raises what the origin raises."""
        unit, _ = self._unit_at(file.name, begin)
        while (peer := self._choose(unit)) is not None:
            try:
                body, part_end = self._connections.open_part(peer.at.address, file.name, begin, end)
            except RangeNotHeld:
                self._release(peer)
                peer.lacks.add(unit)
            except RequestAborted:
                self._release(peer)
                raise
            except SourceError as error:
                self._release(peer)
                self._leave(peer, str(error))
            else:
                part = _Part(body, file.name, begin, part_end, peer)
                with self._lock:
                    self._parts.append(part)
                return part
        end = self._end_without_peers(file.name, begin, end)
        return _Part(self._origin.open(file, begin, end), file.name, begin, end, None)

    def _end_without_peers(self, file: str, begin: int, end: int) -> int:
        """Where the first tensor begins that a peer may have."""
        _, position = self._unit_at(file, begin)
        while position < end:
            unit, tensor_end = self._unit_at(file, position)
            if any(peer.may_have(unit) for peer in self._peers or ()):
                return position
            position = tensor_end
        return end

    def note_failure(self, part: _Part, error: SourceUnavailable) -> None:
        """A transfer broke off. Raises the error unless another source can go on."""
        if part.peer is None:
            raise error
        self._leave(part.peer, str(error))

    def note_end(self, part: _Part, num_bytes: int) -> None:
        """A transfer has ended after `num_bytes`."""
        if part.peer is not None:
            self._release(part.peer)
            with self._lock:
                part.peer.received_bytes += num_bytes

    def _choose(self, unit: str) -> _Peer | None:
        """The least busy peer that may have a unit; one with all units only if no other does."""
        with self._lock:
            if self._peers is None:
                self._peers = [_Peer(at) for at in self._find_peers()]
            able = [peer for peer in self._peers if peer.may_have(unit)]
            peer = min(able, key=lambda peer: (peer.at.units is None, peer.num_open), default=None)
            if peer is not None:
                peer.num_open += 1
            return peer

    def _release(self, peer: _Peer) -> None:
        with self._lock:
            peer.num_open -= 1

    def _leave(self, peer: _Peer, problem: str) -> None:
        with self._lock:
            if peer.problem:
                return
            peer.problem = problem
        log.warning("stopped fetching weights from %s: %s", peer.at.name, problem)


class _JoinedBody(RangeBody):
    """A range that comes in parts, each from a source that may change."""

    def __init__(self, source: _PartSource, file: PinnedFile, begin: int, end: int) -> None:
        self._source, self._file, self._end = source, file, end
        self._position = begin
        self._part: _Part | None = source.open_part(file, begin, end)

    def read_some(self, view: memoryview) -> int:
        while True:
            part = self._part or self._source.open_part(self._file, self._position, self._end)
            self._part = part
            try:
                count = part.body.read_some(view[: part.end - self._position])
            except SourceUnavailable as error:
                self._end_part()
                self._source.note_failure(part, error)
                continue
            self._position += count
            if self._position == part.end:
                self._end_part()
            return count

    def _end_part(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.body.close()
            self._source.note_end(part, self._position - part.begin)

    def close(self) -> None:
        self._end_part()


class CoordinatorSource(WeightSource):
    """The directory of the coordinator, for hosts without one; patient, as there is no other source."""

    def __init__(self, address: str, directory: str, connections: PeerConnections) -> None:
        self.location = f"{directory} on the coordinator's host"
        self._address, self._connections = address, connections

    def find(self, names: Iterable[str]) -> dict[str, PinnedFile]:
        raise SourceRefused(f"{self.location}: the coordinator names the files itself")

    def open(self, file: PinnedFile, begin: int, end: int) -> RangeBody:
        return _JoinedBody(self, file, begin, end)

    def open_part(self, file: PinnedFile, begin: int, end: int) -> _Part:
        """Open the first part of a range. Raises SourceError."""
        body, part_end = self._connections.open_part(self._address, file.name, begin, end)
        return _Part(body, file.name, begin, part_end, None)

    def note_failure(self, part: _Part, error: SourceUnavailable) -> None:
        """Raises the error."""
        raise error

    def note_end(self, part: _Part, num_bytes: int) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        self._connections.close()

    def abort(self) -> None:
        self._connections.abort()
