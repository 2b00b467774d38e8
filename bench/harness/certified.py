"""Certificates for the processes of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.authority import KeyPair, issue, make_authority, new_key
from certificates.files import certificate_pem, key_pem, write_new
from certificates.identity import DEFAULT_CLUSTER, Identity, Role

LIFE = timedelta(days=1)


def _new_authority() -> KeyPair:
    return make_authority("benchmarks", life=LIFE)


@dataclass(frozen=True, slots=True)
class BenchAuthority:
    """Issues certificates of processes on this machine into a folder."""

    folder: Path
    authority: KeyPair = field(default_factory=_new_authority)

    def issue(self, role: Role, name: str) -> Path:
        """Return the new directory for `--tls-dir`."""
        key, directory = new_key(), self.folder / f"{role.value}-{name}"
        identity = Identity(cluster=DEFAULT_CLUSTER, role=role, name=name)
        leaf = issue(self.authority, identity, ["127.0.0.1", "localhost"], key.public_key(), life=LIFE)
        files = {
            CA_FILE: certificate_pem(self.authority.certificate),
            KEY_FILE: key_pem(key),
            CERTIFICATE_FILE: certificate_pem(leaf),
        }
        write_new(directory, files)
        return directory
