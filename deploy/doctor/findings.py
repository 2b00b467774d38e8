"""What is wrong with hosts and ways: one sentence each, with what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from certificates.identity import Role
from deploy.commands import ProcessCommand
from deploy.doctor.facts import MISSING
from deploy.doctor.places import Place
from deploy.doctor.survey import Survey
from stage_worker.config import ALL_GPUS, AUTO
from stageline_rpc.internal.v1 import doctor_pb2
from wire.sizes import format_size

MIN_DISK_BYTES = 2 * 2**30
MIN_OPEN_FILES = 4096
MAX_CLOCK_OFFSET_US = 500_000
PYTHONS = ("3.11", "3.12", "3.13")


def problems_of_host(facts: doctor_pb2.HostFacts, commands: Iterable[ProcessCommand] = ()) -> Iterator[str]:
    """What one host lacks for the processes that it will run."""
    at, commands = f"{facts.name}: ", tuple(commands)
    yield from (f"{at}{problem}" for problem in _versions_here(facts, commands))
    has_torch = facts.versions.get("torch") != MISSING
    if facts.device_problem and has_torch:
        yield f"{at}{facts.device_problem}: install the torch build for the driver (docs/installing.md)"
    for command in commands:
        yield from (f"{at}{problem}" for problem in _of_worker(command, facts))
    if facts.kernels_problem and has_torch and _computes_on_cpu(facts, commands):
        yield (
            f"{at}{facts.kernels_problem}; stages on CPUs run 1.5 to 3 times slower: install Stageline again "
            "with a C compiler, or choose a CPU with AVX-512 bf16"
        )
    for disk in facts.disks:
        if disk.problem:
            yield f"{at}{disk.path} cannot be written: {disk.problem}; create it for the user of the process"
        elif disk.free_bytes < MIN_DISK_BYTES:
            free, least = format_size(disk.free_bytes), format_size(MIN_DISK_BYTES)
            yield f"{at}{disk.path} has {free} free, less than {least}: free space, or choose another path"
    if facts.max_open_files < MIN_OPEN_FILES:
        limit = f"a process may open {facts.max_open_files} files, less than {MIN_OPEN_FILES}"
        yield f"{at}{limit}: raise the hard limit (LimitNOFILE= or /etc/security/limits.conf)"
    for port in facts.ports:
        if port.problem:
            what = f"{port.process} cannot listen on {port.address} ({port.name})"
            yield f"{at}{what}: {port.problem}; end that process, or choose another port"
    for model in facts.models:
        if model.problem:
            yield f"{at}{model.process} has no usable checkpoint: {model.problem}"


def _versions_here(facts: doctor_pb2.HostFacts, commands: tuple[ProcessCommand, ...]) -> Iterator[str]:
    python = facts.versions.get("python", "")
    if ".".join(python.split(".")[:2]) not in PYTHONS:
        yield f"Python {python} is not supported: use {PYTHONS[0]} to {PYTHONS[-1]}"
    for library, version in sorted(facts.versions.items()):
        if version == MISSING and library != "torch":
            yield f"{library} is not installed: install Stageline again"
        elif version == MISSING and (not commands or any(map(_computes, commands))):
            yield "torch is not installed, without which only mock workers run: see docs/installing.md"


def _computes(command: ProcessCommand) -> bool:
    """A worker that is no mock."""
    return command.role is Role.WORKER and "--mock" not in command.values()


def _computes_on_cpu(facts: doctor_pb2.HostFacts, commands: tuple[ProcessCommand, ...]) -> bool:
    if not commands:
        return not facts.devices
    return any(_computes(command) and not command.uses_gpu for command in commands)


def _of_worker(command: ProcessCommand, facts: doctor_pb2.HostFacts) -> Iterator[str]:
    """A device that is missing or too small."""
    if command.role is not Role.WORKER:
        return
    values = command.values()
    wanted, device = values.get("--memory"), values.get("--device", "cpu")
    devices = {found.name: found for found in facts.devices}
    if device == "cpu":
        memory_bytes, name = facts.memory_bytes, "the host"
    elif (found := _device_of(device, facts)) is not None:
        memory_bytes, name = found.memory_bytes, f"{found.name} ({found.model})"
    else:
        yield f"{command.name} has no device {device}; found: {', '.join(devices) or 'none'}"
        return
    if wanted is not None and wanted > memory_bytes:
        sizes = f"{format_size(wanted)} of {format_size(memory_bytes)}"
        yield f"{command.name} asks for {sizes} that {name} has: lower its memory in the cluster file"


def _device_of(wanted: str, facts: doctor_pb2.HostFacts) -> doctor_pb2.Device | None:
    """The device that decides whether the memory is enough; None if the host lacks it."""
    by_memory = sorted(facts.devices, key=lambda device: device.memory_bytes)
    if wanted == ALL_GPUS:
        return by_memory[0] if by_memory else None
    if wanted == AUTO:
        return by_memory[-1] if by_memory else None
    name = "cuda:0" if wanted == "cuda" else wanted
    return next((device for device in facts.devices if device.name == name), None)


def problems_of_survey(found: Survey, places: tuple[Place, ...]) -> list[str]:
    """What is wrong in a cluster."""
    problems = list(_silences(found, places))
    for host, facts in found.facts.items():
        problems += problems_of_host(facts, [place.command for place in places if place.host == host])
    problems += _differences(found.facts)
    problems += _different_models(found.facts.values())
    problems += _broken_ways(found)
    problems += _clocks(found)
    return problems


def _silences(found: Survey, places: tuple[Place, ...]) -> Iterator[str]:
    """One sentence per host, or per process if others of its host answer."""
    hosts = {place.host for place in places} - found.facts.keys()
    for host in sorted(hosts):
        first = next(place for place in places if place.host == host)
        reason = f"{host} does not answer at {first.reached} ({found.silent[first.name]})"
        yield f"{reason}: run `stageline doctor --serve {host} -f FILE` there, and check network and firewall"
    for place in places:
        if place.name in found.silent and place.host not in hosts:
            reason = f"{place.name} does not answer at {place.reached} ({found.silent[place.name]})"
            yield f"{reason}: check its port in the firewall, and what listens there"


def _differences(facts: Mapping[str, doctor_pb2.HostFacts]) -> Iterator[str]:
    names = sorted({name for host in facts.values() for name in host.versions})
    for name in names:
        hosts: dict[str, list[str]] = {}
        for host, found in facts.items():
            if (version := found.versions.get(name, "unknown")) != MISSING:
                hosts.setdefault(version, []).append(host)
        if len(hosts) > 1:
            shown = "; ".join(f"{version} on {', '.join(found)}" for version, found in hosts.items())
            advice = "install the same on all hosts"
            if name == "protocol":
                advice += ", or coordinator and workers refuse each other"
            yield f"versions of {name} differ ({shown}): {advice}"


def _different_models(facts: Iterable[doctor_pb2.HostFacts]) -> Iterator[str]:
    models = [model for host in facts for model in host.models if model.fingerprint]
    if len({model.fingerprint for model in models}) > 1:
        usual = Counter(model.fingerprint for model in models).most_common(1)[0][0]
        for model in models:
            if model.fingerprint != usual:
                what = f"{model.process} has another checkpoint in {model.path} than most"
                yield f"{what}: copy the same files to all hosts"


def _broken_ways(found: Survey) -> Iterator[str]:
    """Without paths to processes that answered no caller: those are reported already."""
    reached = {way.path.callee.name for way in found.measured if not way.result.problem}
    for way in found.measured:
        callee = way.path.callee
        if way.result.problem and (callee.name in reached or callee.name not in found.silent):
            text = f"{way.path.caller.name} does not reach {callee.name} at {callee.reached}"
            yield f"{text} ({way.result.problem}): check names, routes and firewall between them"


def _clocks(found: Survey) -> Iterator[str]:
    """Offsets to the coordinator's host."""
    told = set[str]()
    for way in found.measured:
        host, result = way.path.caller.host, way.result
        if way.path.callee.role is not Role.COORDINATOR or result.problem or host in told:
            continue
        offset_us = result.clock_offset_us
        if abs(offset_us) - result.clock_uncertainty_us > MAX_CLOCK_OFFSET_US:
            told.add(host)
            direction = "behind" if offset_us > 0 else "ahead of"
            size = f"{abs(offset_us) / 1e6:.3f} s {direction} {way.path.callee.host}"
            error = f"at most {result.clock_uncertainty_us / 1e3:.1f} ms wrong"
            yield f"the clock of {host} is {size} ({error}): certificates and traces need time sync (NTP)"
