"""No object of the product shows a secret where it is printed: in logs, errors and tracebacks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.engine.output_batch import Accepted, NumberedOpening
from gateway.api.responses.stored import ResponseId
from tests.repository import REPOSITORY
from tests.unit.test_packaging import PROJECT
from wire.ids import new_request_id
from wire.payloads import PayloadKey, PayloadOffer

NAME = re.compile(r"(^|_)(secret|token|password|ticket|key_pem|attach_digest)$")
NAMES_OF_SECRETS = {"SecretFiles.secret", "SecretKey.secret"}
"""Names of Secrets of Kubernetes, not their contents."""
TEXT = re.compile(r"\b(str|bytes)\b")


def shown_secrets(source: str) -> Iterator[str]:
    """Fields of data classes and named tuples with names of secrets, which `repr` shows."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and not _has_own_repr(node) and _is_record(node):
            fields = (item for item in node.body if isinstance(item, ast.AnnAssign) and _is_secret(item))
            yield from (f"{node.name}.{ast.unparse(item.target)}" for item in fields)


def _is_record(node: ast.ClassDef) -> bool:
    made_by = [ast.unparse(item) for item in (*node.decorator_list, *node.bases)]
    return any(name.startswith("dataclass") or name.endswith("NamedTuple") for name in made_by)


def _has_own_repr(node: ast.ClassDef) -> bool:
    return any(isinstance(item, ast.FunctionDef) and item.name == "__repr__" for item in node.body)


def _is_secret(item: ast.AnnAssign) -> bool:
    is_named_so = NAME.search(ast.unparse(item.target)) and TEXT.search(ast.unparse(item.annotation))
    is_hidden = item.value is not None and "repr=False" in ast.unparse(item.value)
    return bool(is_named_so) and not is_hidden


def test_no_record_shows_a_secret() -> None:
    roots = PROJECT["tool"]["importlinter"]["root_packages"]
    files = [file for root in roots for file in Path(REPOSITORY / root).rglob("*.py")]
    assert len(files) > 200
    shown = {found for file in files for found in shown_secrets(file.read_text())}
    assert shown - NAMES_OF_SECRETS == set()


@pytest.mark.parametrize(
    "source",
    [
        "@dataclass\nclass A:\n    secret: str",
        "@dataclass(frozen=True)\nclass A:\n    hop_secret: bytes = b''",
        "class A(NamedTuple):\n    token: str | None",
        "@dataclass\nclass A:\n    token: str = field(default='', compare=False)",
    ],
)
def test_a_shown_secret_is_found(source: str) -> None:
    assert list(shown_secrets(source))


def test_objects_with_secrets_hide_them() -> None:
    secret = "sesame-of-the-tests-0123456789abcdef"
    objects = (
        PayloadKey(3, secret.encode(), secret.encode()),
        ResponseId(new_request_id(), secret),
        NumberedOpening(batch=None, number=1, secret=secret),  # type: ignore[arg-type]
        Accepted(1, None, secret, b""),  # type: ignore[arg-type]
        PayloadOffer("host", 1, secret.encode()),
    )
    for item in objects:
        assert secret not in repr(item)
