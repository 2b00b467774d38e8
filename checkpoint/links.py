"""Links of a checkpoint directory to files in the store of its model, and to no other files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from checkpoint.errors import NotRegularFile

TEXT_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})
"""Of files that are read whole, and whose text clients get."""
_MAX_HOPS = 40
"""Linux's limit for the links of a path."""
_SNAPSHOTS, _BLOBS, _CACHED = "snapshots", "blobs", "models--"
"""Hugging Face's cache: snapshots/REVISION/FILE links to blobs/ETAG, both in models--OWNER--NAME."""
_HASH = re.compile(r"(sha256[-:])?[0-9a-f]{40,64}")
"""Name of a file in a store that is addressed by content: no settings or keys of a user have one."""


def check_link(path: Path) -> None:
    """Raise NotRegularFile for a link to a file that is not the checkpoint's: clients get its text.

    A link may lead into the directory, to a file of its own name, and into one store: `blobs` of the model in
    Hugging Face's cache, to which older clients link from any directory, or files that are named by their
    hash in a folder beside the model's.
    """
    if _is_own(path):
        return
    home, target = path.parent.resolve(), path.resolve()
    if (store := _store_of(path)) is None:
        raise NotRegularFile(
            f"{path} is a link to {target}, which is not a file of the checkpoint: copy the directory with"
            f" the files that it links to (cp -rL {home} COPY)"
        )
    entries = sorted(entry for entry in path.parent.iterdir() if entry.suffix in TEXT_SUFFIXES)
    for entry in entries:
        if not _is_own(entry) and (other := _store_of(entry)) != store:
            raise NotRegularFile(
                f"{path} is a link into {store}, {entry.name} into {other or entry.resolve().parent}: a"
                f" checkpoint has one store: copy the directory with the files that it links to"
                f" (cp -rL {home} COPY)"
            )


def _is_own(path: Path) -> bool:
    target = path.resolve()
    return target.name == path.name or target.is_relative_to(path.parent.resolve())


def _store_of(path: Path) -> Path | None:
    """The folder with the target of a link, if it is the store of a model; None for any other file."""
    target = path.resolve()
    homes = (path.parent.absolute(), path.parent.resolve())
    caches = [folder for home in homes for folder in home.parents if home.is_relative_to(folder / _SNAPSHOTS)]
    if caches:
        stores = [folder / _BLOBS for folder in caches]
    else:
        stores = [hop.parent for hop in _hops(path) if _is_cached(hop)]
        if _HASH.fullmatch(target.name) and homes[1].is_relative_to(target.parent.parent):
            stores.append(target.parent)
    return next((store.resolve() for store in stores if store.resolve() == target.parent), None)


def _is_cached(path: Path) -> bool:
    """Whether a path is of a file in Hugging Face's cache."""
    return path.parent.name == _BLOBS and path.parent.parent.name.startswith(_CACHED)


def _hops(path: Path) -> Iterator[Path]:
    """The paths that a link and its targets name; folders on the way may be links as well."""
    for _ in range(_MAX_HOPS):
        if not path.is_symlink():
            return
        path = Path(os.path.normpath(path.parent.absolute() / os.readlink(path)))
        yield path
