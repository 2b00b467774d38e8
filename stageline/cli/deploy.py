"""`stageline deploy`: a cluster from a cluster file, on an engine."""

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

import typer

from deploy.commands import coordinator_command, read_cluster_spec
from deploy.engines import RENDERERS, RUNNERS
from deploy.engines.ray import PlacedProcess, RayCluster
from deploy.launcher import Launcher
from deploy.local import GRACE_S
from deploy.local_config import local_run
from deploy.spec.cluster_spec import ClusterSpec
from deploy.spec.document import WrongField, read_document
from stageline.cli.options import USAGE, CommandFailed, build_config, option_parser
from stageline.cli.status import show_once
from stageline.cli.up import check_plan, run_up
from stageline.client.client import Client
from wire.channels import raise_file_limit
from wire.exit_codes import ExitCode
from wire.user_files import state_directory

_Made = TypeVar("_Made")
_STOP_TIMEOUT_S = GRACE_S + 25.0

deploy = typer.Typer(
    help="Run a cluster from a file that describes it.", no_args_is_help=True, rich_markup_mode="rich"
)


LOCAL, RAY = "local", "ray"
_RUNNING_ENGINES = (LOCAL, RAY, *RUNNERS)


def _one_of(engines: Collection[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in engines and text in _RUNNING_ENGINES:
            raise ValueError(f"engine {text!r} has no files: use stageline deploy run {text}")
        if text not in engines:
            raise ValueError(f"engine {text!r} is unknown, must be one of {', '.join(engines)}")
        return text

    return option_parser(parse)


_ClusterFile: TypeAlias = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="Cluster file (docs/deploy/README.md).")
]

_RunningEngine: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="ENGINE",
        parser=_one_of(_RUNNING_ENGINES),
        help=f"What runs the cluster: {', '.join(_RUNNING_ENGINES)}.",
        show_default=False,
    ),
]


@deploy.command("render")
def render(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            parser=_one_of(RENDERERS),
            help=f"What runs the cluster: {', '.join(RENDERERS)}.",
            show_default=False,
        ),
    ],
    file: _ClusterFile,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Directory to write to; created if missing.")
    ],
) -> int:
    """Write the files with which an engine runs a cluster, and print their paths."""
    for rendered in build_config(lambda: _made(file, RENDERERS[engine])):
        path = out / rendered.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rendered.text, encoding="utf-8")
        print(path)
    return ExitCode.DONE


@deploy.command("run")
def run(engine: _RunningEngine, file: _ClusterFile) -> int:
    """Run the cluster: local until Ctrl-C or `stageline deploy stop`, as `stageline up` does; ray until the
    latter.
    """
    if engine in RUNNERS:
        return _print_lines(file, RUNNERS[engine].run)
    if engine == RAY:
        with _ray_cluster(file) as on_ray:
            states = on_ray.run()
        _print_states(states)
        print(f"cluster {on_ray.spec.name} started, its coordinator is {on_ray.spec.coordinator.address}")
        return ExitCode.DONE
    cluster = build_config(lambda: _made(file, local_run))
    check_plan(coordinator_command(cluster.spec).config(), cluster)
    raise_file_limit()
    with _launcher(cluster.spec).running():
        return asyncio.run(run_up(cluster))


@deploy.command("status")
def status(
    engine: _RunningEngine,
    file: _ClusterFile,
    as_json: Annotated[
        bool, typer.Option("--json", help=f"Print the status as JSON ({LOCAL}, {RAY}).")
    ] = False,
) -> int:
    """Show plan, workers, layers, memory, KV use and requests; with ray, first the nodes of the processes.

    With the other engines, what the engine knows of the cluster.
    """
    if engine in RUNNERS:
        if as_json:
            raise typer.BadParameter(f"--json is for {LOCAL} and {RAY}: see stageline status --json")
        return _print_lines(file, RUNNERS[engine].status)
    if engine == RAY:
        with _ray_cluster(file) as on_ray:
            states, spec = on_ray.states(), on_ray.spec
        if not as_json:
            _print_states(states)
        if spec.security.tls_directory is not None or spec.security.join_token_file is not None:
            return _needs_certificate(spec, as_json=as_json)
    else:
        spec = build_config(lambda: read_cluster_spec(file))
    asyncio.run(show_once(Client(spec.coordinator.address), as_json=as_json))
    return ExitCode.DONE


@deploy.command("stop")
def stop(engine: _RunningEngine, file: _ClusterFile) -> int:
    """Stop the cluster that `stageline deploy run` started, and wait until its processes have ended."""
    if engine in RUNNERS:
        return _print_lines(file, RUNNERS[engine].stop)
    if engine == RAY:
        with _ray_cluster(file) as on_ray:
            on_ray.stop()
            spec = on_ray.spec
    else:
        spec = build_config(lambda: read_cluster_spec(file))
        _launcher(spec).stop(timeout_s=_STOP_TIMEOUT_S)
    print(f"cluster {spec.name} stopped")
    return ExitCode.DONE


def _print_lines(file: Path, act: Callable[[ClusterSpec], list[str]]) -> int:
    for line in build_config(lambda: _made(file, act)):
        print(line)
    return ExitCode.DONE


def _needs_certificate(spec: ClusterSpec, *, as_json: bool) -> int:
    """The cluster file has no certificate of an operator, with which the coordinator tells more."""
    hint = f"stageline status --coordinator {spec.coordinator.address} --tls-dir DIR"
    if as_json:
        raise CommandFailed(f"an operator's certificate is needed: run {hint} --json", reason=USAGE)
    print(f"{hint} shows the plan, with an operator's certificate")
    return ExitCode.DONE


@contextmanager
def _ray_cluster(file: Path) -> Iterator[RayCluster]:
    """A cluster of a connected Ray. Events that Ray prints go to stderr."""
    with redirect_stdout(sys.stderr):
        cluster = build_config(lambda: _made(file, RayCluster))
        try:
            yield cluster
        finally:
            cluster.close()


def _print_states(states: list[PlacedProcess]) -> None:
    name_width = max(len(state.name) for state in states)
    node_width = max(len(state.node) for state in states)
    for state in states:
        print(f"{state.name:{name_width}}  {state.node:{node_width}}  {state.text}")


def _launcher(spec: ClusterSpec) -> Launcher:
    return Launcher(state_directory(os.environ) / "deploy" / f"{spec.name}.json")


def _made(file: Path, make: Callable[[ClusterSpec], _Made]) -> _Made:
    """What an engine makes of a cluster file. Raises SpecError."""
    spec = read_cluster_spec(file)
    try:
        return make(spec)
    except WrongField as error:
        raise read_document(file).error_at(error) from None
