"""Certificate signing requests of processes: a name, hosts, and proof of the key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

from certificates.authority import DAMAGED, MAX_NAMES, general_name


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    """What a process asks for. Whether it gets it is for the authority to decide."""

    name: str
    hosts: tuple[str, ...]
    key: ec.EllipticCurvePublicKey

    @property
    def key_sha256(self) -> str:
        return key_sha256(self.key)


def key_sha256(key: ec.EllipticCurvePublicKey) -> str:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def make_request(name: str, hosts: Sequence[str], key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a request in PEM form, signed with `key`. Raises ValueError for a host that is none."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    )
    if hosts:
        names = x509.SubjectAlternativeName([general_name(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def parse_request(pem: bytes) -> CertificateRequest:
    """Read a request of a P-256 key and check its signature. Raises ValueError."""
    try:
        request = x509.load_pem_x509_csr(pem)
        key, is_signed = request.public_key(), request.is_signature_valid
        names = [str(attribute.value) for attribute in request.subject]
        extensions = request.extensions
    except DAMAGED:
        raise ValueError("the certificate request is not one in PEM form, or damaged") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the key of the certificate request is not one of the curve P-256")
    if not is_signed:
        raise ValueError("the certificate request is not signed with its key")
    if len(names) != 1:
        raise ValueError(f"the certificate request has {len(names)} names, must be 1")
    hosts = _hosts(extensions)
    if len(hosts) > MAX_NAMES:
        raise ValueError(f"the certificate request has {len(hosts)} hosts, the limit is {MAX_NAMES}")
    return CertificateRequest(names[0], hosts, key)


def _hosts(extensions: x509.Extensions) -> tuple[str, ...]:
    """Raises ValueError for names of other kinds, such as URIs, which are not the applicant's to choose."""
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    if not all(isinstance(name, x509.DNSName | x509.IPAddress) for name in names):
        raise ValueError("the certificate request has names that are neither DNS names nor IP addresses")
    return tuple(str(name.value) for name in names)
