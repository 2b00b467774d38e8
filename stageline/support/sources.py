"""Where the parts of a support bundle come from: this host, and a coordinator. Nothing waits for long."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from google.protobuf.json_format import MessageToDict

from certificates import KEY_FILE
from deploy.commands import commands
from deploy.doctor.facts import host_facts, versions_here
from deploy.doctor.findings import problems_of_host
from deploy.doctor.places import ONE_HOST
from deploy.spec.cluster_spec import ClusterSpec
from stageline.client.client import Client
from stageline.client.errors import StagelineError
from stageline.support.redaction import is_secret_variable, redact_environment
from stageline.version import VERSION
from wire.status_codec import message_fields

MAX_LOG_BYTES = 16 * 2**20
"""The end of each log."""
MAX_METRICS_BYTES = 8 * 2**20
NUM_TRACES = 50
NUM_JOURNAL_LINES = 50_000
CALL_TIMEOUT_S = 10.0
_SECRETS = ("tokens", "secrets")
_MAX_SECRET_BYTES = 65_536

Part = tuple[str, Callable[[], str]]
"""A file's name, and what makes its text; an exception is its problem."""


def host_parts() -> Iterator[Part]:
    """Facts, versions and processes of this host."""
    yield "host.json", _facts
    yield "packages.txt", _packages
    yield "processes.json", lambda: json.dumps(_processes(), indent=2)


def _facts() -> str:
    facts = host_facts(ONE_HOST, versions=versions_here(VERSION))
    fields = MessageToDict(facts, preserving_proto_field_name=True)
    return json.dumps({"facts": fields, "problems": list(problems_of_host(facts))}, indent=2)


def _packages() -> str:
    found = {(package.metadata["Name"], package.version) for package in metadata.distributions()}
    return "".join(f"{name}=={version}\n" for name, version in sorted(found))


def _processes() -> list[dict[str, Any]]:
    """The effective settings of Stageline's processes of this user: command lines and variables."""
    found = []
    for process in psutil.process_iter():
        try:
            words, environment = process.cmdline(), process.environ()
            is_ours = any(word.endswith("stageline") for word in words[:5])
            if is_ours and {"coordinator", "worker", "gateway", "up"} & set(words[:6]):
                own = {name: value for name, value in environment.items() if _is_setting(name)}
                found.append({"pid": process.pid, "command": words, "environment": redact_environment(own)})
        except psutil.Error:
            continue  # it has ended, or is of another user
    return found


def _is_setting(name: str) -> bool:
    return name.startswith(("STAGELINE_", "OTEL_", "GRPC_", "CUDA_", "TORCH", "OMP_", "XDG_"))


def cluster_file_parts(file: Path, spec: ClusterSpec) -> Iterator[Part]:
    """The cluster file, and the effective command line of each process."""
    yield "cluster.yaml", lambda: file.read_text(encoding="utf-8")
    yield "commands.json", lambda: json.dumps(_commands(spec), indent=2)


def _commands(spec: ClusterSpec) -> list[dict[str, Any]]:
    return [
        {
            "name": command.name,
            "host": command.host,
            "command": ["stageline", *command.argv],
            "environment": redact_environment(command.environment),
        }
        for command in commands(spec)
    ]


def log_parts(logs: Iterable[Path], units: Iterable[str]) -> Iterator[Part]:
    """The ends of log files, and of the journals of units."""
    for index, path in enumerate(logs):
        yield f"logs/{index}-{path.name}", lambda path=path: _tail(path)  # type: ignore[misc]
    if (program := shutil.which("journalctl")) is not None:
        for unit in units:
            yield f"logs/{unit}.log", lambda unit=unit: _journal(program, unit)  # type: ignore[misc]


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - MAX_LOG_BYTES))
        return file.read(MAX_LOG_BYTES).decode(errors="replace")


def _journal(program: str, unit: str) -> str:
    command = (program, "--no-pager", "-o", "short-iso", "-n", str(NUM_JOURNAL_LINES), "-u", unit)
    finished = subprocess.run(
        command,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=CALL_TIMEOUT_S,
        check=False,
        text=True,
        errors="replace",
    )
    if finished.returncode != 0:
        raise OSError(" ".join(finished.stderr.split())[:500] or f"exit code {finished.returncode}")
    return finished.stdout[-MAX_LOG_BYTES:]


async def coordinator_parts(address: str, tls_dir: Path | None) -> list[Part]:
    """Status, activity and recent traces, asked now."""
    questions = {"status.json": _status, "activity.json": _activity, "traces.json": _traces}
    return [
        (name, await _asked(question, Client(address, tls_dir=tls_dir)))
        for name, question in questions.items()
    ]


async def _asked(question: Callable[[Client], Awaitable[Any]], client: Client) -> Callable[[], str]:
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S), client:
            answer = await question(client)
    except TimeoutError:
        problem: Exception = TimeoutError(f"no answer within {CALL_TIMEOUT_S:g} s")
    except (StagelineError, OSError) as error:
        problem = error
    else:
        return lambda: json.dumps(answer, indent=2)

    def fail() -> str:
        raise problem

    return fail


async def _status(client: Client) -> Mapping[str, Any]:
    return message_fields(await client.status())


async def _activity(client: Client) -> Mapping[str, Any]:
    return message_fields(await client.activity())


async def _traces(client: Client) -> list[Any]:
    listed = await client.traces(NUM_TRACES)
    return [MessageToDict(await client.trace(entry.trace_id)) for entry in listed.traces]


def metrics_parts(urls: Iterable[str], authority: Path | None) -> Iterator[Part]:
    """Prometheus texts."""
    for index, url in enumerate(urls):
        yield f"metrics/{index}.txt", lambda url=url: f"# {url}\n{_fetch(url, authority)}"  # type: ignore[misc]


def _fetch(url: str, authority: Path | None) -> str:
    context = ssl.create_default_context(cafile=authority) if url.startswith("https:") else None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    with opener.open(url, timeout=CALL_TIMEOUT_S) as response:
        content: bytes = response.read(MAX_METRICS_BYTES)
    return content.decode(errors="replace")


def known_secrets(state: Path | None, spec: ClusterSpec | None, tls_dir: Path | None) -> Iterator[str]:
    """Secrets in files of this host that this user may read, to remove them wherever they are.

    `state` is the user's state directory; None without a home.
    """
    paths: list[Path] = []
    keys: list[Path] = []
    if state is not None:
        paths += [path for folder in _SECRETS for path in (state / folder).glob("**/*")]
        keys.append(state / "certificates")
    if tls_dir is not None:
        keys.append(tls_dir)
    if spec is not None:
        security = spec.security
        paths += [path for path in (security.token_file, security.join_token_file) if path is not None]
        keys += [path for path in (security.tls_directory, security.authority) if path is not None]
        yield from (value for name, value in spec.environment.items() if is_secret_variable(name, value))
    paths += [path for folder in keys for name in (KEY_FILE, "ca.key") for path in folder.glob(f"**/{name}")]
    for path in paths:
        try:
            text = path.read_bytes()[:_MAX_SECRET_BYTES].decode(errors="replace")
        except OSError:
            continue  # this user cannot read it, so no part of the bundle can have it from there
        yield text.strip()
        yield from (line.strip() for line in text.splitlines() if not line.startswith("-----"))
