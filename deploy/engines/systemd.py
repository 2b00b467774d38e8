"""Units of systemd 250 and newer, one per process, in a directory per host."""

from __future__ import annotations

import math
import re

from certificates.identity import Role
from deploy.commands import ProcessCommand, commands, drain_timeout_s
from deploy.engines.rendered import RenderedFile, by_host, flag_lines, path_on
from deploy.spec.cluster_spec import ClusterSpec
from wire.exit_codes import ExitCode

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+%-]+", re.ASCII)
WATCHDOG_S = 60
START_TIMEOUT_S = 300
"""From the start of Python to the first notification."""
_HOMES = ("/home/", "/root/", "/run/user/")
_TITLES = {Role.COORDINATOR: "coordinator", Role.GATEWAY: "gateway", Role.WORKER: "stage worker"}
_HARDENING = """
# The process reads the file system, and writes its own directories only.
ProtectSystem=strict
ProtectHome={home}
PrivateTmp=yes
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
LockPersonality=yes
RemoveIPC=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
"""
_GPU_DEVICES = """\
# Devices of NVIDIA's and AMD's drivers.
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
DeviceAllow=char-drm rw
DeviceAllow=/dev/kfd rw
"""


def render(spec: ClusterSpec) -> tuple[RenderedFile, ...]:
    """One service unit per process."""
    return tuple(
        RenderedFile(path_on(host, f"{_unit_name(spec, command)}.service"), _unit(spec, command))
        for host, found in by_host(commands(spec)).items()
        for command in found
    )


def _unit_name(spec: ClusterSpec, command: ProcessCommand) -> str:
    return f"{spec.name}-{command.name}"


def _unit(spec: ClusterSpec, command: ProcessCommand) -> str:
    title, name = _TITLES[command.role], _unit_name(spec, command)
    return "\n".join(
        (
            f"# /etc/systemd/system/{name}.service",
            "[Unit]",
            f"Description=Stageline {title}" + ("" if command.name == title else f" {command.name}"),
            "Wants=network-online.target",
            "After=network-online.target",
            "# Processes wait for each other: a restart is always worth trying.",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            *_notifications(command),
            _exec_start(spec, command),
            *_credentials(command),
            f"User={spec.engine.user}",
            f"Group={spec.engine.user}",
            f"StateDirectory={name}",
            f"CacheDirectory={name}",
            f"Environment=XDG_STATE_HOME=%S/{name} XDG_CACHE_HOME=%C/{name}",
            *_environment(command),
            *_written(command),
            *_limits(command),
            "LimitNOFILE=65536",
            "",
            "Restart=on-failure",
            "RestartSec=2",
            f"# Exit code {ExitCode.USAGE.value}: wrong settings, which a restart does not cure.",
            f"RestartPreventExitStatus={ExitCode.USAGE.value}",
            f"# SIGTERM drains: {_what_drains(command.role)}.",
            "KillMode=mixed",
            f"TimeoutStopSec={math.ceil(drain_timeout_s(spec))}",
            _HARDENING.format(home=_home(command)) + _devices(command),
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        )
    )


def _notifications(command: ProcessCommand) -> list[str]:
    return [
        f"# Started: {_when_started(command.role)}. Its event loop feeds the watchdog.",
        "Type=notify",
        "NotifyAccess=main",
        f"WatchdogSec={WATCHDOG_S}",
        "# The process extends it while it waits or loads, and the time to stop while it drains.",
        f"TimeoutStartSec={START_TIMEOUT_S}",
    ]


def _when_started(role: Role) -> str:
    if role is Role.WORKER:
        return "it serves a stage, or has joined without one"
    return "it listens" if role is Role.COORDINATOR else "the coordinator is connected"


def _what_drains(role: Role) -> str:
    if role is Role.WORKER:
        return "the layers of the worker move to others"
    return "running requests finish"


def _exec_start(spec: ClusterSpec, command: ProcessCommand) -> str:
    words = list(command.argv)
    for used in command.paths:
        if used.is_secret:
            words[words.index(used.flag) + 1] = f"%d/{used.flag.removeprefix('--')}"
    program = _quote(spec.engine.program.replace("%", "%%"))
    escaped = tuple(word if word.startswith("%d/") else word.replace("%", "%%") for word in words)
    return f"ExecStart={program} " + " \\\n    ".join(flag_lines(escaped, _quote))


def _environment(command: ProcessCommand) -> list[str]:
    return [
        "Environment=" + _quote(f"{name}={value}".replace("%", "%%"), is_command=False)
        for name, value in command.environment.items()
    ]


def _credentials(command: ProcessCommand) -> list[str]:
    """Secrets that are read once. Certificates and API keys are read again when their files change."""
    return [
        f"LoadCredential={used.flag.removeprefix('--')}:{used.path}".replace("%", "%%")
        for used in command.paths
        if used.is_secret
    ]


def _written(command: ProcessCommand) -> list[str]:
    directories = dict.fromkeys(str(used.path.parent) for used in command.paths if used.is_written)
    return [
        "ReadWritePaths=" + _quote(directory.replace("%", "%%"), is_command=False)
        for directory in directories
    ]


def _limits(command: ProcessCommand) -> list[str]:
    lines = []
    if command.resources.cpus is not None:
        lines.append(f"CPUQuota={command.resources.cpus * 100:.0f}%")
    if command.resources.memory_bytes is not None:
        lines.append(f"MemoryMax={command.resources.memory_bytes}")
    return lines


def _home(command: ProcessCommand) -> str:
    """Whether home directories are hidden, or only read because a file of the process is in one."""
    is_in_home = any(str(used.path).startswith(_HOMES) for used in command.paths)
    return "read-only" if is_in_home else "yes"


def _devices(command: ProcessCommand) -> str:
    return _GPU_DEVICES if command.uses_gpu else "PrivateDevices=yes\n"


def _quote(word: str, *, is_command: bool = True) -> str:
    escaped = word.replace("$", "$$") if is_command else word
    if _PLAIN.fullmatch(escaped):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'
