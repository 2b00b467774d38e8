"""`stageline certs`: an authority, certificates of identities, their renewal and what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from certificates import CA_FILE, KEY_FILE
from certificates.files import read_tls_material
from stageline.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def certs(*arguments: str) -> int:
    return main(["certs", *arguments])


def issue(name: str, *more: str) -> int:
    return certs("issue", "--role", "worker", "--name", name, "--cluster", "c", "--out", name, *more)


def facts(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert certs("show", name, "--json") == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_certificate_is_issued_shown_and_renewed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certs("ca") == 0
    assert issue("w0", "--san", "gpu-a", "--san", "10.0.0.7", "--ttl", "24h") == 0
    uri = "spiffe://stageline.internal/stageline/c/worker/w0"
    assert uri in capsys.readouterr().out
    shown = facts("w0", capsys)
    assert (shown["identity"], shown["hosts"], shown["is_signed_by_ca"]) == (uri, ["gpu-a", "10.0.0.7"], True)
    assert certs("show", "w0") == 0
    assert "gpu-a, 10.0.0.7" in capsys.readouterr().out
    key = (folder / "w0" / KEY_FILE).read_bytes()
    assert certs("renew", "w0", "--ttl", "2d") == 0
    renewed = facts("w0", capsys)
    assert (renewed["identity"], renewed["hosts"]) == (uri, shown["hosts"])
    assert renewed["serial"] != shown["serial"]
    assert str(renewed["not_after"]) > str(shown["not_after"])
    assert (folder / "w0" / KEY_FILE).read_bytes() != key


def test_a_renewal_by_a_new_authority_trusts_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certs("ca") == certs("ca", "--out", "new") == issue("w0") == 0
    assert certs("renew", "w0", "--ca", "new") == 0
    shown = facts("w0", capsys)
    assert len(shown["authorities"]) == 2  # type: ignore[arg-type]
    assert shown["is_signed_by_ca"] is True
    old = (folder / "certs" / "ca" / CA_FILE).read_bytes()
    assert read_tls_material(folder / "w0").ca_pem.startswith(old)


def test_an_authority_comes_with_the_first_certificates(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certs("ca", "--issue", "coordinator/head", "--issue", "operator/me") == 0
    identities, hosts = [], []
    for name in ("head", "me"):
        shown = facts(f"certs/{name}", capsys)
        assert shown["is_signed_by_ca"] is True
        identities.append(str(shown["identity"]).split("/")[-2:])
        hosts.append(shown["hosts"])
        assert (folder / "certs" / name / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert identities == [["coordinator", "head"], ["operator", "me"]]
    assert hosts == [["head"], []], "users are not dialled"


@pytest.mark.parametrize(
    ("holders", "code", "text"),
    [
        (("head",), 2, "'head' is not ROLE/NAME"),
        (("root/me",), 2, "role 'root' is unknown"),
        (("client/a", "worker/a"), 2, "two certificates in new/a"),
        (("client/ca",), 2, "two certificates in new/ca"),
        (("client/a", "client/taken"), 1, "new/taken/tls.key exists"),
    ],
)
def test_an_authority_is_made_with_all_its_certificates_or_not_at_all(
    holders: tuple[str, ...], code: int, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "new" / "taken").mkdir(parents=True)
    (folder / "new" / "taken" / KEY_FILE).touch()
    assert (
        certs("ca", "--out", "new/ca", *(word for holder in holders for word in ("--issue", holder))) == code
    )
    captured = capsys.readouterr()
    assert (captured.out, text in captured.err) == ("", True)
    assert [path.name for path in (folder / "new").iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (
            ("issue", "--role", "root", "--name", "a", "--out", "a"),
            2,
            "role 'root' is unknown, must be one of",
        ),
        (("issue", "--role", "worker", "--name", "a b", "--out", "a"), 2, "name 'a b' cannot be part"),
        (("issue", "--role", "worker", "--name", "a", "--out", "a", "--san", "a b"), 2, "host 'a b' is"),
        (("issue", "--role", "worker", "--name", "a", "--out", "a", "--ttl", "91d"), 2, "at most 90 days"),
        (
            ("issue", "--role", "worker", "--name", "a", "--out", "a", "--ttl", "5"),
            2,
            "is not a time such as",
        ),
        (("issue", "--role", "worker", "--name", "a", "--out", "a", "--ca", "no"), 1, "no/ca.crt: no such"),
        (("issue", "--role", "worker", "--name", "a", "--out", "certs/ca"), 1, "ca.crt exists"),
        (("ca",), 1, "ca.key exists"),
        (("show", "nowhere"), 1, "nowhere/ca.crt: no such file"),
        (("renew", "nowhere"), 1, "nowhere/tls.crt: no such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: tuple[str, ...], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certs("ca") == 0
    capsys.readouterr()
    assert certs(*arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("stageline: error[")
    assert text in line
