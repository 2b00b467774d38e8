"""Why a checkpoint directory is not served: every reason that can be found, not only the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from checkpoint.config import config_errors
from checkpoint.description import parse_named, read_config, refuse_gguf
from checkpoint.directory import Checkpoint, describe
from checkpoint.errors import CheckpointError, CheckpointNotFound, UnsupportedFormat
from checkpoint.files import has_params, is_named
from checkpoint.generation_config import read_generation_config
from checkpoint.gguf.files import is_gguf
from checkpoint.headers import Headers, read_headers
from checkpoint.other_families import has_row, refuse_other
from checkpoint.verification import tensor_errors

ADAPTER_FILE = "adapter_config.json"
"""Marks a LoRA adapter of peft."""
_Value = TypeVar("_Value")


@dataclass(slots=True, kw_only=True)
class Inspection:
    """Errors of a directory in the order of their discovery; without any, `checkpoint` is open.

    With `is_other_format` the advice is to use other files, so that nothing else about the directory matters.
    """

    errors: list[CheckpointError] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    is_other_format: bool = False

    def attempt(self, read: Callable[[], _Value]) -> _Value | None:
        """Return the result of `read`, or None and note its error."""
        try:
            return read()
        except CheckpointError as error:
            self.add(error)
        except (OSError, ValueError, RecursionError) as error:
            self.add(CheckpointNotFound(f"cannot be read: {error}"))
        return None

    def add(self, error: CheckpointError) -> None:
        """Note an error, once."""
        if str(error) not in map(str, self.errors):
            self.errors.append(error)


def inspect(directory: Path) -> Inspection:
    """Check config, headers, tensors and special tokens of `directory`, or of a GGUF file.

    Raises nothing that a file causes.
    """
    found = Inspection()
    if is_gguf(directory) or has_params(directory):
        return _inspect_described(found, directory)
    if not found.attempt(lambda: _is_directory(directory)):
        return found
    found.attempt(lambda: refuse_gguf(directory))
    found.attempt(lambda: _refuse_adapter(directory))
    if found.errors:
        found.is_other_format = True
        return found
    raw = found.attempt(lambda: read_config(directory))
    if raw is not None:
        for error in found.attempt(lambda: _config_errors(raw)) or ():
            found.add(error)
    headers = found.attempt(lambda: read_headers(directory))
    if raw is not None and headers is not None and not found.errors:
        _check_tensors(found, raw, headers)
    found.attempt(lambda: read_generation_config(directory))
    if not found.errors:
        found.checkpoint = found.attempt(lambda: Checkpoint.open(directory))
    return found


def _inspect_described(found: Inspection, path: Path) -> Inspection:
    """Of the config, only the first error is found."""
    described = found.attempt(lambda: describe(path))
    if described is not None:
        config, tensors = described.config, described.headers.tensors
        for error in found.attempt(lambda: list(tensor_errors(config, tensors))) or ():
            found.add(error)
    if not found.errors:
        found.checkpoint = found.attempt(lambda: Checkpoint.open(path))
    return found


def _config_errors(raw: dict[str, object]) -> tuple[CheckpointError, ...]:
    if has_row(raw):
        return config_errors(raw)
    refuse_other(raw)
    return ()


def _check_tensors(found: Inspection, raw: dict[str, object], headers: Headers) -> None:
    config = found.attempt(lambda: parse_named(raw, headers.tensors))
    if config is not None and config.has_row:
        for error in found.attempt(lambda: list(tensor_errors(config, headers.tensors))) or ():
            found.add(error)


def _is_directory(path: Path) -> bool:
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is not a directory")
    return True


def _refuse_adapter(path: Path) -> None:
    if is_named(path / ADAPTER_FILE):
        raise UnsupportedFormat(
            f"{path} has {ADAPTER_FILE}: LoRA adapters are not served: merge it into its base model"
        )
