"""A job script of Slurm: coordinator and gateways on its first node, a job step for each worker."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace

from certificates.identity import Role
from deploy.commands import ProcessCommand, check, commands, drain_timeout_s, worker_command
from deploy.engines.rendered import RenderedFile, flag_lines
from deploy.spec.cluster_spec import NO_RESOURCES, ClusterSpec
from deploy.spec.document import WrongField
from wire.exit_codes import ExitCode

_ENDS = f"{ExitCode.DONE.value} | {ExitCode.USAGE.value}"
"""Exit codes of a drained process, and of wrong settings, which another start does not cure."""
_HEAD_HOST = "head.invalid"
"""Stands for the first node, which is known in the job only."""
_DRAINED, _NO_STEP = 64, 65
_FUNCTIONS = f"""\
# With a lost node srun ends with code 0, as after a drain: so a step that drained ends with {_DRAINED}.
# Where Slurm cannot run a step, srun ends with {_NO_STEP}.
worker='trap : TERM; "$@" && exit {_DRAINED}'
export SLURM_EXIT_ERROR={_NO_STEP}
# Name of jobs for workers of a lost node: Slurm takes such a node from this job for good.
outside=$SLURM_JOB_NAME-$SLURM_JOB_ID

# Run a program, and again when it fails, until it is stopped.
keep() {{
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
        case $code in {_ENDS}) return "$code" ;; esac
        echo "exit code $code, starting again: $*" >&2
        sleep 2
    done
}}

# Run a worker in a step, and again when it fails or its node is lost, until it drains.
keep_worker() {{
    local name=$1 code is_stopping=''
    shift
    trap 'is_stopping=1' TERM
    until [ -n "$is_stopping" ]; do
        srun --job-name="$name" --immediate=10 --exact "$@"
        code=$?
        if [ "$code" = {_NO_STEP} ] && [ -z "$is_stopping" ]; then
            echo "$name: no room in this job, waiting for a node outside of it" >&2
            run_outside "$@"
            code=$?
        fi
        [ -z "$is_stopping" ] || return
        case $code in {_DRAINED} | {ExitCode.USAGE.value}) return "$code" ;; esac
        echo "$name: exit code $code, starting again" >&2
        sleep 2
    done
}}

# Run a step in a job of its own, which ends with the time limit of this one.
run_outside() {{
    local name unset=()
    for name in $(compgen -v SLURM_); do
        case $name in SLURM_CONF | SLURM_EXIT_ERROR) ;; *) unset+=("--unset=$name") ;; esac
    done
    env "${{unset[@]}}" srun --job-name="$outside" --partition="$SLURM_JOB_PARTITION" \\
        ${{SLURM_JOB_ACCOUNT:+--account="$SLURM_JOB_ACCOUNT"}} \\
        --time="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%L)" "$@"
}}

# After the first node was lost, files of the run before may still be there.
cancel_outside() {{
    scancel --quiet --user="$(id -un)" --name="$outside"
}}
cancel_outside
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
while [ -n "$(jobs -pr)" ]; do
    # srun would pass SIGTERM on as SIGKILL.
    scancel --quiet --signal=TERM "$SLURM_JOB_ID"
    cancel_outside
    sleep 2
done
exit "$code"
"""


def render(spec: ClusterSpec) -> tuple[RenderedFile, ...]:
    """One job script. Raises WrongField."""
    _check_places(spec)
    placed = replace(spec, coordinator=replace(spec.coordinator, host=_HEAD_HOST))
    check(placed)
    return (RenderedFile(f"{spec.name}.sbatch", "\n".join(_script(placed))),)


def _check_places(spec: ClusterSpec) -> None:
    if spec.coordinator.host is not None:
        raise WrongField(("coordinator", "host"), "Slurm chooses the hosts of its jobs: remove the key")
    reason = "the batch step has the resources of the first node: remove the key"
    if spec.coordinator.resources != NO_RESOURCES:
        raise WrongField(("coordinator", "resources"), reason)
    for index, gateway in enumerate(spec.gateways):
        if gateway.resources != NO_RESOURCES:
            raise WrongField(("gateways", index, "resources"), reason)
    for index, worker in enumerate(spec.workers):
        if isinstance(worker.resources.cpus, float):
            fraction = f"is {worker.resources.cpus:g}, but Slurm gives whole CPUs to a task: round it up"
            raise WrongField(("workers", index, "resources", "cpus"), fraction)


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
        "open-mode": "append",
        "partition": engine.partition,
        "account": engine.account,
        "time": engine.time,
        "ntasks": len(spec.workers),
        "cpus-per-task": _largest(spec, "cpus"),
        "mem-per-cpu": _memory_per_cpu(spec),
        "gpus-per-task": max(worker_command(spec, worker).num_gpus for worker in spec.workers) or None,
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None)
    yield "# The job survives its nodes, except for the first one; after that one it starts again."
    yield "#SBATCH --no-kill"
    yield "#SBATCH --requeue"
    yield "# Time for a drain before the time limit."
    yield f"#SBATCH --signal=B:TERM@{drain_s}"


def _largest(spec: ClusterSpec, name: str) -> int | None:
    values = [getattr(worker.resources, name) for worker in spec.workers]
    return max((value for value in values if value is not None), default=None)


def _memory_per_cpu(spec: ClusterSpec) -> str | None:
    """Slurm has no memory per task."""
    memory_bytes, cpus = _largest(spec, "memory_bytes"), _largest(spec, "cpus") or 1
    return None if memory_bytes is None else f"{math.ceil(memory_bytes / 2**20 / cpus)}M"


def _process(spec: ClusterSpec, command: ProcessCommand) -> Iterator[str]:
    words = [_word(line) for line in flag_lines(command.argv, shlex.quote)]
    lines = [f"{shlex.quote(spec.engine.program)} {words[0]}", *words[1:]]
    if command.role is Role.WORKER:
        lines = [" ".join(_step(command)), f'bash -c "$worker" {command.name}', *lines]
    yield f"# {command.name}"
    yield ("" if command.role is Role.WORKER else "keep ") + " \\\n    ".join(lines) + " &"
    match command.role:
        case Role.COORDINATOR:
            yield "coordinator=$!"
        case Role.GATEWAY:
            yield 'gateways="$gateways $!"'
        case _:
            yield 'workers="$workers $!"'


def _step(command: ProcessCommand) -> Iterator[str]:
    resources = command.resources
    yield f"keep_worker {command.name} --nodes=1 --ntasks=1"
    if resources.cpus is not None:
        yield f"--cpus-per-task={resources.cpus}"
    if command.num_gpus:
        yield f"--gpus={command.num_gpus}"
    # 0 is what the other steps leave: without it the first step has all memory, and the others wait.
    memory_bytes = resources.memory_bytes
    yield f"--mem={0 if memory_bytes is None else memory_bytes // 2**20}M"


def _word(line: str) -> str:
    return line.replace(_HEAD_HOST, '"$head"')
