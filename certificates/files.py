"""The files of a process's certificate, as cert-manager and SPIRE write them too, and their changes.

A directory holds `ca.crt` (one or several authorities that peers may be signed by), `tls.crt` (the leaf, and
intermediates after it) and `tls.key`.
"""

from __future__ import annotations

import errno
import logging
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.authority import DAMAGED, KeyPair, identity_of
from certificates.identity import Identity
from certificates.private_files import read_private, read_regular

log = logging.getLogger(__name__)

AUTHORITY_KEY_FILE = "ca.key"
MAX_BYTES = 1 << 20


class UnusableTlsFiles(OSError):
    """Files of a certificate are missing, readable by others, or do not belong together."""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What one version of the files says.

    The PEM texts are made of the parsed objects: TLS libraries differ in what they read around and between.
    """

    ca_pem: bytes
    chain_pem: bytes
    key_pem: bytes = field(repr=False)
    leaf: x509.Certificate
    identity: Identity

    @property
    def expires_at(self) -> datetime:
        return self.leaf.not_valid_after_utc

    def life_left(self, now: datetime) -> float:
        """Fraction of the certificate's life that is left; 0 after its end."""
        begin, end = self.leaf.not_valid_before_utc, self.leaf.not_valid_after_utc
        return max(0.0, (end - now) / (end - begin))

    def load_chain(self, context: ssl.SSLContext) -> None:
        """Give a context the certificate and its key. Raises ssl.SSLError.

        Python reads them from files only; the files of the directory may just be changing.
        """
        descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.chain_pem + b"\n" + self.key_pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")


def read_tls_material(directory: Path) -> TlsMaterial:
    """Read and check a directory. Raises UnusableTlsFiles with one line that names the file."""
    ca_path, chain_path = directory / CA_FILE, directory / CERTIFICATE_FILE
    authorities, chain = read_certificates(ca_path), read_certificates(chain_path)
    key, leaf = _load_key(directory / KEY_FILE, read_key_file(directory / KEY_FILE)), chain[0]
    try:
        is_its_key = _public_bytes(key.public_key()) == _public_bytes(leaf.public_key())
        identity = identity_of(leaf)
    except DAMAGED as error:
        raise UnusableTlsFiles(f"{chain_path}: {error}") from None
    if not is_its_key:
        raise UnusableTlsFiles(f"{directory / KEY_FILE} is not the key of {chain_path}")
    _check_time(chain_path, leaf)
    material = TlsMaterial(_joined(authorities), _joined(chain), key_pem(key), leaf, identity)
    _check_loads(directory, material)
    return material


