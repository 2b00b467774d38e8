"""Flags shared by commands, sizes and durations, and how commands fail."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer

from checkpoint.errors import GGUF_ADVICE
from stage_worker.backends.contract import KernelChoice
from telemetry import logs
from wire.addresses import parse_address, parse_peer_address
from wire.errors import error_line
from wire.user_files import read_secret, state_directory, token_paths

FAILURE = 1
INTERRUPTED = 130


USAGE = "USAGE"
"""Reason code of a wrong command line."""


class CommandFailed(Exception):
    """An expected failure; its text is the one line that the user reads, `reason` its code."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def report(message: str, *, reason: str) -> None:
    """Writes `stageline: error[REASON]: ...` to standard error."""
    print(error_line(reason, message), file=sys.stderr, flush=True)


_Command: TypeAlias = Callable[..., int]


def takes(*groups: type) -> Callable[[_Command], _Command]:
    """Gives a command the flags of some TypedDicts, in the place of its `**flags`.

    Each entry is a flag with its typer.Option in Annotated. One that is not on the line is None in `flags`.
    """
    hints = {
        name: hint for group in groups for name, hint in get_type_hints(group, include_extras=True).items()
    }

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def with_flags(**given: Any) -> int:
            return command(**given)

        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in hints.items()
        ]
        # Both are what typer reads.
        with_flags.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {each.name: each.annotation for each in (*own, *added)} | {"return": int}
        return with_flags

    return decorate


_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = _DECIMAL | _BINARY
MAX_BYTES = 2**50


def parse_size(text: str) -> int:
    """Bytes of a size such as 20GiB, 512MiB, 1.5GB or 4096B. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 20GiB, 512MiB or 8GB")
    if not match["unit"]:
        raise ValueError(
            f"{text!r} has no unit; write for example {match['number']}GiB or {match['number']}B"
        )
    unit = _UNITS.get(match["unit"].upper())
    if unit is None:
        raise ValueError(
            f"{text!r} has the unknown unit {match['unit']!r}; known are B, kB to TB, KiB to TiB"
        )
    number = float(match["number"])
    if number * unit > MAX_BYTES:
        raise ValueError(f"{text!r} is more than any machine has, the limit is {format_size(MAX_BYTES)}")
    size = round(number * unit)
    if size == 0:
        raise ValueError(f"{text!r} is nothing; a size is at least 1B")
    return size


def format_size(size_bytes: int) -> str:
    """A size in binary units with three digits or so: 980 B, 12.4 MiB, 20.0 GiB."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"


