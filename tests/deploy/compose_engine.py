"""Runs the services of a compose file from the built image, as `docker compose` would."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.images import UID, Container, Mount

_UNDERSTOOD = {
    *("image", "entrypoint", "network_mode", "restart", "stop_grace_period", "read_only", "tmpfs"),
    *("cap_drop", "security_opt", "command", "environment", "volumes", "healthcheck", "depends_on"),
}


class ComposeEngine:
    """The services of a file, on a host that is a network namespace."""

    def __init__(self, file: Path, *, root: Path, network: str, folder: Path) -> None:
        self._document: dict[str, Any] = yaml.safe_load(file.read_text())
        self._root, self._network, self._folder = root, network, folder
        self.containers: dict[str, Container] = {}

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self._document["services"]
        return found

    async def up(self) -> None:
        """Start every service after those that it depends on are healthy."""
        waiting = dict(self.services)
        while waiting:
            name = next(name for name in waiting if not waiting.keys() & self._needs(name))
            for needed in self._needs(name):
                await self.until_healthy(needed)
            self._start(name, waiting.pop(name))

    async def until_healthy(self, name: str, *, timeout_s: float = 300.0) -> None:
        """Wait until the health check of a service passes."""
        async with asyncio.timeout(timeout_s):
            while self.check(name).returncode != 0:
                await asyncio.sleep(0.5)

    def check(self, name: str) -> subprocess.CompletedProcess[str]:
        """Run the health check of a service once."""
        kind, *words = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return self.containers[name].exec([_plain(word) for word in words])

    def down(self) -> dict[str, int]:
        """Stop the services, those first that depend on others; their exit codes."""
        names = sorted(self.containers, key=lambda name: not self._needs(name))
        return {name: self.containers.pop(name).stop(timeout_s=self._grace_s(name)) for name in names}

    def _grace_s(self, name: str) -> float:
        return float(self.services[name]["stop_grace_period"].removesuffix("s"))

    def kill(self) -> None:
        for container in self.containers.values():
            container.kill()

    def _needs(self, name: str) -> set[str]:
        needed = self.services[name].get("depends_on", {})
        assert all(each == {"condition": "service_healthy"} for each in needed.values())
        return set(needed)

    def _start(self, name: str, service: dict[str, Any]) -> None:
        assert set(service) <= _UNDERSTOOD, set(service) - _UNDERSTOOD
        assert (service["network_mode"], service["read_only"], service["tmpfs"]) == ("host", True, ["/tmp"])
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        path = "/opt/stageline/bin:/usr/local/bin:/usr/bin:/bin"
        variables = {key: _plain(value) for key, value in service["environment"].items()}
        self.containers[name] = Container(
            self._root,
            [*service["entrypoint"], *(_plain(word) for word in shlex.split(service["command"]))],
            environment={"PATH": path, "PYTHONUNBUFFERED": "1", **variables},
            mounts=[self._mount(text) for text in service["volumes"]],
            network=self._network,
            log=self._folder / f"{name}.log",
        )

    def _mount(self, text: str) -> Mount:
        source, target, *mode = _plain(text).split(":")
        if source.startswith("/"):
            return Mount(Path(source), target, mode == ["ro"])
        assert source in self._document["volumes"], f"volume {source} is not declared"
        volume = self._folder / "volumes" / source
        if not volume.exists():
            # A new volume is as the image has the directory.
            volume.mkdir(parents=True)
            volume.chmod(0o700)
            subprocess.run(["chown", f"{UID}:{UID}", str(volume)], check=True)
        return Mount(volume, target, False)


def _plain(text: str) -> str:
    return text.replace("$$", "$")
