"""The job of a cluster: submitted, found by the name of the cluster, and drained."""

from __future__ import annotations

import time
from dataclasses import dataclass

from deploy import ClusterFailed
from deploy.commands import drain_timeout_s
from deploy.engines.programs import run_program
from deploy.engines.slurm import render
from deploy.spec.cluster_spec import ClusterSpec
from wire.addresses import Address, parse_address

_RUNNING = "RUNNING"
_POLL_INTERVAL_S = 1.0
_GRACE_S = 60.0
"""Time of Slurm to end a job beyond the end of its script."""


@dataclass(frozen=True, slots=True)
class _Job:
    job_id: str
    state: str
    head: str
    nodes: str


class Slurm:
    """The job of a cluster, of this user. Every method raises ClusterFailed."""

    def run(self, spec: ClusterSpec) -> list[str]:
        """Submit the job, unless there is one. Raises WrongField too."""
        (script,) = render(spec)
        if (job := _find(spec)) is not None:
            raise ClusterFailed(f"cluster {spec.name} runs already, as job {job.job_id}")
        job_id = run_program("sbatch", "--parsable", stdin=script.text).strip().partition(";")[0]
        return [f"job {job_id} submitted; its log is {spec.name}-{job_id}.log"]

    def status(self, spec: ClusterSpec) -> list[str]:
        """The job, the address of its coordinator, and its steps."""
        job = _the_job(spec)
        if job.state != _RUNNING:
            return [f"job {job.job_id} {job.state}"]
        port = parse_address(spec.coordinator.listen_address).port
        found = f"job {job.job_id} {job.state} on {job.nodes}, coordinator at {Address(job.head, port)}"
        steps = run_program("squeue", "--noheader", "--steps", f"--jobs={job.job_id}", "--format=%i %j %N")
        outside = _queue(f"--name={spec.name}-{job.job_id}", "--format=%i outside %T %N")
        return [found, *sorted(line.strip() for line in (*steps.splitlines(), *outside))]

    def stop(self, spec: ClusterSpec) -> list[str]:
        """Drain the job and wait for its end."""
        job = _the_job(spec)
        how = ("--batch", "--signal=TERM") if job.state == _RUNNING else ()
        run_program("scancel", *how, job.job_id)
        timeout_s = drain_timeout_s(spec) + _GRACE_S
        deadline = time.monotonic() + timeout_s
        while (left := _find(spec)) is not None and left.job_id == job.job_id:
            if time.monotonic() > deadline:
                raise ClusterFailed(f"job {job.job_id} is {left.state} after {timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)
        return [f"job {job.job_id} ended"]


def _the_job(spec: ClusterSpec) -> _Job:
    if (job := _find(spec)) is None:
        raise ClusterFailed(f"cluster {spec.name} has no job of this user")
    return job


def _find(spec: ClusterSpec) -> _Job | None:
    found = [_Job(*line.split("|")) for line in _queue(f"--name={spec.name}", "--format=%i|%T|%B|%N")]
    return found[0] if found else None


def _queue(*options: str) -> list[str]:
    return run_program("squeue", "--me", "--noheader", *options).splitlines()
