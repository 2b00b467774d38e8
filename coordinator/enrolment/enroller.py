"""Decides who gets a certificate: join tokens, names, hosts, and renewals of former certificates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography import x509

from certificates import CA_FILE
from certificates.authority import KeyPair, hosts_of, identity_of, issue
from certificates.files import TlsDirectory, certificate_pem, read_authority, read_certificates
from certificates.identity import Identity
from certificates.join_tokens import ROLES, JoinTokenStore, JoinTokenUnusable
from certificates.requests import CertificateRequest, parse_request
from wire.audit import Action, AuditLog, AuditOutcome
from wire.authorization import DenyList
from wire.errors import AccessDenied, CertificateRefused, InvalidRequest, JoinTokenRefused

CERTIFICATE_LIFE = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A new certificate, and the authorities that its holder shall trust; both in PEM form."""

    certificate: str
    authorities: str


class Enroller:
    """Signs certificates with the authority in a directory. Its methods block: they read files."""

    def __init__(
        self,
        authority: Path,
        tokens: JoinTokenStore,
        own: TlsDirectory,
        denied: DenyList,
        audit: AuditLog,
        *,
        life: timedelta = CERTIFICATE_LIFE,
    ) -> None:
        """`own` are the coordinator's files. Raises OSError for an unusable authority or tokens."""
        self._directory, self._tokens, self._own = authority, tokens, own
        self._denied, self._audit, self._life = denied, audit, life
        read_authority(authority)
        tokens.records()

    def authorities(self) -> bytes:
        """Certificates of the authority, in PEM form, which applicants compare with their token."""
        return b"".join(map(certificate_pem, read_certificates(self._directory / CA_FILE)))

    def enrol(self, token_id: str, secret: str, request_pem: bytes, *, host: str) -> Enrolled:
        """Certify the applicant at `host`. Raises JoinTokenRefused, InvalidRequest and AccessDenied."""
        request = self._parse(request_pem)
        own = self._own.current()
        self._check_hosts(request, hosts_of(own.leaf), host)
        try:
            Identity(cluster=own.identity.cluster, role=ROLES[0], name=request.name)
            role = self._tokens.redeem(token_id, secret, request.key_sha256)
        except JoinTokenUnusable as error:
            raise JoinTokenRefused(str(error)) from None
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        identity = Identity(
            trust_domain=own.identity.trust_domain,
            cluster=own.identity.cluster,
            role=role,
            name=request.name,
        )
        return self._issue(Action.ENROL, identity, (*request.hosts, host), request, host, token=token_id)

    def renew(self, certificate: x509.Certificate, request_pem: bytes, *, host: str) -> Enrolled:
        """Certify the holder of `certificate`, which its TLS connection proved, again.

        Raises CertificateRefused, InvalidRequest and AccessDenied.
        """
        request = self._parse(request_pem)
        own = self._own.current().identity
        try:
            identity = identity_of(certificate)
        except ValueError as error:
            raise CertificateRefused(str(error)) from None
        if (identity.trust_domain, identity.cluster) != (own.trust_domain, own.cluster):
            raise CertificateRefused(f"{identity.uri} is of another cluster: this is {own.cluster}")
        if self._denied.denies(identity, certificate.serial_number):
            raise CertificateRefused(f"the certificate of {identity} is on the deny list")
        if identity.role not in ROLES:
            raise AccessDenied(f"{identity} did not get its certificate here")
        if request.name != identity.name:
            raise AccessDenied(f"{identity} may not get a certificate for {request.name[:64]!r}")
        return self._issue(Action.RENEW, identity, hosts_of(certificate), request, host)

    def _parse(self, pem: bytes) -> CertificateRequest:
        try:
            return parse_request(pem)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    def _check_hosts(self, request: CertificateRequest, own: Sequence[str], host: str) -> None:
        """Raises AccessDenied for hosts of the coordinator: their owner could pose as it."""
        taken = {name.lower() for name in own} - {host, *_LOOPBACK}
        if found := [name for name in request.hosts if name.lower() in taken]:
            raise AccessDenied(f"host {found[0][:253]} is the coordinator's")

    def _issue(
        self,
        action: Action,
        identity: Identity,
        hosts: Iterable[str],
        request: CertificateRequest,
        host: str,
        *,
        token: str | None = None,
    ) -> Enrolled:
        authority: KeyPair = read_authority(self._directory)
        names = [*dict.fromkeys(hosts)]
        leaf = issue(authority, identity, names, request.key, life=self._life)
        self._audit.record(
            action,
            AuditOutcome.OK,
            who=identity,
            host=host,
            token=token,
            serial=f"{leaf.serial_number:x}",
            hosts=" ".join(names),
            ends=leaf.not_valid_after_utc.isoformat(timespec="seconds"),
        )
        trusted = self._own.current().ca_pem.decode("ascii", "replace")
        return Enrolled(certificate_pem(leaf).decode("ascii"), trusted)


_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of every host."""
