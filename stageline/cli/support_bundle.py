"""`stageline support-bundle`: one file for a report of a problem."""

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from certificates import CA_FILE
from deploy.commands import commands, coordinator_command, gateway_command, read_cluster_spec
from deploy.spec.cluster_spec import ClusterSpec
from stageline.cli import options
from stageline.support import sources
from stageline.support.bundle import bundle_file, write_parts
from stageline.support.redaction import Redactor
from wire.addresses import DEFAULT_ADDRESS, Address, local_address, parse_address
from wire.exit_codes import ExitCode
from wire.foreign_text import printable_line
from wire.user_files import find_state_directory

_Metrics: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Metrics of a process, such as http://127.0.0.1:7481/metrics; can be given several times "
        "(default: those of the cluster file).",
    ),
]


def support_bundle(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE.tar.gz", help="File to write, with mode 0600."),
    ],
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Cluster file (default: only a coordinator)."),
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Log file of a process; can be given several times."),
    ] = None,
    metrics: _Metrics = None,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """Collect logs, status, settings, metrics, traces and facts of this host, without secrets.

    What cannot be collected is named, and the rest is written. Run it on each host whose logs matter.
    """
    spec = None if file is None else options.build_config(lambda: read_cluster_spec(file))
    address = coordinator if spec is None else spec.coordinator.address
    with bundle_file(out) as output:
        parts = [
            *sources.host_parts(),
            *([] if file is None or spec is None else sources.cluster_file_parts(file, spec)),
            *asyncio.run(sources.coordinator_parts(address, tls_dir)),
            *sources.metrics_parts(
                metrics or _metrics_urls(spec), None if tls_dir is None else tls_dir / CA_FILE
            ),
            *sources.log_parts(log or [], _units(spec)),
        ]
        redactor = Redactor(sources.known_secrets(find_state_directory(os.environ), spec, tls_dir))
        missing = write_parts(output, parts, redactor)
    _report(out, len(parts), missing)
    return ExitCode.DONE


def _report(out: Path, num_parts: int, missing: Mapping[str, str]) -> None:
    for name, problem in missing.items():
        print(f"without {name}: {printable_line(problem)}")
    collected = f"{num_parts - len(missing)} of {num_parts} parts"
    print(f"{out} has {collected}, without known secrets: look before you send it")


def _units(spec: ClusterSpec | None) -> Iterator[str]:
    """Units of systemd, as `stageline deploy render systemd` names them."""
    if spec is not None:
        yield from (f"{spec.name}-{command.name}" for command in commands(spec))


def _metrics_urls(spec: ClusterSpec | None) -> Iterator[str]:
    if spec is None:
        return
    scheme = "http" if spec.security.tls_directory is None else "https"
    pages = [(coordinator_command(spec), "--http")]
    pages += [(gateway_command(spec, gateway), "--listen") for gateway in spec.gateways]
    for command, flag in pages:
        if (listen := command.values().get(flag)) is None:
            continue
        address = parse_address(listen)
        reached = local_address(address) if command.host is None else Address(command.host, address.port)
        yield f"{scheme}://{reached}/metrics"
