"""`stageline weights`: manifests of remote models, and the caches of workers."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from checkpoint import Checkpoint, CheckpointError, DType, stage_tensor_names
from checkpoint.headers import read_headers
from stageline.cli.options import CommandFailed, Json, build_config, option_parser, require_torch
from weights.cache import MODELS_FOLDER, ModelState, StoredModel, TensorCache, stored_keys, stored_models
from weights.cached_model import CachedModel, disk_bytes
from weights.fetching import NO_MANIFEST, TensorFetcher
from weights.location import RemoteModel, model_location, remote_model
from weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    index_directory,
    index_source,
    read_manifest,
    write_manifest,
)
from weights.pieces import DEFAULT_TRANSFER
from weights.progress import FetchProgress, progress_text
from weights.remote import RemoteCheckpoint, open_remote
from wire.errors import ServingError, reason_of
from wire.exit_codes import ExitCode
from wire.flags import checkpoint_directory, directory_path, existing_file, file_path
from wire.reference import MAX_TEXT_TOKENS, NUM_TEXTS, NUM_TOP, Reference, check_text
from wire.sizes import format_size, parse_size
from wire.user_files import user_cache_directory

weights = typer.Typer(
    help="Prove, fetch and inspect the weights of remote models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
SHOW_S = 1.0
"""Time between two lines of progress."""


def _cache_option(text: str) -> Any:
    return typer.Option("--cache-dir", metavar="DIR", parser=option_parser(directory_path), help=text)


def _manifest_option(text: str) -> Any:
    return typer.Option("--weights-manifest", metavar="FILE", parser=option_parser(existing_file), help=text)


_CacheDirectory: TypeAlias = Annotated[
    Any, _cache_option("Cache of one worker, as in `worker --cache-dir`; the worker must not run.")
]
_Address: TypeAlias = Annotated[
    Any,
    typer.Argument(
        metavar="URL",
        parser=option_parser(remote_model),
        help="hf://ORG/NAME[@REVISION], https://HOST/PATH, s3://BUCKET/PATH or gs://BUCKET/PATH; of a GGUF "
        "file, hf://ORG/NAME/FILE.gguf[@REVISION] or https://HOST/PATH/FILE.gguf.",
        show_default=False,
    ),
]


def _parse_dtypes(text: str) -> tuple[DType, ...]:
    """Raises ValueError."""
    return () if text == "none" else tuple(dict.fromkeys(map(DType.from_name, text.split(","))))


def _indexed_location(text: str) -> Path | RemoteModel:
    """The model of a manifest. Raises ValueError."""
    model = model_location(text)
    if not isinstance(model, RemoteModel) and not model.is_dir():
        raise ValueError(f"{model} is a file: a manifest is of a directory or a URL")
    return model


@weights.command()
def index(
    model: Annotated[
        Any,
        typer.Argument(
            metavar="URL|DIR",
            parser=option_parser(_indexed_location),
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
    reference: Annotated[
        Any,
        typer.Option(
            metavar="DTYPES",
            parser=option_parser(_parse_dtypes),
            help="Dtypes of the self-check's references, as in bf16,f32; `none` for no reference. Each reads "
            "all weights of DIR once (default: that of the model; none for a URL).",
        ),
    ] = None,
) -> int:
    """Write SHA-256 of every tensor and self-check references, for the source or `--weights-manifest`."""
    if isinstance(model, RemoteModel) and reference:
        raise typer.BadParameter("needs the weights in a directory", param_hint="--reference")
    path = output or _manifest_beside(model)
    if not os.access(path.parent, os.W_OK):
        raise NotADirectoryError(f"{path.parent} is not a directory that can be written")
    with _failures():
        manifest = _index_remote(model) if isinstance(model, RemoteModel) else _index_local(model, reference)
        write_manifest(path, manifest)
    print(f"wrote {path}: {len(manifest.sha256s)} tensors, SHA-256 {manifest.digest}")
    print(f"references of the self-check: {', '.join(manifest.references) or 'none'}")
    return ExitCode.DONE


def _manifest_beside(model: Path | RemoteModel) -> Path:
    if isinstance(model, RemoteModel):
        raise typer.BadParameter("is required for a remote model", param_hint="--output")
    return model / MANIFEST_FILE


def _index_remote(location: RemoteModel) -> Manifest:
    remote = open_remote(location, user_cache_directory(os.environ))
    total = sum(entry.num_bytes for entry in remote.headers.tensors.values())
    with closing(remote.source):
        return index_source(remote.source, remote.pins, remote.headers, _Meter(total).advance)


def _index_local(directory: Path, dtypes: Sequence[DType] | None) -> Manifest:
    headers = read_headers(directory)
    total = sum(entry.num_bytes for entry in headers.tensors.values())
    manifest = index_directory(directory, headers, _Meter(total).advance)
    checkpoint = Checkpoint.open(directory)
    if dtypes is None and not checkpoint.config.has_row:
        print(f"{checkpoint.config.model_type!r} has no native layers: the self-check has no reference")
        dtypes = ()
    wanted = [checkpoint.config.dtype] if dtypes is None else dtypes
    return replace(manifest, references={dtype.value: _reference(checkpoint, dtype) for dtype in wanted})


def _reference(checkpoint: Checkpoint, dtype: DType) -> Reference:
    require_torch("a reference of the self-check (`--reference none` writes the hashes alone)")
    from stage_worker.assignment import ReferenceRequest  # late: torch takes seconds
    from stage_worker.backends.backend import LoadProgress
    from stage_worker.backends.torch_backend import CPU
    from stage_worker.backends.torch_device import default_memory_bytes
    from stage_worker.loading.reference import compute_reference

    print(f"computing the reference of the self-check in {dtype.value}", file=sys.stderr, flush=True)
    config = checkpoint.config
    length = min(MAX_TEXT_TOKENS, config.max_position_embeddings)
    request = ReferenceRequest(
        directory=str(checkpoint.directory),
        fingerprint=checkpoint.fingerprint,
        dtype=dtype,
        texts=tuple(check_text(number, length, config.vocab_size) for number in range(NUM_TEXTS)),
        num_top=NUM_TOP,
        wire_dtype=dtype,
    )
    try:
        return compute_reference(
            request, checkpoint.directory, free_bytes=default_memory_bytes(CPU), progress=LoadProgress()
        )
    except ServingError as error:
        raise CommandFailed(
            f"no reference in {dtype.value}: {error}; `--reference none` writes the hashes alone",
            reason=reason_of(error),
        ) from error


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
    weights_manifest: Annotated[Any, _manifest_option("As in `coordinator --weights-manifest`.")] = None,
) -> int:
    """Fetch layers into the cache of a worker before it needs them."""
    with _failures(), closing(TensorCache(cache_dir, limit_bytes=cache_size)) as cache:
        remote = open_remote(model, user_cache_directory(os.environ), manifest=weights_manifest)
        names = _names(remote.checkpoint, layers)
        with closing(remote.source):
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
        rows = [_describe(stored, model) for stored, model in _models(cache_dir)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return ExitCode.DONE
    for row in rows:
        print(f"{row['key']}  {row['source'] or 'of an unknown source'}")
        print(f"  {format_size(row['disk_bytes'])}, {_summary(cache_dir, row)}")
        for unit in row["units"]:
            used = datetime.fromtimestamp(unit["last_use_s"], UTC)
            print(f"  {unit['name']}  {format_size(unit['num_bytes'])}  used {used:%Y-%m-%d %H:%M} UTC")
    if not rows:
        print(f"{cache_dir} has no models")
    return ExitCode.DONE


def _summary(cache_dir: Path, row: dict[str, Any]) -> str:
    if row["state"] == ModelState.USABLE.value:
        return f"{row['verified']} of {row['tensors']} tensors verified"
    return f"{row['state']}: {row['problem']}; {_remedy(cache_dir, row['key'])}"


def _remedy(cache_dir: Path, key: str) -> str:
    command = f"stageline weights rm --cache-dir {cache_dir} {key}"
    return f"fetched again when the model is used, or remove it with `{command}`"


def _describe(stored: StoredModel, model: CachedModel | None) -> dict[str, Any]:
    """One row of `ls`; without a usable model it has no tensors."""
    row = {
        "key": stored.key,
        "source": stored.source,
        "state": stored.state.value,
        "problem": stored.problem,
        "disk_bytes": disk_bytes(stored.folder),
    }
    if model is None:
        return row | {"tensors": 0, "verified": 0, "units": []}
    units = model.units()
    tensors = [tensor for names in units.values() for tensor in names]
    return row | {
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
def verify(
    directory: Annotated[
        Any,
        typer.Argument(
            metavar="DIR",
            parser=option_parser(checkpoint_directory),
            help="Checkpoint to compare with its manifest.",
            show_default=False,
        ),
    ] = None,
    cache_dir: Annotated[
        Any, _cache_option("Cache of one worker, which must not run; damaged tensors are dropped from it.")
    ] = None,
    weights_manifest: Annotated[
        Any, _manifest_option(f"Manifest of the checkpoint (default: {MANIFEST_FILE} in DIR).")
    ] = None,
) -> int:
    """Read all weights of a checkpoint or a cache and compare them. Exit code 1 if a tensor differs."""
    if (directory is None) == (cache_dir is None):
        raise typer.BadParameter("give a checkpoint, or --cache-dir", param_hint="DIR")
    if cache_dir is not None and weights_manifest is not None:
        raise typer.BadParameter("is for a checkpoint", param_hint="--weights-manifest")
    if cache_dir is not None:
        return _verify_cache(cache_dir)
    if not directory.is_dir():
        raise typer.BadParameter(f"{directory} is a file: a manifest is of a directory", param_hint="DIR")
    return _verify_directory(directory, weights_manifest or directory / MANIFEST_FILE)


def _verify_directory(directory: Path, path: Path) -> int:
    with _failures():
        expected, headers = read_manifest(path), read_headers(directory)
        expected.check(headers, str(path))
        total = sum(entry.num_bytes for entry in headers.tensors.values())
        found = index_directory(directory, headers, _Meter(total).advance)
    differing = [name for name in headers.tensors if found.sha256s[name] != expected.sha256s[name]]
    for name in differing:
        print(f"{directory / headers.tensors[name].file}: tensor {name} differs from the manifest")
    print(f"{len(found.sha256s) - len(differing)} of {len(found.sha256s)} tensors equal {path}")
    return ExitCode.FAILED if differing else ExitCode.DONE


def _verify_cache(cache_dir: Path) -> int:
    num_tensors = num_damaged = num_unchecked = 0
    has_damaged_files = False
    with _failures(), closing(_existing(cache_dir)):
        for stored, model in _models(cache_dir):
            if model is None:
                print(
                    f"{stored.key}: {stored.state.value}: {stored.problem}; {_remedy(cache_dir, stored.key)}"
                )
                has_damaged_files |= stored.state is ModelState.DAMAGED
                num_unchecked += 1
                continue
            tensors = [tensor for names in model.units().values() for tensor in names]
            damaged = model.damaged(tensors, lambda _: None)
            model.drop(damaged)
            for tensor in damaged:
                print(f"{stored.key}: tensor {tensor} is damaged: dropped, it will be fetched again")
            num_tensors, num_damaged = num_tensors + len(tensors), num_damaged + len(damaged)
    unchecked = f"; {num_unchecked} models were not checked" if num_unchecked else ""
    print(f"{num_tensors - num_damaged} of {num_tensors} tensors are as they were fetched{unchecked}")
    return ExitCode.FAILED if num_damaged or has_damaged_files else ExitCode.DONE


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


def _models(directory: Path) -> Iterator[tuple[StoredModel, CachedModel | None]]:
    """The models of a cache, opened if they can be."""
    for stored in stored_models(directory):
        if stored.state is not ModelState.USABLE:
            yield stored, None
            continue
        with closing(CachedModel(stored.folder, piece_bytes=DEFAULT_TRANSFER.piece_bytes)) as model:
            yield stored, model


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
