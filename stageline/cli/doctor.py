"""`stageline doctor`: this host, or the hosts of a cluster file, before anything starts there."""

import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from certificates.files import UnusableTlsFiles
from certificates.identity import Role
from deploy.commands import read_cluster_spec
from deploy.doctor.agent import DoctorAgent
from deploy.doctor.facts import facts_of_one_host, host_facts, versions_here
from deploy.doctor.findings import problems_of_host, problems_of_survey
from deploy.doctor.places import ONE_HOST, Place, places_at, places_of
from deploy.doctor.survey import Measured, Survey, survey
from stageline.cli import options
from stageline.cli.tables import plain_table
from stageline.version import VERSION
from stageline_rpc.internal.v1 import doctor_pb2
from wire.channels import raise_file_limit
from wire.exit_codes import ExitCode
from wire.sizes import format_size
from wire.transport import PLAIN, Transport, client_transport

_Directories: TypeAlias = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[DIR]...",
        help="Further directories of this host to which processes will write, such as the journal's.",
        show_default=False,
    ),
]

_Serve: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Answer for the host or process NAME of the cluster file, until Ctrl-C."
    ),
]


def doctor(
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Cluster file (default: check this host alone)."),
    ] = None,
    directories: _Directories = None,
    serve: _Serve = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and problems as JSON.")] = False,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """Check hosts, and the network between them, before a cluster starts.

    With a cluster file, run `stageline doctor --serve NAME -f FILE` on every host, and then `stageline doctor
    -f FILE` on any; only the latter if the file has no hosts. Exits with 1 if there is a problem.
    """
    if file is None:
        if serve is not None:
            raise typer.BadParameter("--serve answers for a host of a cluster file: give -f FILE")
        return _check_this_host(directories or [], as_json=as_json)
    if directories:
        raise typer.BadParameter("directories are in the cluster file: give them without -f")
    places = options.build_config(lambda: places_of(read_cluster_spec(file)))
    if places[0].command.host is None:
        if serve is not None or tls_dir is not None:
            raise typer.BadParameter(f"--serve and --tls-dir are for a file with hosts: {file} has none")
        return _check_only_host(places, as_json=as_json)
    if serve is None:
        return _ask_cluster(places, tls_dir, as_json=as_json)
    if as_json:
        raise typer.BadParameter("--serve prints no facts: it cannot be used with --json")
    own = options.build_config(lambda: places_at(places, serve))
    for place in own:
        options.build_config(place.transport)
    raise_file_limit()
    return asyncio.run(run_agent(DoctorAgent(own[0].host, own, places, versions=versions_here(VERSION))))


def _ask_cluster(places: tuple[Place, ...], tls_dir: Path | None, *, as_json: bool) -> int:
    found = asyncio.run(survey(places, _transport(places[0].transport().tls_directory, tls_dir)))
    problems = problems_of_survey(found, places)
    if as_json:
        print(json.dumps(_survey_fields(found, problems), indent=2))
    else:
        _print_survey(found, problems)
    return ExitCode.FAILED if problems else ExitCode.DONE


def _transport(needed: Path | None, tls_dir: Path | None) -> Transport:
    """Raises typer.BadParameter."""
    if needed is None:
        return PLAIN
    if tls_dir is None:
        raise typer.BadParameter("the cluster has certificates: give --tls-dir with one of an operator")
    try:
        transport = client_transport(tls_dir)
    except UnusableTlsFiles as error:
        raise typer.BadParameter(str(error)) from None
    if (identity := transport.identity) is None or identity.role is not Role.OPERATOR:
        raise typer.BadParameter(f"--tls-dir is of {identity}, must be of an operator")
    return transport


async def run_agent(agent: DoctorAgent) -> int:
    """Serve until SIGINT or SIGTERM."""
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    try:
        addresses = await agent.start()
        print(f"stageline doctor listening on {', '.join(addresses)}; Ctrl-C ends it", flush=True)
        await stopping.wait()
    finally:
        await agent.stop()
    return ExitCode.DONE


def _check_this_host(directories: list[Path], *, as_json: bool) -> int:
    written = [directory.absolute() for directory in directories]
    facts = host_facts(ONE_HOST, versions=versions_here(VERSION), directories=written)
    return _print_host(facts, list(problems_of_host(facts)), as_json=as_json)


def _check_only_host(places: tuple[Place, ...], *, as_json: bool) -> int:
    """Check this host for all processes of a cluster."""
    commands = tuple(place.command for place in places)
    facts = facts_of_one_host(ONE_HOST, commands, versions=versions_here(VERSION))
    unusable = [f"{place.name}: {problem}" for place in places if (problem := place.certificate_problem())]
    return _print_host(facts, [*problems_of_host(facts, commands), *unusable], as_json=as_json)


def _print_host(facts: doctor_pb2.HostFacts, problems: list[str], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"host": _fields(facts), "problems": problems}, indent=2))
    else:
        console = Console()
        console.print(_host_table([facts]))
        _print_problems(console, problems)
    return ExitCode.FAILED if problems else ExitCode.DONE


def _fields(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def _survey_fields(found: Survey, problems: list[str]) -> dict[str, Any]:
    return {
        "hosts": {host: _fields(facts) for host, facts in found.facts.items()},
        "silent": found.silent,
        "ways": [
            {"from": way.path.caller.name, "to": way.path.callee.name, **_fields(way.result)}
            for way in found.measured
        ],
        "problems": problems,
    }


def _print_survey(found: Survey, problems: list[str]) -> None:
    console = Console()
    if found.facts:
        console.print(_host_table(list(found.facts.values())))
    if found.measured:
        console.print(_ways_table(found.measured))
    _print_problems(console, problems)


def _print_problems(console: Console, problems: list[str]) -> None:
    if not problems:
        console.print("no problem found")
    for problem in problems:
        console.print(f"* {problem}", markup=False, highlight=False, soft_wrap=True)


def _host_table(hosts: list[doctor_pb2.HostFacts]) -> Table:
    """A column per host."""
    table = plain_table("", *(facts.name for facts in hosts))
    for what, show in _ROWS.items():
        table.add_row(what, *(Text(show(facts) or "-") for facts in hosts))
    return table


_ROWS: Mapping[str, Callable[[doctor_pb2.HostFacts], str]] = {
    "system": lambda facts: facts.system,
    "stageline": lambda facts: f"{facts.versions['stageline']}, protocol {facts.versions['protocol']}",
    "python": lambda facts: facts.versions["python"],
    "torch": lambda facts: facts.versions["torch"],
    "devices": lambda facts: "\n".join(
        f"{device.name} {device.model}, {format_size(device.free_bytes)} free" for device in facts.devices
    ),
    "driver": lambda facts: facts.devices[0].driver if facts.devices else "",
    "CPUs": lambda facts: f"{facts.num_cpus}, {facts.kernels_problem or 'compiled kernels'}",
    "memory": lambda facts: (
        f"{format_size(facts.available_memory_bytes)} of {format_size(facts.memory_bytes)}"
    ),
    "disks": lambda facts: "\n".join(f"{disk.path} {format_size(disk.free_bytes)}" for disk in facts.disks),
    "open files": lambda facts: str(facts.max_open_files),
    "checkpoints": lambda facts: "\n".join(
        f"{model.process} {model.fingerprint[:16]}" for model in facts.models
    ),
}


def _ways_table(ways: tuple[Measured, ...]) -> Table:
    table = plain_table("from", "to", "median", "p99", "sent", "received", "clock")
    for way in ways:
        result, ends = way.result, (way.path.caller.name, way.path.callee.name)
        if result.problem:
            table.add_row(*ends, "-", "-", "-", "-", "-")
            continue
        clock = f"{result.clock_offset_us / 1e3:+.1f} ± {result.clock_uncertainty_us / 1e3:.1f} ms"
        trips = (f"{time_us / 1e3:.2f} ms" for time_us in (result.median_us, result.p99_us))
        table.add_row(*ends, *trips, _rate(result.upload_rate), _rate(result.download_rate), clock)
    return table


def _rate(rate: int) -> str:
    return f"{rate * 8 / 1e9:.2f} Gbit/s" if rate else ""
