"""Texts without secrets: known ones in every form, and what looks like one."""

from __future__ import annotations

import base64

import pytest

from stageline.support.redaction import REDACTED, Redactor, is_secret_variable, redact_environment
from tests.secrets_scan import forms_of
from web.api_keys import new_key

SECRET = "correct+horse/battery=staple"
PEM = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\nabc\n-----END PRIVATE KEY-----"


def test_known_secrets_are_removed_in_every_form() -> None:
    redactor = Redactor([SECRET])
    for prefix in ("", "a", "ab"):
        coded = base64.b64encode(f"{prefix}{SECRET} and more".encode()).decode()
        shown = redactor.redact(f"{SECRET} {SECRET.encode().hex()} {coded}").encode()
        assert not [form for form in forms_of(SECRET) if form in shown]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"key:\n{PEM}\nend", f"key:\n{REDACTED}\nend"),
        ("-----BEGIN EC PRIVATE KEY-----\nMIGH", REDACTED),
        ("Authorization: Bearer abcdefgh12345", f"Authorization: Bearer {REDACTED}"),
        ("https://me:pass@host/path", f"https://{REDACTED}@host/path"),
        ("OTLP x-api-key=0123456789abc,b=c", f"OTLP x-api-key={REDACTED},b=c"),
        ('{"password": "open-sesame"}', f'{{"password": "{REDACTED}"}}'),
        (f"sl-join.{'0' * 64}.{'1' * 12}.{'x' * 43}", f"sl-join.{'1' * 12}.{REDACTED}"),
    ],
)
def test_what_looks_like_a_secret_is_removed(text: str, shown: str) -> None:
    assert Redactor().redact(text) == shown


def test_an_api_key_keeps_its_id_alone() -> None:
    text, key = new_key(tenant="me")
    assert Redactor().redact(f"key {text} is refused") == f"key sk-sl-{key.id}-{REDACTED} is refused"


@pytest.mark.parametrize(
    "text",
    [
        "--token-file /etc/stageline/operator.token --tls-dir /etc/tls",
        "token_file: /etc/stageline/operator.token",
        '"completion_tokens": 12, "max_tokens": 4096000, "token": 17',
        "stageline_tokens_total 123456789",
        "error[TOKEN_MISMATCH]: the operator token is wrong",
        "request 01890a5d-ac96-774b-bcce-b302099a8057, epoch 12, worker gpu-a at 10.0.0.2:7480",
    ],
)
def test_what_helps_is_kept(text: str) -> None:
    assert Redactor([SECRET, "short"]).redact(text) == text


def test_variables_with_names_of_secrets_lose_their_values_but_paths() -> None:
    assert redact_environment({"HF_TOKEN": "x", "STAGELINE_TOKEN_FILE": "/a/b", "OTEL_SDK": "on"}) == {
        "HF_TOKEN": REDACTED,
        "STAGELINE_TOKEN_FILE": "/a/b",
        "OTEL_SDK": "on",
    }
    assert is_secret_variable("OTEL_EXPORTER_OTLP_HEADERS", "a=b")
