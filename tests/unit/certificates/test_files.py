"""A directory of certificate files is used when all of it fits, and read again when it changes."""

from __future__ import annotations

import logging
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.authority import KeyPair, issue, make_authority, new_key
from certificates.files import (
    TlsDirectory,
    UnusableTlsFiles,
    certificate_pem,
    key_pem,
    read_authority,
    read_tls_material,
    replace,
    write_authority,
    write_new,
)
from certificates.identity import Identity, Role

WORKER = Identity(cluster="c", role=Role.WORKER, name="w0")
DAY = timedelta(days=1)


def files_of(authority: KeyPair, *, life: timedelta = DAY) -> dict[str, bytes]:
    key = new_key()
    leaf = issue(authority, WORKER, (), key.public_key(), life=life)
    return {
        KEY_FILE: key_pem(key),
        CERTIFICATE_FILE: certificate_pem(leaf),
        CA_FILE: certificate_pem(authority.certificate),
    }


@pytest.fixture
def authority() -> KeyPair:
    return make_authority("test", life=DAY)


@pytest.fixture
def directory(authority: KeyPair, tmp_path: Path) -> Path:
    write_new(tmp_path / "w0", files_of(authority))
    return tmp_path / "w0"


def test_files_are_written_for_their_owner_and_never_over_others(directory: Path, authority: KeyPair) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {KEY_FILE: 0o600, CERTIFICATE_FILE: 0o644, CA_FILE: 0o644}
    before = (directory / KEY_FILE).read_bytes()
    with pytest.raises(FileExistsError, match=r"tls\.key exists: choose another directory"):
        write_new(directory, files_of(authority))
    assert (directory / KEY_FILE).read_bytes() == before


def test_an_authority_is_read_as_it_was_written(tmp_path: Path, authority: KeyPair) -> None:
    write_authority(tmp_path / "ca", authority)
    assert read_authority(tmp_path / "ca").certificate == authority.certificate
    with pytest.raises(FileExistsError):
        write_authority(tmp_path / "ca", authority)
    (tmp_path / "ca" / CA_FILE).write_bytes(certificate_pem(make_authority("other", life=DAY).certificate))
    with pytest.raises(UnusableTlsFiles, match=r"ca\.key is not the key of .*ca\.crt"):
        read_authority(tmp_path / "ca")


def test_comments_of_a_bundle_reach_no_tls_library(directory: Path, authority: KeyPair) -> None:
    """Python's takes ASCII only."""
    bundle = "# Főtanúsítvány\n".encode() + certificate_pem(authority.certificate) + b"\xff"
    replace(directory, {CA_FILE: bundle})
    assert read_tls_material(directory).ca_pem == certificate_pem(authority.certificate)


def test_a_directory_has_an_identity_and_an_end(directory: Path) -> None:
    material = read_tls_material(directory)
    assert material.identity == WORKER
    now = datetime.now(UTC)
    assert now + DAY - timedelta(minutes=1) < material.expires_at <= now + DAY
    assert 0.99 < material.life_left(now) <= 1.0
    assert material.life_left(now + 2 * DAY) == 0.0
    assert "PRIVATE" not in repr(material)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (CERTIFICATE_FILE, None, r"tls\.crt: no such file"),
        (KEY_FILE, None, r"tls\.key: no such file"),
        (CERTIFICATE_FILE, b"text", r"tls\.crt has no certificate in PEM form"),
        (CA_FILE, b"", r"ca\.crt has no certificate"),
        (KEY_FILE, b"text", r"tls\.key has no private key"),
        (KEY_FILE, key_pem(new_key()), r"tls\.key is not the key of .*tls\.crt"),
        (CA_FILE, b"x" * (1 << 20) + b"x", r"ca\.crt is too large, the limit is 1048576 bytes"),
    ],
)
def test_files_that_do_not_fit_are_named(
    directory: Path, name: str, content: bytes | None, reason: str
) -> None:
    (directory / name).unlink()
    if content is not None:
        replace(directory, {name: content})
    with pytest.raises(UnusableTlsFiles, match=reason):
        read_tls_material(directory)


def test_a_key_that_others_may_read_is_refused(directory: Path) -> None:
    (directory / KEY_FILE).chmod(0o640)
    if os.geteuid() == 0:
        with pytest.raises(UnusableTlsFiles, match=r"has mode 0640, must be 0600 or stricter: run chmod 600"):
            read_tls_material(directory)
    (directory / KEY_FILE).chmod(0o604)
    with pytest.raises(UnusableTlsFiles, match="has mode 0604"):
        read_tls_material(directory)
    (directory / KEY_FILE).chmod(0o400)
    assert read_tls_material(directory).identity == WORKER


def test_a_pipe_is_no_file(directory: Path) -> None:
    (directory / KEY_FILE).unlink()
    os.mkfifo(directory / KEY_FILE, 0o600)
    with pytest.raises(UnusableTlsFiles, match="is not a regular file"):
        read_tls_material(directory)


def test_certificates_that_are_not_valid_now_are_refused(
    directory: Path, authority: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for offset, reason in ((2 * DAY, "ended at"), (-DAY, "is not valid before")):
        with monkeypatch.context() as patch:
            patch.setattr("certificates.files.datetime", _clock(datetime.now(UTC) + offset))
            with pytest.raises(UnusableTlsFiles, match=reason):
                read_tls_material(directory)


def test_the_end_of_a_certificate_in_use_is_logged_once(
    directory: Path, authority: KeyPair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TlsDirectory(directory)
    material = files.current()
    assert not caplog.records
    monkeypatch.setattr("certificates.files.datetime", _clock(material.expires_at))
    assert files.current() is files.current() is material
    assert [record.message for record in caplog.records] == [
        f"certificate of worker w0 in {directory} ended at {material.expires_at.isoformat()}: "
        "new connections fail until it is renewed"
    ]


def _clock(now: datetime) -> type:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return now

    return Clock


def test_changed_files_are_read_again_and_bad_ones_are_not_used(
    directory: Path, authority: KeyPair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = TlsDirectory(directory)
    first = files.current()
    assert files.current() is first
    fresh = files_of(authority)
    replace(directory, {KEY_FILE: fresh[KEY_FILE]})
    assert files.current() is files.current() is first
    assert [record.message for record in caplog.records if "not the key" in record.message] == [
        f"{directory / KEY_FILE} is not the key of {directory / CERTIFICATE_FILE}; the certificate before "
        "stays in use"
    ]
    replace(directory, {CERTIFICATE_FILE: fresh[CERTIFICATE_FILE]})
    second = files.current()
    assert second.chain_pem == fresh[CERTIFICATE_FILE]
    assert files.current() is second
    assert "certificate of worker w0 was read again" in caplog.text
    (directory / CA_FILE).unlink()
    assert files.current() is second


def test_links_of_a_mounted_secret_are_followed(tmp_path: Path, authority: KeyPair) -> None:
    """Kubernetes swaps one link to a directory of all files."""
    for version in ("1", "2"):
        write_new(tmp_path / version, files_of(authority))
    (tmp_path / "data").symlink_to("1")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
        (mounted / name).symlink_to(tmp_path / "data" / name)
    files = TlsDirectory(mounted)
    before = files.current().leaf
    (tmp_path / "next").symlink_to("2")
    (tmp_path / "next").rename(tmp_path / "data")
    assert files.current().leaf != before
