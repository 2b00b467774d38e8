"""Certificates of a cluster of tests, made on request."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import grpc

import certificates.authority
from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.authority import KeyPair, issue, make_authority, new_key
from certificates.files import certificate_pem, key_pem, replace
from certificates.identity import DEFAULT_CLUSTER, Identity, Role
from wire.channels import CHANNEL_OPTIONS

LOOPBACK = ("127.0.0.1", "localhost")
LIFE = timedelta(hours=1)


class Certificates:
    """One authority, and the directories of the processes that it has certified."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = make_authority("authority of tests", life=LIFE)
        self.trusted = [self.authority]
        """What the next certificates are written with as authorities of others."""
        self.deny_list = folder / "denied"
        self.deny_list.write_text("")

    def of(self, name: str, role: Role, *, cluster: str = DEFAULT_CLUSTER) -> Path:
        """The directory of a process, which is made at the first call."""
        directory = self.folder / f"{role.value}-{name}-{cluster}"
        if not directory.exists():
            directory.mkdir(mode=0o700)
            self.write(directory, Identity(cluster=cluster, role=role, name=name))
        return directory

    def write(
        self,
        directory: Path,
        identity: Identity,
        *,
        authority: KeyPair | None = None,
        hosts: Sequence[str] = LOOPBACK,
        made_in: timedelta = timedelta(0),
    ) -> None:
        """Write a new certificate over the former one, if any; as one made so much later."""
        key = new_key()
        with patch.object(certificates.authority, "datetime") as clock:
            clock.now.return_value = datetime.now(UTC) + made_in
            leaf = issue(authority or self.authority, identity, hosts, key.public_key(), life=LIFE)
        trusted = b"".join(certificate_pem(pair.certificate) for pair in self.trusted)
        replace(
            directory,
            {CA_FILE: trusted, KEY_FILE: key_pem(key), CERTIFICATE_FILE: certificate_pem(leaf)},
        )


def careless_channel(directory: Path, address: str) -> grpc.aio.Channel:
    """A channel with the certificate of a directory, which is not checked on this side."""
    ca, key, chain = ((directory / name).read_bytes() for name in (CA_FILE, KEY_FILE, CERTIFICATE_FILE))
    credentials = grpc.ssl_channel_credentials(ca, key, chain)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
