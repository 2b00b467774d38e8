"""Files of Docker Compose, one per host, with the processes in the network of the host."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

from certificates.identity import Role
from deploy.commands import ProcessCommand, check, commands, drain_timeout_s
from deploy.engines.rendered import RenderedFile, by_host, flag_lines, path_on
from deploy.spec.cluster_spec import ClusterSpec, WorkerSpec, default_listen_address
from wire.addresses import local_address, parse_address

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*", re.ASCII)
_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}
_HEAD = """\
# Start with `docker compose up -d`, stop with `docker compose down`.
# The image is built from deploy/image/Dockerfile: its user owns {state} and {cache}.
name: {name}

x-process: &process
  image: {image}
  entrypoint: [stageline]
  # Processes listen where they would without containers, so that other hosts and commands reach them.
  network_mode: host
  restart: on-failure
  # SIGTERM drains: running requests finish, and layers of a worker move to others.
  stop_grace_period: {grace}s
  read_only: true
  tmpfs: [/tmp]
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]

services:
"""
_STATE, _CACHE = "/var/lib/stageline", "/var/cache/stageline"


_FIRST_WORKER_PORT = 7490


def render(spec: ClusterSpec) -> tuple[RenderedFile, ...]:
    """One compose file per host."""
    spec = with_worker_ports(spec)
    check(spec)
    return tuple(
        RenderedFile(path_on(host, "compose.yaml"), _file(spec, found))
        for host, found in by_host(commands(spec)).items()
    )


def with_worker_ports(spec: ClusterSpec) -> ClusterSpec:
    """Give each worker a known port, at which its health is asked."""
    return replace(spec, workers=tuple(_with_ports(spec)))


def _with_ports(spec: ClusterSpec) -> Iterator[WorkerSpec]:
    for number, worker in enumerate(spec.workers):
        host = worker.host or spec.coordinator.host
        listen = default_listen_address(f"127.0.0.1:{_FIRST_WORKER_PORT + number}", host)
        yield worker if worker.listen is not None else replace(worker, host=host, listen=listen)


def _file(spec: ClusterSpec, found: list[ProcessCommand]) -> str:
    head = _HEAD.format(
        name=_scalar(spec.name),
        image=_scalar(spec.engine.image),
        grace=math.ceil(drain_timeout_s(spec)),
        state=_STATE,
        cache=_CACHE,
    )
    here = {command.name for command in found if command.role is Role.COORDINATOR}
    services = "\n".join("\n".join(_service(command, here)) + "\n" for command in found)
    volumes = "\n".join(f"  {command.name}-state:\n  {command.name}-cache:" for command in found)
    return f"{head}{services}\nvolumes:\n{volumes}\n"


def _service(command: ProcessCommand, coordinators: set[str]) -> Iterator[str]:
    """`coordinators`: the coordinator, if this host has it."""
    yield f"  {_scalar(command.name)}:"
    yield "    <<: *process"
    yield "    command: >-"
    for line in flag_lines(command.argv, _word):
        yield f"      {line}"
    yield "    environment:"
    own = {"XDG_STATE_HOME": _STATE, "XDG_CACHE_HOME": _CACHE}
    for name, value in {**own, **command.environment}.items():
        yield f"      {name}: {_scalar(value)}"
    yield "    volumes:"
    yield f"      - {command.name}-state:{_STATE}"
    yield f"      - {command.name}-cache:{_CACHE}"
    for directory, is_written in _mounts(command).items():
        yield f"      - {_mount(directory, is_written=is_written)}"
    yield from _health(command)
    for name in sorted(coordinators - {command.name}):
        yield f"    depends_on: {{{_scalar(name)}: {{condition: service_healthy}}}}"
    yield from _resources(command)


def _health(command: ProcessCommand) -> Iterator[str]:
    """Readiness; of the coordinator, which others wait for before they start, whether it runs."""
    address = local_address(parse_address(command.values()["--listen"]))
    words = ["CMD", "stageline", "health", "--for", command.role.value, str(address)]
    words += ["--live"] if command.role is Role.COORDINATOR else []
    directory = command.values().get("--tls-dir")
    words += [] if directory is None else ["--tls-dir", str(directory)]
    yield "    healthcheck:"
    yield f"      test: {json.dumps(words).replace('$', '$$')}"
    yield "      interval: 10s"
    yield "      timeout: 10s"
    yield "      # A large model takes long to load; failures count after that only."
    yield "      start_period: 30m"


def _mounts(command: ProcessCommand) -> dict[str, bool]:
    """Directories and files of the host, each with whether it is written."""
    wanted: dict[str, bool] = {}
    for used in command.paths:
        path = str(used.mounted)
        wanted[path] = wanted.get(path, False) or used.is_written
    return wanted


def _mount(path: str, *, is_written: bool) -> str:
    mode = "" if is_written else ":ro"
    if ":" not in path:
        return _scalar(f"{path}:{path}{mode}")
    shown = json.dumps(path.replace("$", "$$"))
    return f"{{type: bind, source: {shown}, target: {shown}, read_only: {json.dumps(not is_written)}}}"


def _resources(command: ProcessCommand) -> Iterator[str]:
    resources, has_gpu = command.resources, command.uses_gpu
    if resources.cpus is not None:
        yield f"    cpus: {resources.cpus}"
    if resources.memory_bytes is not None:
        yield f"    mem_limit: {resources.memory_bytes}"
    if has_gpu:
        yield "    deploy:"
        yield "      resources:"
        yield "        reservations:"
        yield "          # All of them, so that cuda:N is the GPU with that number on the host."
        yield "          devices: [{driver: nvidia, count: all, capabilities: [gpu]}]"


def _word(word: str) -> str:
    return shlex.quote(word).replace("$", "$$")


def _scalar(text: str) -> str:
    escaped = text.replace("$", "$$")
    is_plain = _PLAIN.fullmatch(escaped) and escaped.lower() not in _WORDS
    return escaped if is_plain else json.dumps(escaped)
