"""`stageline token`: join tokens on the command line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from certificates.files import read_certificates
from certificates.join_tokens import parse_join_token
from stageline.cli import main
from wire.user_files import read_secret


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["certs", "ca"]) == 0
    return tmp_path


def test_a_token_is_made_listed_and_revoked(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["token", "create", "--role", "worker", "--ttl", "1h", "--uses", "4"]) == 0
    token = parse_join_token(capsys.readouterr().out)
    authority = read_certificates(Path("certs/ca/ca.crt"))[0].public_bytes(Encoding.DER)
    assert token.ca_sha256 == hashlib.sha256(authority).hexdigest()
    assert main(["token", "create", "--out", "join.token"]) == 0
    capsys.readouterr()
    assert parse_join_token(read_secret(Path("join.token"))).ca_sha256 == token.ca_sha256
    assert main(["token", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tokens"]
    assert [(row["uses"], row["uses_left"]) for row in rows] == [(4, 4), (1, 1)]
    assert not any(row["has_ended"] for row in rows)
    assert main(["token", "list"]) == 0
    shown = capsys.readouterr().out
    assert f"{token.token_id}  worker  4 of 4 uses left, until " in shown
    assert token.secret not in shown
    assert main(["token", "revoke", token.token_id]) == 0
    assert main(["token", "revoke", token.token_id]) == 1
    assert f"join token {token.token_id!r} not found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--uses", "0"), "0 uses are not in [1, 10000]"),
        (("--role", "operator"), "a join token cannot give the role operator, only worker"),
        (("--ttl", "soon"), "'soon' is not a time such as 90m, 24h or 30d"),
    ],
)
def test_a_wrong_token_is_a_usage_error(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "create", *arguments]) == 2
    assert problem in capsys.readouterr().err
