"""A job script of Slurm: coordinator and gateways on its first node, a job step for each worker."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from certificates.identity import Role
from deploy.commands import ProcessCommand, check, commands, drain_timeout_s
from deploy.engines.rendered import RenderedFile, flag_lines
from deploy.spec.cluster_spec import ClusterSpec
from deploy.spec.document import WrongField

_HEAD_HOST = "head.invalid"
"""Stands for the first node, which is known in the job only."""
_FUNCTIONS = """\
# Run a program, and again when it fails, until it is stopped: a lost node or a failed device ends a job step,
# and not the job. Exit code 0 is a drained process, 2 are wrong settings, which another start does not cure.
keep() {
    local child='' code is_stopping=''
    trap 'is_stopping=1; kill -TERM "$child" 2> /dev/null' TERM
    until [ -n "$is_stopping" ]; do
        "$@" &
        child=$!
        wait "$child"
        code=$?
        if [ -n "$is_stopping" ]; then
            wait "$child"
            return
        fi
        case $code in 0 | 2) return "$code" ;; esac
        echo "exit code $code, starting again: $*" >&2
        sleep 2
    done
}
"""
_END = """\
# Until the coordinator ends, or SIGTERM: then running requests end, and the workers after them.
is_stopping=''
trap 'is_stopping=1' TERM
wait "$coordinator"
code=$?
trap '' TERM
kill -TERM $gateways $coordinator 2> /dev/null
wait $gateways $coordinator
ended=$?
if [ -n "$is_stopping" ]; then code=$ended; fi
kill -TERM $workers 2> /dev/null
wait
exit "$code"
"""


def render(spec: ClusterSpec) -> tuple[RenderedFile, ...]:
    """One job script. Raises WrongField."""
    _check_hosts(spec)
    placed = replace(spec, coordinator=replace(spec.coordinator, host=_HEAD_HOST))
    check(placed)
    return (RenderedFile(f"{spec.name}.sbatch", "\n".join(_script(placed))),)


def _check_hosts(spec: ClusterSpec) -> None:
    if spec.coordinator.host is not None:
        raise WrongField(("coordinator", "host"), "Slurm chooses the hosts of its jobs: remove the key")


def _script(spec: ClusterSpec) -> Iterator[str]:
    found = commands(spec)
    yield "#!/bin/bash"
    yield f"# Start with `sbatch {spec.name}.sbatch`."
    yield "# Stop with `scancel -b -s TERM JOB`: running requests finish first."
    yield from _options(spec)
    yield ""
    yield "head=$SLURMD_NODENAME"
    for name, value in found[0].environment.items():
        yield f"export {name}={shlex.quote(value)}"
    yield ""
    yield _FUNCTIONS
    yield "gateways='' workers=''"
    for command in found:
        yield ""
        yield from _process(spec, command)
    yield ""
    yield _END


def _options(spec: ClusterSpec) -> Iterator[str]:
    engine, drain_s = spec.engine, round(drain_timeout_s(spec))
    given = {
        "job-name": spec.name,
        "output": f"{spec.name}-%j.log",
        "partition": engine.partition,
        "account": engine.account,
        "time": engine.time,
        "ntasks": str(len(spec.workers)),
        "cpus-per-task": _largest(spec, "cpus"),
        "gpus-per-task": _largest(spec, "gpus"),
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None)
    yield "# The job survives its nodes, except for the first one; after that one it starts again."
    yield "#SBATCH --no-kill"
    yield "#SBATCH --requeue"
    yield "# Time for a drain before the time limit."
    yield f"#SBATCH --signal=B:TERM@{drain_s}"


def _largest(spec: ClusterSpec, name: str) -> str | None:
    values = [getattr(worker.resources, name) for worker in spec.workers]
    given = [value for value in values if value is not None]
    return str(max(given)) if given else None


def _process(spec: ClusterSpec, command: ProcessCommand) -> Iterator[str]:
    words = [_word(line) for line in flag_lines(command.argv, shlex.quote)]
    lines = [f"{shlex.quote(spec.engine.program)} {words[0]}", *words[1:]]
    if command.role is Role.WORKER:
        lines = [" ".join(_step(command)), *lines]
    yield f"# {command.name}"
    yield "keep " + " \\\n    ".join(lines) + " &"
    match command.role:
        case Role.COORDINATOR:
            yield "coordinator=$!"
        case Role.GATEWAY:
            yield 'gateways="$gateways $!"'
        case _:
            yield 'workers="$workers $!"'


def _step(command: ProcessCommand) -> Iterator[str]:
    resources = command.resources
    yield from ("srun", "--nodes=1", "--ntasks=1", "--exact", "--no-kill", "--kill-on-bad-exit=0")
    yield f"--job-name={command.name}"
    if resources.cpus is not None:
        yield f"--cpus-per-task={resources.cpus}"
    if resources.gpus is not None:
        yield f"--gpus={resources.gpus}"
    if resources.memory_bytes is not None:
        yield f"--mem={resources.memory_bytes // 2**20}M"


def _word(line: str) -> str:
    return line.replace(_HEAD_HOST, '"$head"')
