"""The processes of this host, started and stopped with systemctl or docker compose."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from deploy import ClusterFailed
from deploy.commands import commands, drain_timeout_s
from deploy.engines import compose, systemd
from deploy.engines.programs import run_program
from deploy.engines.rendered import RenderedFile, by_host, path_on
from deploy.spec.cluster_spec import ClusterSpec
from deploy.spec.document import WrongField
from wire.user_files import state_directory

UNIT_DIRECTORY = Path("/etc/systemd/system")
_GRACE_S = 60.0
"""Time of an engine to end processes beyond their drain."""


class Systemd:
    """The units of this host. Every method raises ClusterFailed, and WrongField on another host."""

    def run(self, spec: ClusterSpec) -> list[str]:
        """Install the units, start them, and start them with the host. Changed units restart, with a drain.

        Units are started when their process is of use, which can take as long as other hosts do: not awaited.
        """
        units = _of_this_host(spec, systemd.render(spec))
        changed = _names(tuple(unit for unit in units if _replace(unit)))
        run_program("systemctl", "daemon-reload")
        run_program("systemctl", "enable", *_names(units))
        if changed:
            run_program("systemctl", "restart", "--no-block", *changed)
        run_program("systemctl", "start", "--no-block", *_names(units))
        return [
            f"{name} restarts with its new settings" if name in changed else f"{name} starts"
            for name in _names(units)
        ]

    def status(self, spec: ClusterSpec) -> list[str]:
        """The state of each unit."""
        units = _of_this_host(spec, systemd.render(spec))
        files = (f"{name}.service" for name in _names(units))  # this command knows no short names
        shown = run_program("systemctl", "list-units", "--all", "--plain", "--no-legend", *files)
        return shown.splitlines()

    def stop(self, spec: ClusterSpec) -> list[str]:
        """Drain and stop the units, and leave them off when the host starts."""
        units = _of_this_host(spec, systemd.render(spec))
        run_program("systemctl", "disable", "--now", *_names(units), timeout_s=_stop_timeout_s(spec))
        return [f"{name} stopped" for name in _names(units)]


class Compose:
    """The containers of this host. Every method raises ClusterFailed, and WrongField on another host."""

    def run(self, spec: ClusterSpec) -> list[str]:
        """Write the file of this host and start its services."""
        (rendered,) = _of_this_host(spec, compose.render(spec))
        file = _compose_file(spec)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(rendered.text, encoding="utf-8")
        _docker_compose(spec, "up", "--detach")
        return [f"services of {file} started"]

    def status(self, spec: ClusterSpec) -> list[str]:
        """The services of this host."""
        _check_started(spec)
        return _docker_compose(spec, "ps", "--all").splitlines()

    def stop(self, spec: ClusterSpec) -> list[str]:
        """Drain and remove the containers; volumes stay."""
        _check_started(spec)
        _docker_compose(spec, "down", timeout_s=_stop_timeout_s(spec))
        return [f"services of {_compose_file(spec)} stopped"]


def _of_this_host(spec: ClusterSpec, files: tuple[RenderedFile, ...]) -> tuple[RenderedFile, ...]:
    hosts = tuple(by_host(commands(spec)))
    if None in hosts:
        return files
    host = next((name for name in _own_names() if name in hosts), None)
    if host is None:
        known = ", ".join(sorted(map(str, hosts)))
        raise WrongField(
            ("coordinator", "host"), f"this host is {socket.gethostname()!r}, the file has {known}"
        )
    return tuple(file for file in files if file.path == path_on(host, Path(file.path).name))


def _own_names() -> Iterator[str]:
    """Names and addresses of this host."""
    yield socket.gethostname()
    for addresses in psutil.net_if_addrs().values():
        yield from (found.address for found in addresses)
    yield socket.getfqdn()


def _replace(unit: RenderedFile) -> bool:
    """Write a unit; return whether it replaced another text, with which a process may run."""
    path = UNIT_DIRECTORY / Path(unit.path).name
    before = path.read_text(encoding="utf-8") if path.exists() else unit.text
    path.write_text(unit.text, encoding="utf-8")
    return before != unit.text


def _names(units: tuple[RenderedFile, ...]) -> list[str]:
    return [Path(unit.path).stem for unit in units]


def _stop_timeout_s(spec: ClusterSpec) -> float:
    return drain_timeout_s(spec) + _GRACE_S


def _compose_file(spec: ClusterSpec) -> Path:
    return state_directory(os.environ) / "deploy" / spec.name / "compose.yaml"


def _check_started(spec: ClusterSpec) -> None:
    if not _compose_file(spec).exists():
        raise ClusterFailed(
            f"cluster {spec.name} was not started by this user with stageline deploy run compose"
        )


def _docker_compose(spec: ClusterSpec, *words: str, timeout_s: float = 600.0) -> str:
    file = str(_compose_file(spec))
    return run_program("docker", "compose", "--file", file, *words, timeout_s=timeout_s)