class TlsDirectory:
    """The newest usable version of a directory's files.

    Files are looked at when they are needed; a version that cannot be used is logged once, and the one before
    it stays in use.
    """

    def __init__(self, directory: Path) -> None:
        """Raises UnusableTlsFiles."""
        self.directory = directory
        self.on_reload: Callable[[str, str | None], None] = lambda what, problem: None
        """Called by any thread with the directory, and the problem of files that cannot be used."""
        self._seen = self._stamp()
        self._material = read_tls_material(directory)
        self._ended: TlsMaterial | None = None

    def current(self) -> TlsMaterial:
        """The newest usable version; called by any thread."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            self._reload()
        self._report_end(self._material)
        return self._material

    def _report_end(self, material: TlsMaterial) -> None:
        """Log once that peers refuse the certificate: they do not tell why."""
        if material is not self._ended and material.expires_at <= datetime.now(UTC):
            self._ended = material
            log.error(
                "certificate of %s in %s ended at %s: new connections fail until it is renewed",
                *(material.identity, self.directory, material.expires_at.isoformat(timespec="seconds")),
            )

    def _reload(self) -> None:
        try:
            material = self._material = read_tls_material(self.directory)
        except UnusableTlsFiles as error:
            log.warning("%s; the certificate before stays in use", error)
            self.on_reload(str(self.directory), str(error))
            return
        log.info(
            "certificate of %s was read again, it ends at %s",
            *(material.identity, material.expires_at.isoformat(timespec="seconds")),
        )
        self.on_reload(str(self.directory), None)

    def _stamp(self) -> Sequence[tuple[int, int, int] | None]:
        return [_stamp(self.directory / name) for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)]


def read_authority(directory: Path) -> KeyPair:
    """Read the authority that `write_authority` wrote. Raises UnusableTlsFiles."""
    path = directory / CA_FILE
    certificate = read_certificates(path)[0]
    key = _load_key(directory / AUTHORITY_KEY_FILE, read_key_file(directory / AUTHORITY_KEY_FILE))
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UnusableTlsFiles(f"{directory / AUTHORITY_KEY_FILE} is not a key of an elliptic curve")
    if _public_bytes(key.public_key()) != _public_bytes(certificate.public_key()):
        raise UnusableTlsFiles(f"{directory / AUTHORITY_KEY_FILE} is not the key of {path}")
    return KeyPair(certificate, key)


def write_authority(directory: Path, authority: KeyPair) -> None:
    """Write a new authority. Raises OSError; FileExistsError if one is there."""
    write_new(
        directory,
        {AUTHORITY_KEY_FILE: key_pem(authority.key), CA_FILE: certificate_pem(authority.certificate)},
    )


def write_new(directory: Path, files: dict[str, bytes], *, is_secret: bool = False) -> None:
    """Write files of a certificate where none is; keys with mode 0600. Raises OSError and FileExistsError."""
    for name in files:
        if os.path.lexists(directory / name):
            raise FileExistsError(f"{directory / name} exists: choose another directory, or remove it first")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace(directory, files, is_secret=is_secret)


def replace(directory: Path, files: dict[str, bytes], *, is_secret: bool = False) -> None:
    """Replace files of a certificate, each at once; readers wait until all fit. Raises OSError.

    Keys, and all files if they are secret, have mode 0600.
    """
    for name, content in files.items():
        fresh = directory / f".{name}.{os.getpid()}"
        mode = 0o600 if is_secret or name.endswith(".key") else 0o644
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            fresh.rename(directory / name)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Read the certificates of a file, at least one. Raises UnusableTlsFiles."""
    return _parse(path, _read(path))


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def read_key_file(path: Path) -> bytes:
    """Read a private key. Raises UnusableTlsFiles, also if other users may read it."""
    try:
        return read_private(path, max_bytes=MAX_BYTES)
    except OSError as error:
        raise _unusable(path, error) from None


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, max_bytes=MAX_BYTES)[0]
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> UnusableTlsFiles:
    advice = ": `stageline certs` and join tokens make certificates" if error.errno == errno.ENOENT else ""
    return UnusableTlsFiles(f"{path}: {error.strerror.lower()}{advice}" if error.strerror else str(error))


def _joined(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(map(certificate_pem, certificates))


def _parse(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except DAMAGED:
        raise UnusableTlsFiles(f"{path} has no certificate in PEM form, or a damaged one") from None


def _load_key(path: Path, pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        return load_pem_private_key(pem, password=None)  # type: ignore[return-value]  # any kind serves
    except DAMAGED:
        raise UnusableTlsFiles(f"{path} has no private key in PEM form, or one with a passphrase") from None


def _public_bytes(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _check_loads(directory: Path, material: TlsMaterial) -> None:
    """Raises UnusableTlsFiles for what would fail in each handshake, such as weak signatures."""
    context, authorities = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), material.ca_pem.decode("ascii")
    loads: dict[str, Callable[[], None]] = {
        CA_FILE: lambda: context.load_verify_locations(cadata=authorities),
        CERTIFICATE_FILE: lambda: material.load_chain(context),
    }
    for name, load in loads.items():
        try:
            load()
        except ssl.SSLError as error:
            raise UnusableTlsFiles(f"OpenSSL refuses {directory / name}: {error.reason or error}") from None


def _check_time(path: Path, leaf: x509.Certificate) -> None:
    now = datetime.now(UTC)
    if now >= leaf.not_valid_after_utc:
        raise UnusableTlsFiles(f"{path} ended at {leaf.not_valid_after_utc.isoformat(timespec='seconds')}")
    if now < leaf.not_valid_before_utc:
        begin = leaf.not_valid_before_utc.isoformat(timespec="seconds")
        raise UnusableTlsFiles(f"{path} is not valid before {begin}")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
