"""The image of deploy/image, built without a registry, and containers of it without an engine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.debian import require
from tests.fake_processes import ROOT, wait_until

UID = 10001
IMAGE = "localhost/stageline"
_BASE = "localhost/stageline-base"
_FOLDER = ROOT / ".venv" / "deploy-image"
"""Storage of buildah; what does not change is not built again."""
_TIMEOUT_S = 3600.0
_ENTER = """\
mount --make-rprivate / && mount --bind {root} {root} && mount -t proc proc {root}/proc \\
    && mount -t tmpfs tmpfs {root}/dev && mount -t tmpfs tmpfs {root}/tmp || exit 99
for device in null zero urandom random; do
    touch {root}/dev/$device && mount --bind /dev/$device {root}/dev/$device || exit 99
done
mkdir {root}/dev/shm && mount -t tmpfs tmpfs {root}/dev/shm || exit 99
{mounts}
mount -o remount,ro,bind {root} || exit 99
exec chroot {root} setpriv --reuid={uid} --regid={uid} --clear-groups --no-new-privs --bounding-set=-all \\
    --inh-caps=-all --pdeathsig=KILL env --ignore-environment {words}
"""


def buildah(*words: str, timeout_s: float = _TIMEOUT_S) -> str:
    """The output of buildah. Raises CalledProcessError."""
    storage = ("--root", str(_FOLDER / "storage"), "--runroot", str(_FOLDER / "run"))
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    finished = subprocess.run(
        ["buildah", *storage, *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert finished.returncode == 0, f"buildah {shlex.join(words)}\n{finished.stderr[-4000:]}"
    return finished.stdout.strip()


def build_image() -> None:
    """Build the image on a base of Debian's packages; skips the test without the programs."""
    require("buildah", "debootstrap", "unshare")
    _FOLDER.mkdir(parents=True, exist_ok=True)
    if _BASE not in buildah("images", "--format", "{{.Name}}"):
        _build_base()
    settings, mounted = _settings_of_pip()
    (_FOLDER / "pip.conf").write_text(settings)
    volumes = [(_FOLDER / "pip.conf", "/etc/pip.conf"), *((path, str(path)) for path in mounted)]
    flags = [word for path, inside in volumes for word in ("--volume", f"{path}:{inside}:ro")]
    arguments = ("--build-arg", f"BASE={_BASE}", "--build-arg", "VERSION=test")
    dockerfile = ("--file", "deploy/image/Dockerfile")
    buildah("bud", "--layers", *flags, *dockerfile, *arguments, "--tag", IMAGE, ".")


def _build_base() -> None:
    folder = _FOLDER / "base"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    include = "--include=ca-certificates,python3,python3-venv"
    command = ["debootstrap", "--variant=minbase", include, "bookworm", str(folder / "rootfs")]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=True)
    (folder / "Dockerfile").write_text("FROM scratch\nADD rootfs /\n")
    buildah("bud", "--file", str(folder / "Dockerfile"), "--tag", _BASE, str(folder))
    shutil.rmtree(folder)


def _settings_of_pip() -> tuple[str, list[Path]]:
    """A pip.conf with where this machine takes its packages from, and the paths that it names."""
    listed = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    found = dict(re.findall(r"^\S+?\.(cert|find-links|index-url)='(.*)'$", listed, re.MULTILINE))
    paths = [Path(value) for value in found.values() if value.startswith("/")]
    lines = ["[global]", *(f"{name} = {value}" for name, value in found.items()), ""]
    return "\n".join(lines), [path if path.is_dir() else path.parent for path in paths]


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of this machine, at a path of a container."""

    source: Path
    target: str
    is_read_only: bool


@contextmanager
def mounted_image() -> Iterator[Path]:
    """The root file system of a container of the image."""
    container = buildah("from", IMAGE)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("umount", container)
        buildah("rm", container)


class Container:
    """A process in the image as a compose file says: read-only root, no capability, no root user."""

    def __init__(
        self,
        root: Path,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        mounts: Sequence[Mount],
        network: str,
        log: Path,
    ) -> None:
        """`network`: name of the network namespace that stands for the host."""
        self.log = log
        self._root, self._environment, self._network = root, environment, network
        self._mounts = mounts
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command(words), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        wait_until(lambda: self._is_inside() or self._process.poll() is not None, timeout_s=60)

    def _command(self, words: Sequence[str]) -> list[str]:
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        script = _ENTER.format(
            root=self._root,
            uid=UID,
            mounts="\n".join(self._mount_lines()),
            words=shlex.join([*variables, *words]),
        )
        namespaces = ("--mount", "--pid", "--fork", "--kill-child")
        enter = ("setpriv", "--pdeathsig=KILL", "nsenter", f"--net=/run/netns/{self._network}")
        return [*enter, "unshare", *namespaces, "sh", "-c", script]

    def _mount_lines(self) -> Iterator[str]:
        for mount in self._mounts:
            source, target = shlex.quote(str(mount.source)), shlex.quote(f"{self._root}{mount.target}")
            make = f"mkdir -p {target}" if mount.source.is_dir() else f"touch {target}"
            yield f"{make} && mount --bind {source} {target} || exit 99"
            if mount.is_read_only:
                yield f"mount -o remount,ro,bind {target} || exit 99"

    def _is_inside(self) -> bool:
        """Whether the process has the root of the image."""
        return bool(self._children()) and os.readlink(f"/proc/{self.pid}/root") == str(self._root)

    def _children(self) -> list[str]:
        return Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()

    @property
    def pid(self) -> int:
        """Process id, on this machine, of the first process inside."""
        children = self._children()
        assert children, self.log.read_text()
        return int(children[0])

    def exec(self, words: Sequence[str], *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as the user of the container."""
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        enter = [
            "nsenter",
            f"--target={self.pid}",
            "--mount",
            "--pid",
            "--net",
            f"--root=/proc/{self.pid}/root",
        ]
        inside = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env", "-i"]
        command = [*enter, "--wd=/", *inside, *variables, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)

    def stop(self, *, timeout_s: float) -> int:
        """SIGTERM, and the exit code; SIGKILL when it does not end in time."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        self.kill()
        return self._process.wait()

    def kill(self) -> None:
        """SIGKILL to the process inside, and with it to all others there."""
        if self._process.poll() is None:
            for child in self._children():
                os.kill(int(child), signal.SIGKILL)
            self._process.kill()
            self._process.wait()
