"""Pods without Kubernetes: each container in namespaces of its own, with its probes, signals and restarts."""

from __future__ import annotations

import asyncio
import http.client
import re
import shlex
import signal
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.deploy.node import Node
from tests.deploy.volumes import Volumes
from tests.fake_processes import ROOT

_POLL_S = 0.25
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64", "opt")
"""What the image of all containers has of this machine, beside this repository."""
_VARIABLE = re.compile(r"\$(?:\$|\(([A-Za-z_][A-Za-z0-9_]*)\))")
RESTART_DELAY_S = 0.5


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Text of a pod in which Kubernetes replaces $(NAME), if it is known, and $$ by $."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[1] is None else variables.get(found[1], found[0])

    return _VARIABLE.sub(replace, text)


@dataclass
class Container:
    """The process of a container."""

    process: asyncio.subprocess.Process
    pid: int
    """Of its first process, on this machine."""
    started_s: float

    def signal(self, number: int) -> None:
        if psutil.pid_exists(self.pid):
            psutil.Process(self.pid).send_signal(number)


@dataclass
class Probe:
    """One probe of a container, by time: periods are waited for in small parts."""

    spec: Mapping[str, Any]
    failing_since_s: float | None = None

    def note(self, *, is_ok: bool, now_s: float) -> None:
        if is_ok:
            self.failing_since_s = None
        elif self.failing_since_s is None:
            self.failing_since_s = now_s

    def has_failed(self, now_s: float) -> bool:
        """Whether it failed as often as permitted."""
        if self.failing_since_s is None:
            return False
        return now_s - self.failing_since_s >= self.spec["failureThreshold"] * self.spec["periodSeconds"]


