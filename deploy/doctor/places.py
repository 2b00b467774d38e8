"""Where the processes of a cluster file will listen, and which of them will talk to each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from certificates.identity import Role
from deploy.commands import ProcessCommand, commands
from deploy.spec.cluster_spec import ClusterSpec
from wire.addresses import Address, local_address, parse_address
from wire.transport import TransportSettings, open_transport

FIRST_PORT = 7490
"""Of workers without `listen`: they take a free port later, which is unknown before."""
ONE_HOST = "localhost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one process will be; `reached` is its address for the others."""

    command: ProcessCommand
    host: str
    listen: Address
    reached: Address

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def role(self) -> Role:
        return self.command.role

    def transport(self) -> TransportSettings:
        """Certificates of the process. Raises ValueError."""
        settings: TransportSettings = self.command.config().transport
        values = self.command.values()
        if settings.tls_directory is None and values.get("--join-token-file") is not None:
            raise ValueError(
                f"{self.name} gets its certificate when it joins: give tls-dir instead of join-token-file "
                "to check its host before"
            )
        return settings

    def certificate_problem(self) -> str:
        """Why the certificate of the process is unusable; empty without one."""
        try:
            open_transport(self.command.config().transport, self.role)
        except OSError as error:
            return str(error)
        return ""


@dataclass(frozen=True, slots=True)
class Path:
    """One process calls another; over `carries_data` paths hidden states or results travel."""

    caller: Place
    callee: Place
    carries_data: bool


def places_of(spec: ClusterSpec) -> tuple[Place, ...]:
    """The coordinator, the gateways, the workers."""
    num_unknown: Counter[str] = Counter()
    found = []
    for command in commands(spec):
        host = command.host or ONE_HOST
        listen = command.values().get("--listen")
        if listen is None:
            port = FIRST_PORT + num_unknown[host]
            num_unknown[host] += 1
            listen = str(Address("127.0.0.1" if command.host is None else "0.0.0.0", port))
        address = parse_address(listen)
        found.append(
            Place(command=command, host=host, listen=address, reached=_reached(command, spec, address))
        )
    return tuple(found)


def _reached(command: ProcessCommand, spec: ClusterSpec, listen: Address) -> Address:
    if command.role is Role.COORDINATOR:
        return parse_address(spec.coordinator.address)
    if (advertised := command.values().get("--advertise")) is not None:
        return parse_address(advertised)
    return local_address(listen) if command.host is None else Address(command.host, listen.port)


def places_at(places: tuple[Place, ...], name: str) -> tuple[Place, ...]:
    """Those on the host `name`, or the process of this name. Raises ValueError."""
    found = tuple(place for place in places if name in (place.host, place.name))
    if not found:
        known = dict.fromkeys([place.host for place in places] + [place.name for place in places])
        raise ValueError(f"{name!r} is no host or process of the cluster file: {', '.join(known)}")
    return found


def paths_of(places: tuple[Place, ...]) -> Iterator[Path]:
    """All paths: a worker may follow each other one in the pipeline after a failure.

    Data is sent between workers that follow each other in the file, as in a first plan, and to the
    coordinator.
    """
    coordinator, workers = places[0], [place for place in places if place.role is Role.WORKER]
    for place in places[1:]:
        yield Path(place, coordinator, carries_data=place.role is Role.WORKER)
    for worker in workers:
        yield Path(coordinator, worker, carries_data=False)
    for index, worker in enumerate(workers):
        for other_index, other in enumerate(workers):
            if other is not worker:
                yield Path(worker, other, carries_data=other_index == index + 1)
