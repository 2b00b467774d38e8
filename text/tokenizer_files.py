"""The files of a checkpoint's tokenizer: which they are, and what identifies them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from checkpoint.errors import FileTooLarge
from checkpoint.files import CONFIG_FILE, TOKENIZER_FILES, open_regular
from checkpoint.generation_config import GENERATION_CONFIG_FILE
from checkpoint.gguf.files import is_gguf
from checkpoint.gguf.model import gguf_tokenizer_files
from checkpoint.links import check_link

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "tiktoken.model",
    "spiece.model",
)
_NAMES = frozenset({*TOKENIZER_FILES, GENERATION_CONFIG_FILE, CONFIG_FILE})
_TEMPLATES = "additional_chat_templates"
MAX_BYTES = 256 * 1024 * 1024
"""Of all files together."""


def is_tokenizer_file(name: str) -> bool:
    """Whether `name` is the path of such a file; no other path is written."""
    path = PurePosixPath(name)
    is_template = path.parts[:-1] == (_TEMPLATES,) and path.suffix == ".jinja"
    return name == str(path) and (name in _NAMES or is_template)


def read_tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Read the files by name, or make them of a GGUF file.

    Raises CheckpointError, also for a FIFO, device or link to another's file.
    """
    if is_gguf(directory):
        return gguf_tokenizer_files(directory)
    paths = [directory / name for name in sorted(_NAMES)]
    paths += sorted((directory / _TEMPLATES).glob("*.jinja"))
    files: dict[str, bytes] = {}
    free_bytes = MAX_BYTES
    for path in paths:
        if path.exists():
            check_link(path)
            with open_regular(path) as file:
                content = file.read(free_bytes + 1)
            free_bytes -= len(content)
            if free_bytes < 0:
                raise FileTooLarge(f"tokenizer files of {directory} exceed {MAX_BYTES} bytes in all")
            files[path.relative_to(directory).as_posix()] = content
    return files


def files_digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 of all names, sizes and contents, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def has_vocabulary(directory: Path) -> bool:
    """Whether a tokenizer can be loaded from these files."""
    return any((directory / name).exists() for name in VOCABULARIES)
