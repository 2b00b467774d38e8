"""`stageline weights`: manifests of remote models, and the caches of workers."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from checkpoint import Checkpoint, CheckpointError, stage_tensor_names
from checkpoint.headers import read_headers
from stageline.cli.options import CommandFailed, Json, build_config, option_parser
from weights.cache import MODELS_FOLDER, PINS_FILE, TensorCache, read_pins, stored_keys
from weights.cached_model import CachedModel, disk_bytes
from weights.fetching import NO_MANIFEST, TensorFetcher
from weights.location import RemoteModel, model_location, remote_model
from weights.manifest import MANIFEST_FILE, Manifest, index_directory, index_source, write_manifest
from weights.pieces import DEFAULT_TRANSFER
from weights.progress import FetchProgress, progress_text
from weights.remote import RemoteCheckpoint, open_remote
from wire.errors import reason_of
from wire.exit_codes import ExitCode
from wire.flags import directory_path, existing_file, file_path
from wire.sizes import format_size, parse_size
from wire.user_files import user_cache_directory

weights = typer.Typer(
    help="Prove, fetch and inspect the weights of remote models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
SHOW_S = 1.0
"""Time between two lines of progress."""
_CacheDirectory: TypeAlias = Annotated[
    Any,
    typer.Option(
        "--cache-dir",
        metavar="DIR",
        parser=option_parser(directory_path),
        help="Cache of one worker, as in `worker --cache-dir`; the worker must not run.",
    ),
]
_Address: TypeAlias = Annotated[
    Any,
    typer.Argument(
        metavar="URL",
        parser=option_parser(remote_model),
        help="hf://ORG/NAME[@REVISION], https://HOST/PATH, s3://BUCKET/PATH or gs://BUCKET/PATH.",
        show_default=False,
    ),
]


@weights.command()
def index(
    model: Annotated[
        Any,
        typer.Argument(
            metavar="URL|DIR",
            parser=option_parser(model_location),
            help="A remote model, all of which is read, or a directory.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Any,
        typer.Option(
            metavar="FILE",
            parser=option_parser(file_path),
            help=f"Where to write it (default: {MANIFEST_FILE} in DIR; a URL needs this flag).",
        ),
    ] = None,
) -> int:
    """Write the SHA-256 of every tensor, for the source or `coordinator --weights-manifest`."""
    if isinstance(model, RemoteModel) and output is None:
        raise typer.BadParameter("is required for a remote model", param_hint="--output")
    with _failures():
        manifest = _index_remote(model) if isinstance(model, RemoteModel) else _index_local(model)
        path = output or model / MANIFEST_FILE
        write_manifest(path, manifest)
    print(f"wrote {path}: {len(manifest.sha256s)} tensors, SHA-256 {manifest.digest}")
    return ExitCode.DONE


def _index_remote(location: RemoteModel) -> Manifest:
    remote = open_remote(location, user_cache_directory(os.environ))
    total = sum(entry.num_bytes for entry in remote.headers.tensors.values())
    with closing(remote.source):
        return index_source(remote.source, remote.pins, remote.headers, _Meter(total).advance)


def _index_local(directory: Path) -> Manifest:
    headers = read_headers(directory)
    total = sum(entry.num_bytes for entry in headers.tensors.values())
    return index_directory(directory, headers, _Meter(total).advance)


@weights.command()
def pull(
    model: _Address,
    cache_dir: _CacheDirectory,
    layers: Annotated[
        Any,
        typer.Option(
            metavar="FIRST-LAST",
            help="Layers to fetch, as in 0-11; the first and the last one bring embeddings and output head "
            "(default: all).",
        ),
    ] = None,
    cache_size: Annotated[
        Any,
        typer.Option(metavar="SIZE", parser=option_parser(parse_size), help="As in `worker --cache-size`."),
    ] = None,
    weights_manifest: Annotated[
        Any,
        typer.Option(
            metavar="FILE",
            parser=option_parser(existing_file),
            help="As in `coordinator --weights-manifest`.",
        ),
    ] = None,
) -> int:
    """Fetch layers into the cache of a worker before it needs them."""
    with _failures(), closing(TensorCache(cache_dir, limit_bytes=cache_size)) as cache:
        remote = open_remote(model, user_cache_directory(os.environ), manifest=weights_manifest)
        names = _names(remote.checkpoint, layers)
        fetched = _fetch(cache, remote, names)
    print(f"{len(names)} tensors of {remote.pins.source} are in {cache_dir}: fetched_bytes={fetched}")
    return ExitCode.DONE


def _names(checkpoint: Checkpoint, layers: str | None) -> list[str]:
    num_layers = checkpoint.config.num_layers
    first, last = (0, num_layers - 1) if layers is None else build_config(lambda: _parse_layers(layers))
    if last >= num_layers:
        raise typer.BadParameter(f"{layers} is not within 0-{num_layers - 1}", param_hint="--layers")
    return stage_tensor_names(
        checkpoint.config,
        first,
        last + 1,
        has_embeddings=first == 0,
        has_head=last + 1 == num_layers,
    )


def _parse_layers(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
        raise ValueError(f"--layers {text!r} is not a range such as 0-11")
    return int(first), int(last or first)


def _fetch(cache: TensorCache, remote: RemoteCheckpoint, names: list[str]) -> int:
    progress, meter = FetchProgress(), _Meter(0)
    fetcher = TensorFetcher(
        cache,
        remote.source,
        remote.pins,
        sha256s=NO_MANIFEST if remote.manifest is None else remote.manifest.sha256s,
        progress=progress,
        check=lambda: meter.show(lambda: progress_text(progress.snapshot())),
    )
    fetcher.fetch(cache.model(remote.source, remote.pins), names)
    return fetcher.received_bytes


@weights.command("ls")
def list_(cache_dir: _CacheDirectory, as_json: Json = False) -> int:
    """List the models in a cache: layers, sizes on the disk, and last use."""
    with _failures(), closing(_existing(cache_dir)):
        rows = [_describe(key, folder, model) for key, folder, model in _models(cache_dir)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return ExitCode.DONE
    for row in rows:
        print(f"{row['key']}  {row['source']}")
        print(f"  {format_size(row['disk_bytes'])}, {row['verified']} of {row['tensors']} tensors verified")
        for unit in row["units"]:
            used = datetime.fromtimestamp(unit["last_use_s"], UTC)
            print(f"  {unit['name']}  {format_size(unit['num_bytes'])}  used {used:%Y-%m-%d %H:%M} UTC")
    if not rows:
        print(f"{cache_dir} has no models")
    return ExitCode.DONE


def _describe(key: str, folder: Path, model: CachedModel) -> dict[str, Any]:
    units = model.units()
    tensors = [tensor for names in units.values() for tensor in names]
    return {
        "key": key,
        "source": read_pins(folder / PINS_FILE).source,
        "disk_bytes": disk_bytes(folder),
        "tensors": len(tensors),
        "verified": sum(map(model.is_verified, tensors)),
        "units": [
            {
                "name": unit,
                "num_bytes": sum(map(model.num_bytes, names)),
                "last_use_s": model.last_use_s(unit),
            }
            for unit, names in units.items()
        ],
    }


@weights.command()
def verify(cache_dir: _CacheDirectory) -> int:
    """Read all weights in a cache; drop the tensors that differ from what was fetched. Exit code 1 if any."""
    num_tensors = num_damaged = 0
    with _failures(), closing(_existing(cache_dir)):
        for key, _, model in _models(cache_dir):
            tensors = [tensor for names in model.units().values() for tensor in names]
            damaged = model.damaged(tensors, lambda _: None)
            model.drop(damaged)
            for tensor in damaged:
                print(f"{key}: tensor {tensor} is damaged: dropped, it will be fetched again")
            num_tensors, num_damaged = num_tensors + len(tensors), num_damaged + len(damaged)
    print(f"{num_tensors - num_damaged} of {num_tensors} tensors are as they were fetched")
    return ExitCode.FAILED if num_damaged else ExitCode.DONE


@weights.command()
def rm(
    cache_dir: _CacheDirectory,
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="Model, as in `weights ls` (default: all).", show_default=False),
    ] = None,
) -> int:
    """Remove a model, or all of them, from a cache."""
    with _failures(), closing(_existing(cache_dir)):
        keys = stored_keys(cache_dir)
        if key is not None and key not in keys:
            raise typer.BadParameter(f"{key!r} is not in {cache_dir}", param_hint="KEY")
        for removed in keys if key is None else [key]:
            folder = cache_dir / MODELS_FOLDER / removed
            size = disk_bytes(folder)
            shutil.rmtree(folder)
            print(f"removed {removed}: {format_size(size)}")
    return ExitCode.DONE


def _existing(directory: Path) -> TensorCache:
    """Lock a cache that exists."""
    if not (directory / MODELS_FOLDER).is_dir():
        raise CommandFailed(f"{directory} is not a cache of weights", reason="NO_CACHE")
    return TensorCache(directory)


def _models(directory: Path) -> Iterator[tuple[str, Path, CachedModel]]:
    for key in stored_keys(directory):
        folder = directory / MODELS_FOLDER / key
        with closing(CachedModel(folder, piece_bytes=DEFAULT_TRANSFER.piece_bytes)) as model:
            yield key, folder, model


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise CommandFailed(str(error), reason=reason_of(error)) from error


class _Meter:
    """Lines of progress on standard error, at most one a second."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes, self._done_bytes = total_bytes, 0
        self._shown_s = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self.show(lambda: f"{format_size(self._done_bytes)} of {format_size(self._total_bytes)}")

    def show(self, text: Callable[[], str]) -> None:
        """Show a line if it is time."""
        if (now_s := time.monotonic()) - self._shown_s >= SHOW_S:
            self._shown_s = now_s
            print(text(), file=sys.stderr, flush=True)
