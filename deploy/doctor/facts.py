"""Facts of this host: versions, devices, memory, disks, limits, ports and checkpoints. No judgement."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

import psutil

from checkpoint import Checkpoint, CheckpointError
from deploy.commands import ProcessCommand
from stageline_rpc.internal.v1 import doctor_pb2
from wire.addresses import Address
from wire.channels import PROTOCOL_VERSION
from wire.host_memory import available_memory_bytes
from wire.user_files import find_cache_directory, find_state_directory

LIBRARIES = ("torch", "grpcio", "protobuf", "numpy", "cryptography")
MISSING = "missing"
"""Version of a library that is not installed."""

_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/dev/kfd")
_MODEL_FLAG = "--model"


def versions_here(stageline: str) -> dict[str, str]:
    """Versions that should be alike on all hosts; `stageline` is the version of this program."""
    found = {"stageline": stageline, "protocol": str(PROTOCOL_VERSION), "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = MISSING
    return found


def host_facts(
    name: str,
    commands: Iterable[ProcessCommand] = (),
    *,
    versions: Mapping[str, str],
    directories: Iterable[Path] = (),
    ports: Iterable[doctor_pb2.PortFacts] = (),
) -> doctor_pb2.HostFacts:
    """Facts of this host, on which `commands` will run, which write to `directories` too.

    Takes seconds: it loads torch and opens checkpoints.
    """
    commands = tuple(commands)
    devices, device_problem = _devices()
    return doctor_pb2.HostFacts(
        name=name,
        hostname=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=dict(versions),
        devices=devices,
        device_problem=device_problem,
        num_cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        available_memory_bytes=available_memory_bytes(),
        kernels_problem=_kernels_problem(),
        disks=[*map(_disk, sorted({*directories, *_written(commands)})), *_without_home()],
        max_open_files=_max_open_files(),
        ports=ports,
        models=list(_models(commands)),
    )


def _devices() -> tuple[list[doctor_pb2.Device], str]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [], f"torch cannot be loaded: {' '.join(str(error).split())}"
    if torch.cuda.is_available():
        return [_device(index) for index in range(torch.cuda.device_count())], ""
    if (driver := _driver()) and torch.version.cuda is None and torch.version.hip is None:
        return [], f"torch {torch.__version__} is built for CPUs, and the host has {driver}"
    return [], f"torch {torch.__version__} does not work with {driver}" if driver else ""


def _device(index: int) -> doctor_pb2.Device:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free_bytes, _ = torch.cuda.mem_get_info(index)
    return doctor_pb2.Device(
        name=f"cuda:{index}",
        model=properties.name,
        memory_bytes=properties.total_memory,
        free_bytes=free_bytes,
        driver=_driver(),
    )


def _driver() -> str:
    """The GPU driver of this host; empty without one."""
    try:
        return " ".join(_NVIDIA.read_text(encoding="utf-8", errors="replace").splitlines()[0].split()[1:])
    except (OSError, IndexError):
        return "an AMD GPU driver" if _AMD.exists() else ""


def _kernels_problem() -> str:
    try:
        from stage_worker.model import kernels
    except (ImportError, OSError) as error:
        return " ".join(str(error).split())
    return kernels.missing_because() or ""


def _max_open_files() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**63 - 1 if hard == resource.RLIM_INFINITY else hard


def _written(commands: Iterable[ProcessCommand]) -> Iterator[Path]:
    """Directories to which the processes write."""
    for directory in (find_cache_directory(os.environ), find_state_directory(os.environ)):
        if directory is not None:
            yield directory
    for command in commands:
        yield from (used.path.parent for used in command.paths if used.is_written)


def _without_home() -> Iterator[doctor_pb2.Disk]:
    """Directories that a user without a home directory lacks."""
    found = {
        "XDG_CACHE_HOME": find_cache_directory(os.environ),
        "XDG_STATE_HOME": find_state_directory(os.environ),
    }
    for variable, directory in found.items():
        if directory is None:
            problem = f"user id {os.getuid()} has no home directory, set {variable}"
            yield doctor_pb2.Disk(path=f"${variable}", problem=problem)


def _disk(path: Path) -> doctor_pb2.Disk:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    problem = "" if existing.is_dir() else f"{existing} is not a directory"
    if not problem and not os.access(existing, os.W_OK | os.X_OK):
        problem = f"this user may not write to {existing}"
    return doctor_pb2.Disk(path=str(path), free_bytes=shutil.disk_usage(existing).free, problem=problem)


def _models(commands: Iterable[ProcessCommand]) -> Iterator[doctor_pb2.ModelFacts]:
    opened: dict[Path, tuple[str, str]] = {}
    for command in commands:
        for path in (used.path for used in command.paths if used.flag == _MODEL_FLAG):
            if path not in opened:
                opened[path] = _fingerprint(path)
            fingerprint, problem = opened[path]
            yield doctor_pb2.ModelFacts(
                process=command.name, path=str(path), fingerprint=fingerprint, problem=problem
            )


def _fingerprint(path: Path) -> tuple[str, str]:
    try:
        return Checkpoint.open(path).fingerprint, ""
    except (CheckpointError, OSError) as error:
        return "", " ".join(str(error).split())


def facts_of_one_host(
    name: str, commands: tuple[ProcessCommand, ...], *, versions: Mapping[str, str]
) -> doctor_pb2.HostFacts:
    """Facts of the host of all processes of a cluster, with their known ports bound meanwhile."""
    held = HeldPorts()
    try:
        ports = [
            doctor_pb2.PortFacts(
                process=command.name,
                name=port.name,
                address=str(port.address),
                problem=held.hold(port.address),
            )
            for command in commands
            for port in command.ports
        ]
        return host_facts(name, commands, versions=versions, ports=ports)
    finally:
        held.release()


class HeldPorts:
    """Ports that are bound, so that nothing else takes them, until the check ends."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def hold(self, address: Address) -> str:
        """Bind an address; return why that is impossible, or an empty text."""
        try:
            found = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, where = found[0]
            held = socket.socket(family, kind, protocol)
        except OSError as error:
            return str(error.strerror)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(where)
            held.listen(1)
        except OSError as error:
            held.close()
            return describe_bind_error(error)
        self._sockets.append(held)
        return ""

    def release(self) -> None:
        for held in self._sockets:
            held.close()


def describe_bind_error(error: OSError) -> str:
    """What is wrong with an address, in a few words."""
    if error.errno == errno.EADDRINUSE:
        return "another process listens there"
    if error.errno == errno.EADDRNOTAVAIL:
        return "it is not an address of this host"
    return (error.strerror or str(error)).lower()
