"""Writes the parts of a support bundle, each without secrets, and what could not be collected."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stageline.support.redaction import Redactor
from stageline.support.sources import Part

FOLDER = "stageline-support"
_MODE = 0o600


@contextmanager
def bundle_file(out: Path) -> Iterator[BinaryIO]:
    """A new file of mode 0600 that becomes `out` at the end. Raises OSError that names `out`."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        fresh.rename(out)
    finally:
        fresh.unlink(missing_ok=True)


def write_parts(file: BinaryIO, parts: Iterable[Part], redactor: Redactor) -> dict[str, str]:
    """Write an archive; return the problems of parts that are missing. Raises OSError."""
    missing: dict[str, str] = {}
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, make in parts:
            try:
                text = make()
            except Exception as error:  # a bundle is for when something is broken: take what there is
                missing[name] = redactor.redact(" ".join(str(error).split()) or type(error).__name__)
            else:
                _add(archive, name, redactor.redact(text))
        _add(archive, "missing.json", json.dumps(missing, indent=2))
    return missing


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(f"{FOLDER}/{name}")
    entry.size, entry.mode, entry.mtime = len(content), _MODE, int(time.time())
    archive.addfile(entry, io.BytesIO(content))
