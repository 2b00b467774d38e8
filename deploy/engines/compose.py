"""Files of Docker Compose, one per host, with the processes in the network of the host."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator

from deploy.commands import REREAD_FILES, ProcessCommand, commands, drain_timeout_s
from deploy.engines.rendered import RenderedFile, by_host, flag_lines, path_on
from deploy.spec.cluster_spec import ClusterSpec

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*", re.ASCII)
_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}
_HEAD = """\
# Start with `docker compose up -d`, stop with `docker compose down`.
# The image has `stageline` in its PATH, and its user owns {state} and {cache}.
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


def render(spec: ClusterSpec) -> tuple[RenderedFile, ...]:
    """One compose file per host."""
    return tuple(
        RenderedFile(path_on(host, "compose.yaml"), _file(spec, found))
        for host, found in by_host(commands(spec)).items()
    )


def _file(spec: ClusterSpec, found: list[ProcessCommand]) -> str:
    head = _HEAD.format(
        name=spec.name,
        image=_scalar(spec.engine.image),
        grace=f"{drain_timeout_s(spec):g}",
        state=_STATE,
        cache=_CACHE,
    )
    services = "\n".join("\n".join(_service(command)) + "\n" for command in found)
    volumes = "\n".join(f"  {command.name}-state:\n  {command.name}-cache:" for command in found)
    return f"{head}{services}\nvolumes:\n{volumes}\n"


def _service(command: ProcessCommand) -> Iterator[str]:
    yield f"  {command.name}:"
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
    yield from _resources(command)


def _mounts(command: ProcessCommand) -> dict[str, bool]:
    """Directories and files of the host, each with whether it is written.

    A mounted file stays the one that it was when another replaces it. So files that are replaced, or made,
    come with their directory.
    """
    wanted: dict[str, bool] = {}
    for used in command.paths:
        is_whole = used.is_written or used.flag in REREAD_FILES
        path = str(used.path.parent if is_whole else used.path)
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
