"""Volumes of pods as the kubelet makes them, with owners, modes and replaced files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

_versions = count(1)
Files = Mapping[str, bytes]


@dataclass
class WrittenFiles:
    """A volume of files that change all at once by one symbolic link, as the kubelet's atomic writer does."""

    folder: Path
    group: int
    mode: int

    def write(self, files: Files) -> None:
        """Replace all files; the former ones are gone afterwards."""
        version = self.folder / f"..v{next(_versions)}"
        for name, content in files.items():
            path = version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            os.chown(path, 0, self.group)
            # The kubelet lets the group of the pod read what its owner may read.
            path.chmod(self.mode | 0o440)
        for directory in [version, *(path for path in version.rglob("*") if path.is_dir())]:
            os.chown(directory, 0, self.group)
            directory.chmod(0o750)
        current = self.folder / "..data"
        former = current.resolve() if current.is_symlink() else None
        fresh = self.folder / "..data_tmp"
        fresh.symlink_to(version.name)
        fresh.rename(current)
        for name in {name.partition("/")[0] for name in files}:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        if former is not None:
            shutil.rmtree(former)


class Volumes:
    """The volumes of one pod, each a directory of this machine."""

    def __init__(
        self,
        folder: Path,
        claims: Path,
        secrets: Mapping[str, Files],
        driver: Callable[[Mapping[str, str]], Files],
    ) -> None:
        """`driver` makes the files of a volume of cert-manager's CSI driver from its attributes."""
        self._folder, self._claims, self._secrets, self._driver = folder, claims, secrets, driver
        self._written: list[tuple[WrittenFiles, Callable[[], Files]]] = []

    def make(self, volume: Mapping[str, Any], group: int) -> Path:
        """The directory of a volume, with the group of the pod. Raises KeyError for a missing Secret."""
        (kind,) = set(volume) - {"name"}
        source = volume[kind]
        match kind:
            case "hostPath":
                return Path(source["path"])
            case "persistentVolumeClaim":
                return _owned(self._claims / source["claimName"], group)
            case "emptyDir":
                return _owned(self._folder / volume["name"], group)
            case "secret":
                name = source["secretName"]
                return self._files(volume["name"], group, source["defaultMode"], lambda: self._secrets[name])
            case "projected":
                return self._files(
                    volume["name"], group, source["defaultMode"], lambda: self._projected(source)
                )
            case "csi":
                assert source["driver"] == "csi.cert-manager.io"
                owner = int(source["volumeAttributes"]["csi.cert-manager.io/fs-group"])
                made = self._driver(source["volumeAttributes"])
                return self._files(volume["name"], owner, 0o440, lambda: made)
        raise NotImplementedError(kind)

    def refresh(self) -> None:
        """Write the Secrets again, which have changed."""
        for written, files in self._written:
            written.write(files())

    def _files(self, name: str, group: int, mode: int, files: Callable[[], Files]) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        os.chown(folder, 0, group)
        folder.chmod(0o750)
        written = WrittenFiles(folder, group, mode)
        written.write(files())
        self._written.append((written, files))
        return folder

    def _projected(self, source: Mapping[str, Any]) -> Files:
        return {
            item["path"]: self._secrets[each["secret"]["name"]][item["key"]]
            for each in source["sources"]
            for item in each["secret"]["items"]
        }


def _owned(folder: Path, group: int) -> Path:
    """A directory that the group of the pod may write; what is in it is left alone (OnRootMismatch)."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.stat().st_gid != group:
        os.chown(folder, 0, group)
        folder.chmod(0o2770)
    return folder
