"""What the doctor says about facts of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.commands import ProcessCommand, commands, read_cluster_spec
from deploy.doctor.facts import HeldPorts, host_facts, versions_here
from deploy.doctor.findings import problems_of_host, problems_of_survey
from deploy.doctor.survey import Survey
from stageline_rpc.internal.v1 import doctor_pb2
from tests.ports import unused_address
from wire.addresses import parse_address

GIB = 2**30


def facts(**fields: object) -> doctor_pb2.HostFacts:
    """A sound host, with exceptions."""
    sound = {
        "name": "gpu-a",
        "versions": {**versions_here("1"), "torch": "2.13.0"},
        "devices": [doctor_pb2.Device(name="cuda:0", model="H100", memory_bytes=80 * GIB)],
        "memory_bytes": 64 * GIB,
        "disks": [doctor_pb2.Disk(path="/var/cache", free_bytes=100 * GIB)],
        "max_open_files": 65_536,
    }
    return doctor_pb2.HostFacts(**{**sound, **fields})  # type: ignore[arg-type]


def workers(tmp_path: Path, *lines: str) -> list[ProcessCommand]:
    file = tmp_path / "cluster.yaml"
    file.write_text("\n".join(["workers:", *(f"  - {{{line}}}" for line in lines)]))
    return list(commands(read_cluster_spec(file)))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"versions": {"python": "3.10.2"}}, "gpu-a: Python 3.10.2 is not supported: use 3.11 to 3.13"),
        (
            {"versions": {"python": "3.12.1", "torch": "missing"}},
            "gpu-a: torch is not installed, without which only mock workers run",
        ),
        (
            {"versions": {"python": "3.12.1", "numpy": "missing"}},
            "gpu-a: numpy is not installed: install Stageline again",
        ),
        ({"device_problem": "torch 2 does not work with driver 1"}, "gpu-a: torch 2 does not work"),
        ({"max_open_files": 1024}, "gpu-a: a process may open 1024 files, less than 4096: raise"),
        (
            {"disks": [doctor_pb2.Disk(path="/j", free_bytes=GIB)]},
            "gpu-a: /j has 1.0 GiB free, less than 2.0 GiB: free space",
        ),
        (
            {
                "disks": [
                    doctor_pb2.Disk(path="/j", free_bytes=9 * GIB, problem="this user may not write to /")
                ]
            },
            "gpu-a: /j cannot be written: this user may not write to /; create",
        ),
        (
            {"models": [doctor_pb2.ModelFacts(process="w", path="/m", problem="/m is not a directory")]},
            "gpu-a: w has no usable checkpoint: /m is not a directory",
        ),
        ({"devices": [], "kernels_problem": "no kernels"}, "gpu-a: no kernels; stages on CPUs run"),
        ({"kernels_problem": "no kernels"}, None),
    ],
)
def test_each_lack_of_a_host_is_one_sentence(fields: dict[str, object], problem: str | None) -> None:
    found = list(problems_of_host(facts(**fields)))
    assert len(found) == (problem is not None), found
    assert problem is None or found[0].startswith(problem)


def test_devices_and_memory_of_the_workers_are_compared(tmp_path: Path) -> None:
    found = workers(
        tmp_path,
        "name: a, device: cuda:0, memory: 80GiB",
        "name: b, device: cuda:0, memory: 81GiB",
        "name: c, device: cuda:3",
        "name: d, memory: 65GiB",
        "name: e, device: auto, memory: 79GiB",
        "name: f, device: cuda:all, memory: 99GiB",
    )
    assert list(problems_of_host(facts(), found)) == [
        "gpu-a: b asks for 81.0 GiB of 80.0 GiB that cuda:0 (H100) has: lower its memory in the cluster file",
        "gpu-a: c has no device cuda:3; found: cuda:0",
        "gpu-a: d asks for 65.0 GiB of 64.0 GiB that the host has: lower its memory in the cluster file",
        "gpu-a: f asks for 99.0 GiB of 80.0 GiB that cuda:0 (H100) has: lower its memory in the cluster file",
    ]


def test_torch_is_missing_only_where_a_worker_computes(tmp_path: Path) -> None:
    without = facts(
        versions={**versions_here("1"), "torch": "missing"},
        devices=[],
        device_problem="torch cannot be loaded",
        kernels_problem="No module named 'torch'",
    )
    planned = workers(tmp_path, "name: a", 'name: b, flags: {mock: "step=1ms"}')
    by_name = {command.name: command for command in planned}
    advice = "gpu-a: torch is not installed, without which only mock workers run: see docs/installing.md"
    assert list(problems_of_host(without, [by_name["a"]])) == [advice]
    others = [command for command in planned if command.name != "a"]
    assert len(others) >= 2  # the coordinator, too
    assert list(problems_of_host(without, others)) == []
    assert list(problems_of_host(without)) == [advice]


def test_a_library_that_a_host_lacks_is_no_other_version(tmp_path: Path) -> None:
    hosts = {
        "head": facts(versions={"torch": "missing", "numpy": "2.1"}),
        "gpu-a": facts(versions={"torch": "2.13.0", "numpy": "2.2"}),
    }
    found = problems_of_survey(Survey(facts=hosts, silent={}, measured=()), ())
    assert [problem for problem in found if "differ" in problem] == [
        "versions of numpy differ (2.1 on head; 2.2 on gpu-a): install the same on all hosts"
    ]


def test_facts_of_this_host_are_collected(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    found = host_facts("here", versions=versions_here("1"), directories=[tmp_path / "new", file / "below"])
    disks = {disk.path: disk for disk in found.disks}
    assert disks[str(tmp_path / "new")].problem == ""
    assert disks[str(file / "below")].problem == f"{file} is not a directory"
    assert (found.name, found.versions["stageline"], found.num_cpus > 0) == ("here", "1", True)
    assert 0 < found.available_memory_bytes <= found.memory_bytes


def test_a_held_port_is_free_for_nobody_else() -> None:
    address, first, second = parse_address(unused_address()), HeldPorts(), HeldPorts()
    try:
        assert first.hold(address) == ""
        assert second.hold(address) == "another process listens there"
        assert second.hold(parse_address("192.0.2.1:7000")) == "it is not an address of this host"
    finally:
        first.release()
    assert second.hold(address) == ""
    second.release()
