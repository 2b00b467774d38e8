"""Programs of Debian that tests of deployments need."""

from __future__ import annotations

import os
import shutil

import pytest

_PACKAGES = {
    "buildah": "buildah",
    "curl": "curl",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "munged": "munge",
    "nsenter": "util-linux",
    "sbatch": "slurm-client",
    "setpriv": "util-linux",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "systemd-analyze": "systemd",
    "unshare": "util-linux",
}
"""Package of each program; debian.txt lists the packages for `make deploy-packages`."""


def require(*programs: str) -> None:
    """Skip the test, which names what is missing, without one of the programs or root."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = sorted({_PACKAGES[program] for program in programs if shutil.which(program, path=path) is None})
    if missing:
        pytest.skip(f"needs Debian's {', '.join(missing)}: run `make deploy-packages` as root")
    if os.geteuid() != 0:
        pytest.skip("needs root, for namespaces and mounts")
