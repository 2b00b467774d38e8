"""Makes certificates: a cluster's own authority, and leaves for its processes. ECDSA on P-256."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from certificates.identity import Identity, parse_identity

CLOCK_SKEW = timedelta(minutes=5)
"""How far a peer's clock may be behind; certificates are valid from so long before they are made."""
MAX_LEAF_LIFE = timedelta(days=90)
MAX_NAMES = 32
DAMAGED = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What the library raises for damaged keys, certificates and requests, many when a field is read."""
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,62}(?:\.[A-Za-z0-9_-]{1,63})*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def make_authority(name: str, *, life: timedelta) -> KeyPair:
    """Make a self-signed authority that signs leaves only."""
    key, subject = new_key(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        _builder(subject, subject, key.public_key(), life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return KeyPair(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: KeyPair,
    identity: Identity,
    hosts: Sequence[str],
    public_key: ec.EllipticCurvePublicKey,
    *,
    life: timedelta,
) -> x509.Certificate:
    """Sign a leaf for a process that others reach at `hosts` (DNS names and IP addresses).

    Raises ValueError for a host that is none, too many of them, or a life above `MAX_LEAF_LIFE`.
    """
    if not timedelta(0) < life <= MAX_LEAF_LIFE:
        raise ValueError(f"a life of {life} is not above 0 and at most {MAX_LEAF_LIFE.days} days")
    if len(hosts) > MAX_NAMES:
        raise ValueError(f"a certificate with {len(hosts)} hosts, the limit is {MAX_NAMES}")
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    names += [general_name(host) for host in dict.fromkeys(hosts)]
    ca = authority.certificate
    builder = (
        _builder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)]), ca.subject, public_key, life
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(_authority_identifier(authority), critical=False)
    )
    return builder.sign(authority.key, hashes.SHA256())


def general_name(host: str) -> x509.GeneralName:
    """A host of a certificate: an IP address, else a DNS name. Raises ValueError."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ValueError(f"host {host[:253]!r} is neither a DNS name nor an IP address") from None
        return x509.DNSName(host)


def identity_of(certificate: x509.Certificate) -> Identity:
    """The identity that a certificate proves. Raises ValueError for none or several."""
    uris = _names(certificate, x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise ValueError(f"the certificate has {len(uris)} URIs in its subject alternative name, must be 1")
    return parse_identity(uris[0])


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """DNS names and IP addresses of a certificate. Raises ValueError for damaged ones."""
    addresses = map(str, _names(certificate, x509.IPAddress))
    return [*_names(certificate, x509.DNSName), *addresses]


def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether `authority` signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (*DAMAGED, InvalidSignature):
        return False
    return True


def _names(
    certificate: x509.Certificate, kind: type[x509.UniformResourceIdentifier | x509.DNSName | x509.IPAddress]
) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    except DAMAGED as error:
        raise ValueError(f"the certificate's extensions are damaged: {error}") from None
    return [str(value) for value in extension.value.get_values_for_type(kind)]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority_identifier(authority: KeyPair) -> x509.AuthorityKeyIdentifier:
    try:
        found = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound:  # an authority that another tool made
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(found.value)