def format_duration(seconds: float) -> str:
    """12.3 s, 2.41 s, 812 ms, 8.10 ms, 85 us; from two minutes on 2 min 5 s."""
    if seconds >= 120:
        minutes, rest = divmod(int(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 0.9995:
        return f"{_digits(seconds)} s"
    if seconds >= 0.0009995:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{seconds * 1e6:.0f} us"


def format_rate(per_second: float) -> str:
    """12300, 98.4, 7.12, 0."""
    return "0" if per_second == 0 else _digits(per_second)


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


DEFAULT_ADDRESS = "127.0.0.1:7480"
DEFAULT_HTTP = "127.0.0.1:7481"
ANY_HTTP = "127.0.0.1:0"

_Config = TypeVar("_Config")
_Value = TypeVar("_Value")


def read_secret_file(path: Path, *, what: str) -> str:
    """The secret in `path`. Raises typer.BadParameter, which says that `what` cannot be used."""
    try:
        return read_secret(path)
    except OSError as error:
        raise typer.BadParameter(f"{what} cannot be used: {error}") from None


def read_token(path: Path | None) -> str | None:
    """The operator token in the file; None without one. Raises typer.BadParameter."""
    return None if path is None else read_secret_file(path, what="--token-file")


def default_token_directory() -> Path:
    """Where a coordinator that is started without --token-file leaves its token."""
    return state_directory(os.environ) / "tokens"


def operator_token(path: Path | None, coordinator: str) -> str:
    """The token in `path`, else the one that the coordinator at this address keeps on this host. Raises
    CommandFailed or typer.BadParameter.
    """
    if path is not None:
        return read_secret_file(path, what="--token-file")
    candidates = token_paths(default_token_directory(), coordinator)
    found = next((each for each in candidates if each.exists()), None)
    if found is not None:
        return read_secret_file(found, what=f"the operator token of {coordinator}")
    what = f"the operator token of {coordinator} is not on this host: pass --token-file FILE"
    raise CommandFailed(what, reason="NO_TOKEN")


def http_address(http: str | None, default: str, *, is_off: bool) -> str | None:
    """Where to serve the dashboard; None: nowhere. Raises ValueError for flags that contradict each other."""
    if not is_off:
        return http or default
    if http is not None:
        raise ValueError(
            f"--http {http} says where to serve the dashboard, --no-http not to: give one of them"
        )
    return None


def build_config(make: Callable[[], _Config]) -> _Config:
    """What `make` returns. Its ValueError is about what the user typed, so it becomes a usage error."""
    try:
        return make()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Layers of each stage, as in 10,12,10. Raises ValueError."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--layers {text!r} is not a list of numbers such as 10,12,10") from None


def _parser(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    # typer passes on the text of BadParameter, but puts words of its own before that of ValueError.
    def parse_option(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parse_option


def _model_directory(text: str) -> Path:
    """The directory of a checkpoint. Raises ValueError for what is none."""
    path = Path(text)
    if path.suffix.lower() == ".gguf":
        raise ValueError(f"{text!r} is a GGUF file: {GGUF_ADVICE}")
    if not path.exists():
        raise ValueError(f"directory {text!r} does not exist")
    if not path.is_dir():
        raise ValueError(f"{text!r} is a file: give the directory of a Hugging Face checkpoint")
    return path.resolve()


def _listen(text: str) -> str:
    return str(parse_address(text))


def _peer(text: str) -> str:
    return str(parse_peer_address(text))


Coordinator: TypeAlias = Annotated[
    str,
    typer.Option(
        parser=_parser(_peer),
        metavar="HOST:PORT",
        envvar="STAGELINE_COORDINATOR",
        help="Where the coordinator listens.",
    ),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Write one JSON object with everything, at the end.")
]
Model: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        parser=_parser(_model_directory),
        metavar="DIR",
        help="Hugging Face checkpoint with safetensors; the built-in model unless given.",
    ),
]
WorkerModel: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        parser=_parser(_model_directory),
        metavar="DIR",
        help="Where this host has the checkpoint; the coordinator's path unless given.",
    ),
]
Listen: TypeAlias = Annotated[
    str,
    typer.Option(
        parser=_parser(_listen), metavar="HOST:PORT", help="Where to listen; port 0 takes a free one."
    ),
]
WorkerListen: TypeAlias = Annotated[
    str | None,
    typer.Option(
        parser=_parser(_listen),
        metavar="ADDR:PORT",
        help="Where to listen; a free port on the way to the coordinator unless given.",
    ),
]
Advertise: TypeAlias = Annotated[
    str | None,
    typer.Option(
        parser=_parser(_peer),
        metavar="HOST:PORT",
        help="Where others reach this worker, if that is not where it listens.",
    ),
]
Layers: TypeAlias = Annotated[
    str | None, typer.Option(metavar="N,N,...", help="Layers of each stage; balanced unless given.")
]
Dtype: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="bf16|f16|f32", help="What to compute in; the checkpoint's own unless given."),
]
WireDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="bf16|fp8|int8",
        help="What hidden states travel in between stages, smaller and less exact; as computed unless given.",
    ),
]
BlockSize: TypeAlias = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a KV block.")]
MaxStepTokens: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=1, help="Most tokens of a step; longer prompts go in chunks.")
]
MaxStepSequences: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=1, help="Most sequences of a step.")
]
MaxModelLen: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Longest sequence to accept; the model's limit unless given."),
]
KvTokens: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Most KV tokens to hold; what fits in memory unless given."),
]
PrefixCache: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Share KV blocks of equal prefixes between requests (default: share).",
    ),
]
QueueSize: TypeAlias = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="Sequences that may wait, n of a request with n choices (default 256)."
    ),
]
MaxClientRequests: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Live sequences of one client (default: unlimited)."),
]
ClientKey: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="gRPC metadata key that tells clients apart; else their address does."),
]
MaxUnreadTokens: TypeAlias = Annotated[
    int, typer.Option(metavar="N", min=1, help="How far a reader may be behind before its request ends.")
]
PriorityAge: TypeAlias = Annotated[
    float, typer.Option(metavar="SECONDS", help="Waiting so long is worth one class of priority.")
]
Mock: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="TIMES",
        help="Compute nothing and only take time, as in step=20ms,token=0.05ms; context= is per token and "
        "1,000 tokens of context. poison_after=N, hang_after=N and oom_at=TOKENS make the device fail.",
    ),
]
MockModel: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="SHAPE", help="Serve a model without weights on mock stages, as in layers=64,hidden=1024."
    ),
]
StepsInFlight: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Steps in flight; measured times decide unless given."),
]
MaxDecodeSlowdown: TypeAlias = Annotated[
    float,
    typer.Option(metavar="X", help="How many times as long prefill may make decodes take, on average."),
]
Heartbeat: TypeAlias = Annotated[
    float, typer.Option(metavar="SECONDS", help="How often workers say that they live.")
]
Lease: TypeAlias = Annotated[
    float, typer.Option(metavar="SECONDS", help="A worker that is silent for so long is lost.")
]
RecoveryTimeout: TypeAlias = Annotated[
    float, typer.Option(metavar="SECONDS", help="How long requests wait while there is no pipeline.")
]
DrainTimeout: TypeAlias = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="How long to finish what runs before a worker or the coordinator ends."
    ),
]
SelfCheck: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--self-check/--no-self-check",
        help="Compare results with a reference before serving, and when idle (default: on; never for mocks).",
    ),
]
SelfCheckInterval: TypeAlias = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="Interval of self-checks while the cluster is idle; 0: none (default 600)."
    ),
]
Journal: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        resolve_path=True,
        metavar="PATH",
        help="File that requests survive the coordinator in; made if it is not there.",
    ),
]
ReattachTimeout: TypeAlias = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="How long requests of the journal wait for their clients."),
]
Http: TypeAlias = Annotated[
    str | None,
    typer.Option(
        parser=_parser(_listen),
        metavar="HOST:PORT",
        help="Where to serve the dashboard and /metrics; port 0 takes a free one. Unless given, a "
        f"coordinator serves them on {DEFAULT_HTTP}, and `up` on a free port.",
    ),
]
NoHttp: TypeAlias = Annotated[bool, typer.Option("--no-http", help="Serve neither dashboard nor metrics.")]
TokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        resolve_path=True,
        metavar="FILE",
        help="File of mode 0600 with the operator token, which drain and cancelling any request need "
        "(default: a fresh one, for commands on this host).",
    ),
]
OperatorTokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of mode 0600 with the coordinator's operator token (default: the one that a coordinator "
        "on this host has made for itself).",
    ),
]
TraceSample: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="Which part of requests to trace, 0 to 1; OTEL_TRACES_SAMPLER or all unless given.",
    ),
]
TraceStore: TypeAlias = Annotated[
    int, typer.Option(metavar="COUNT", min=1, help="Traces that the coordinator keeps; older ones go.")
]
TraceBytes: TypeAlias = Annotated[
    int | None,
    typer.Option(
        parser=_parser(parse_size), metavar="SIZE", help="Memory that they may take; 64MiB unless given."
    ),
]
LogFormat: TypeAlias = Annotated[
    logs.LogFormat,
    typer.Option(envvar="STAGELINE_LOG_FORMAT", help="Lines for people, or one JSON object per line."),
]
LogLevel: TypeAlias = Annotated[
    logs.LogLevel,
    typer.Option(envvar="STAGELINE_LOG_LEVEL", help="The least that is logged; requests are debug."),
]
Memory: TypeAlias = Annotated[
    int | None,
    typer.Option(
        parser=_parser(parse_size),
        metavar="SIZE",
        help="What a worker may use for weights, KV and activations together, e.g. 20GiB.",
    ),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Compute threads of a worker; by default one for each core."),
]
StepTimeout: TypeAlias = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="How long a step may go on computing after the coordinator has given it up; then the process "
        "exits with code 3.",
    ),
]
Kernels: TypeAlias = Annotated[
    KernelChoice,
    typer.Option(
        help="Functions that compute a stage: the fastest possible, torch's operators only, or the compiled "
        "kernels only (bf16 on CPUs with AVX-512).",
    ),
]
CpuSet: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="CPUs that the worker keeps to, e.g. 0-3,8; all by default."),
]