@dataclass
class Pod:
    """A pod with one container. `labels`, `name` and `spec` are those of its object."""

    name: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    node: Node
    volumes: Volumes
    folder: Path
    service_variables: Mapping[str, str]
    is_ready: bool = False
    deleted_s: float | None = None
    starts: int = 0
    address: str = ""
    events: list[str] = field(default_factory=list)

    @property
    def container_spec(self) -> Mapping[str, Any]:
        (container,) = self.spec["containers"]
        return container  # type: ignore[no-any-return]

    def variables(self) -> dict[str, str]:
        """The environment of the container, in order, each with those before it."""
        found = {} if self.spec.get("enableServiceLinks") is False else dict(self.service_variables)
        for item in self.container_spec["env"]:
            if "valueFrom" in item:
                assert item["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
                found[item["name"]] = self.name
            else:
                found[item["name"]] = expanded(item["value"], found)
        return found

    def command(self) -> list[str]:
        words = [*self.container_spec["command"], *self.container_spec["args"]]
        return [expanded(word, self.variables()) for word in words]

    def log(self) -> str:
        """The lines of all its containers."""
        paths = sorted(self.folder.glob("log-*"), key=lambda path: int(path.name.split("-")[1]))
        return "".join(path.read_text(errors="replace") for path in paths)

    async def run(self) -> None:
        """Until it is deleted."""
        namespace, self.address = await asyncio.to_thread(self.node.add_pod)
        group = self.spec["securityContext"]["fsGroup"]
        mounts = {item["name"]: self.volumes.make(item, group) for item in self.spec["volumes"]}
        while self.deleted_s is None:
            self._container = await self._start(namespace, mounts)
            ended = asyncio.create_task(self._container.process.wait())
            watching = asyncio.create_task(self._probe(self._container))
            try:
                await ended
                self.events.append(f"exit code {self._container.process.returncode}")
            finally:
                watching.cancel()
                self.is_ready = False
                self._container.signal(signal.SIGKILL)
            if self.deleted_s is None:
                await asyncio.sleep(RESTART_DELAY_S)
        await asyncio.to_thread(self.node.remove_pod, namespace)

    async def delete(self) -> None:
        """Stop as the kubelet does: the preStop hook, SIGTERM, and SIGKILL at the end of the grace period."""
        self.deleted_s = time.monotonic()
        hook = self.container_spec.get("lifecycle", {}).get("preStop")
        if hook is not None:
            await asyncio.sleep(hook["sleep"]["seconds"])
        self._container.signal(signal.SIGTERM)
        left_s = self.deleted_s + self.spec["terminationGracePeriodSeconds"] - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                await self._container.process.wait()
        except TimeoutError:
            self.events.append("killed at the end of its grace period")
            self._container.signal(signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL of its process; the kubelet starts it again."""
        self._container.signal(signal.SIGKILL)

    async def _start(self, namespace: str, mounts: Mapping[str, Path]) -> Container:
        self.starts += 1
        root = self.folder / f"root-{self.starts}"
        root.mkdir(parents=True)
        script = "\n".join(self._script(root, mounts))
        command = (
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-ec",
            script,
        )
        with (self.folder / f"log-{self.starts}").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                # However the test run ends, its pods end too.
                *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace, *command),
                stdout=log,
                stderr=log,
                stdin=asyncio.subprocess.DEVNULL,
            )
        return Container(process, await _child_of(process), time.monotonic())

    def _script(self, root: Path, mounts: Mapping[str, Path]) -> Iterator[str]:
        """Builds the file system of the container, drops all rights, and becomes its command."""
        quoted = shlex.quote(str(root))
        yield "mount --make-rprivate /"
        yield f"echo {self.name} > /proc/sys/kernel/hostname"
        yield f"mount -t tmpfs -o size=8m,mode=755 image {quoted}"
        for name in _SYSTEM:
            yield f"if [ -L /{name} ]; then cp -P /{name} {quoted}/{name}; elif [ -d /{name} ]; then"
            yield f"mkdir {quoted}/{name}; mount --rbind -o ro /{name} {quoted}/{name}; fi"
        for name in ("dev", "proc", "etc", "image", "tmp", "var"):
            yield f"mkdir -p {quoted}/{name}"
        yield f"mount --rbind /dev {quoted}/dev"
        yield f"mount -t proc proc {quoted}/proc"
        for name in ("ld.so.cache", "localtime", "nsswitch.conf", "passwd", "group"):
            yield f"cp -L /etc/{name} {quoted}/etc/ 2> /dev/null || true"
        yield from _mounted(root, self.node.hosts.parent, Path("/etc/names"), is_read_only=True)
        yield f"ln -s names/hosts {quoted}/etc/hosts"
        program = f'#!/bin/sh\nexec {sys.executable} -P -m stageline "$@"\n'
        yield f"printf %s {shlex.quote(program)} > {quoted}/image/stageline"
        yield f"chmod 755 {quoted}/image/stageline"
        for mount in self.container_spec["volumeMounts"]:
            yield from _mounted(
                root,
                mounts[mount["name"]],
                Path(mount["mountPath"]),
                is_read_only=mount.get("readOnly", False),
            )
        python = Path(sys.base_prefix)  # after volumes: the repository may be in /tmp, which is one
        for directory in (ROOT, *(() if python.parts[1] in _SYSTEM else (python,))):
            yield from _mounted(root, directory, directory, is_read_only=True)
        yield from self._confined(quoted)

    def _confined(self, root: str) -> Iterator[str]:
        pod, own = self.spec["securityContext"], self.container_spec["securityContext"]
        assert pod["runAsNonRoot"], pod
        assert pod["runAsUser"] > 0, pod
        if own["readOnlyRootFilesystem"]:
            yield f"mount -o remount,ro {root}"
        limits = (
            ["--bounding-set=-all", "--inh-caps=-all"] if own["capabilities"] == {"drop": ["ALL"]} else []
        )
        if not own["allowPrivilegeEscalation"]:
            limits.append("--no-new-privs")
        user = f"--reuid={pod['runAsUser']} --regid={pod['runAsGroup']} --groups={pod['fsGroup']}"
        variables = {"PATH": "/image:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
        environment = shlex.join(
            f"{name}={value}" for name, value in {**variables, **self.variables()}.items()
        )
        yield (
            f"exec env -i {environment} /usr/sbin/chroot {root} /usr/bin/setpriv --pdeathsig KILL {user} "
            f"{' '.join(limits)} {shlex.join(self.command())}"
        )

    async def _probe(self, container: Container) -> None:
        """Startup, then liveness and readiness."""
        probes = {
            name: Probe(self.container_spec[f"{name}Probe"]) for name in ("startup", "liveness", "readiness")
        }
        while not await self._is_ok(probes["startup"]):
            if probes["startup"].has_failed(time.monotonic()):
                self.events.append("never started")
                container.signal(signal.SIGKILL)
            await asyncio.sleep(_POLL_S)
        while True:
            self.is_ready = await self._is_ok(probes["readiness"]) or (
                self.is_ready and not probes["readiness"].has_failed(time.monotonic())
            )
            if not await self._is_ok(probes["liveness"]) and probes["liveness"].has_failed(time.monotonic()):
                self.events.append("killed by its liveness probe")
                container.signal(signal.SIGKILL)
            await asyncio.sleep(_POLL_S)

    async def _is_ok(self, probe: Probe) -> bool:
        get = probe.spec["httpGet"]
        ports = {item["name"]: item["containerPort"] for item in self.container_spec["ports"]}
        loop = asyncio.get_running_loop()
        arguments = (
            self.address,
            ports[get["port"]],
            get["path"],
            get["scheme"],
            probe.spec["timeoutSeconds"],
        )
        is_ok = await loop.run_in_executor(self.node.threads, _answers, *arguments)
        probe.note(is_ok=is_ok, now_s=time.monotonic())
        return is_ok


def _answers(host: str, port: int, path: str, scheme: str, timeout_s: float) -> bool:
    """Whether a probe of the kubelet succeeds: it does not verify certificates."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    if scheme == "HTTPS":
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    try:
        connection.request("GET", path)
        return 200 <= connection.getresponse().status < 400
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _mounted(root: Path, source: Path, target: Path, *, is_read_only: bool) -> Iterator[str]:
    place = shlex.quote(f"{root}{target}")
    yield f"mkdir -p {place}"
    yield f"mount --bind {shlex.quote(str(source))} {place}"
    if is_read_only:
        yield f"mount -o remount,bind,ro {place}"


async def _child_of(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(30):
        while process.returncode is None:
            try:
                children = psutil.Process(process.pid).children()
            except psutil.NoSuchProcess:
                break
            if children:
                return children[0].pid
            await asyncio.sleep(0.02)
    # It ended at once; its log says why.
    return process.pid
