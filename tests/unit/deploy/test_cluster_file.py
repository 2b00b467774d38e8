"""The cluster file: what is read from it, and where errors point."""

from pathlib import Path

import pytest

from deploy.commands import commands, read_cluster_spec
from deploy.spec.cluster_spec import ClusterSpec, WorkerSpec
from deploy.spec.document import SpecError, WrongField
from tests.unit.deploy.cluster_files import LEAST, lines_of, write


def test_the_least_file_is_a_coordinator_a_gateway_and_workers_on_one_machine(tmp_path: Path) -> None:
    spec = read_cluster_spec(write(tmp_path, LEAST))
    assert lines_of(spec) == {
        "coordinator": "coordinator --listen 127.0.0.1:7480 --stages 2 --model /models/m "
        "--http 127.0.0.1:7481",
        "gateway": "gateway --coordinator 127.0.0.1:7480 --listen 127.0.0.1:7482 "
        "--dashboard-url http://127.0.0.1:7481/",
        "gpu-a": "worker --coordinator 127.0.0.1:7480 --name gpu-a --memory 20GiB --device cuda:0",
        "gpu-b": "worker --coordinator 127.0.0.1:7480 --name gpu-b --memory 20GiB --device cuda:0",
    }


_WRONG = [
    ("workres: []", "1: workres: unknown key 'workres', the nearest known one is 'workers'"),
    ("model: /m", "1: 'workers' is missing"),
    ("workers: []", "1: workers: is empty: a cluster has at least one worker"),
    ("workers: {name: a}", "1: workers: is a mapping, must be a list"),
    ("workers:\n- name: a\n  name: b", "3: workers[0]: key 'name' is given twice, first in line 2"),
    ("workers:\n- name: a\n- name: a", "3: workers[1].name: 'a' is the name of workers[0] too: give another"),
    ("workers:\n- name: A_1", "2: workers[0].name: 'A_1' is not a name"),
    ("workers:\n- name: a\n  memory: 20", "3: workers[0].memory: '20' has no unit"),
    ("workers:\n- name: a\n  memory:", "3: workers[0].memory: is empty: give a value or remove the key"),
    ("workers: [{name: a, device: gpu}]", "1: workers[0].device: device 'gpu' is not one of cpu, auto"),
    ("stages: 2\nworkers: [{name: a}]", "1: stages: is 2, the limit is one per worker: 1"),
    ("stages: two\nworkers: [{name: a}]", "1: stages: 'two' is not a whole number"),
    ("drain-timeout: 0\nworkers: [{name: a}]", "1: drain-timeout: 0 is out of range: must be above 0"),
    ("workers: [{name: a}]\ndtype: int3", "2: dtype: dtype 'int3' is not one of bf16, f16, f32"),
    ("model: m\nworkers: [{name: a}]", '1: model: path "m" is not absolute'),
    ("security: {insecure: yes}\nworkers: [{name: a}]", "1: security.insecure: 'yes' is not a boolean"),
    (
        "workers: [{name: a}]\ncoordinator:\n  flags:\n    max-step-tokens: 0",
        "4: coordinator.flags.max-step-tokens: 0 is out of range: must be at least 1 and at most 1048576",
    ),
    (
        "workers: [{name: a}]\ncoordinator:\n  flags:\n    max-step-token: 9",
        "4: coordinator.flags.max-step-token: unknown key 'max-step-token', the nearest known one is "
        "'max-step-tokens'",
    ),
    (
        "workers: [{name: a}]\ncoordinator: {flags: {model: /m}}",
        "2: coordinator.flags.model: is set by the file's own key: use model",
    ),
    (
        "workers: [{name: a}]\ncoordinator:\n  flags: {lease: 1}",
        "3: coordinator.flags.lease: is set by the file's own key: use timeouts.lease",
    ),
    (
        "workers: [{name: a}]\ntimeouts: {heartbeat: 5, lease: 1}",
        "1: coordinator: a lease of 1.0 s is less than two heartbeats of 5.0 s",
    ),
    (
        "workers: [{name: a}]\ncoordinator:\n  host: head",
        "2: coordinator.listen: coordinator.listen 0.0.0.0:7480 can be reached from other hosts: "
        "give security.tls-dir DIR, or security.insecure",
    ),
    ("workers:\n- {name: a, host: x}", "1: coordinator.host: is missing: 'a' is on a host of its own"),
    (
        "coordinator: {host: head}\nworkers:\n- {name: a, host: ../../etc}",
        "3: workers[0].host: '../../etc' is not a host name or an IP address",
    ),
    (
        "workers: [{name: a}]\ncoordinator:\n  host: '[::1]'",
        "3: coordinator.host: '[::1]' is not a host name",
    ),
    (
        "workers: [{name: a}]\ncoordinator:\n  host: head:7480",
        "3: coordinator.host: 'head:7480' is not a host",
    ),
    ("workers: [{name: a}]\nengine:\n  partition: a b", "3: engine.partition: 'a b' has spaces"),
    (
        "workers: [{name: a}]\nenvironment:\n  \u00c9: x",
        "3: environment.'\u00c9': '\u00c9' is not the name of an",
    ),
    (
        "workers: [{name: a}]\nenvironment:\n  STAGELINE_DTYPE: f32",
        "3: environment.STAGELINE_DTYPE: is a flag of the coordinator",
    ),
    (
        "workers: [{name: a}]\nenvironment:\n  STAGELINE_DTPYE: f32",
        "2: environment: no command reads the environment variable STAGELINE_DTPYE, the nearest known one is",
    ),
    ("workers: [{name: a}]\nsecurity: {join-token-file: /t}", "2: security.join-token-file: needs enroll-"),
    ("a: &a {b: 1}\n<<: *a", "2: << is not supported: write the keys out"),
    ("workers: [", "1: not YAML"),
    ("workers: " + "[" * 2000, " lists and mappings are nested too deeply"),
    ("", " empty: a cluster file has at least `workers`"),
    ("!!python/object:os.system {}", "1: 'workers' is missing"),
]


@pytest.mark.parametrize(("text", "expected"), _WRONG, ids=[expected[:50] for _, expected in _WRONG])
def test_an_error_has_the_line_and_the_path_of_the_field(text: str, expected: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        read_cluster_spec(file)
    assert f"{file}:{expected}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_is_read_as_it_is_written(tmp_path: Path) -> None:
    """YAML 1.1 reads these as a boolean, a number to the base of 60 and a float."""
    spec = read_cluster_spec(
        write(tmp_path, "coordinator: {http: off}\nengine: {time: 1:30}\nworkers: [{name: 1e3}]")
    )
    assert (spec.coordinator.http, spec.engine.time, spec.workers[0].name) == (None, "1:30", "1e3")


def test_a_cluster_without_a_file_is_checked_by_the_same_rules() -> None:
    with pytest.raises(WrongField, match=r"workers\[1\].name: 'a' is the name of"):
        ClusterSpec(workers=(WorkerSpec(name="a"), WorkerSpec(name="a")))


def test_a_variable_may_be_empty(tmp_path: Path) -> None:
    spec = read_cluster_spec(write(tmp_path, f"{LEAST}environment: {{CUDA_VISIBLE_DEVICES: ''}}\n"))
    assert spec.environment == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_process_of_an_ipv6_host_listens_on_ipv6(tmp_path: Path) -> None:
    spec = read_cluster_spec(
        write(
            tmp_path,
            "coordinator: {host: 'fd00::1'}\nsecurity: {insecure: true}\nworkers: [{name: a}]\n",
        )
    )
    lines = lines_of(spec)
    assert "--listen [::]:7480 " in lines["coordinator"]
    assert "--coordinator [fd00::1]:7480 --listen [::]:7482 " in lines["gateway"]


def _paths(spec: ClusterSpec) -> list[str]:
    return [str(used.path) for command in commands(spec) for used in command.paths]


def test_each_process_has_its_own_certificate(tmp_path: Path) -> None:
    spec = read_cluster_spec(write(tmp_path, f"{LEAST}security: {{tls-dir: /tls}}\n"))
    assert [path for path in _paths(spec) if path.startswith("/tls")] == [
        f"/tls/{name}" for name in ("coordinator", "gateway", "gpu-a", "gpu-b")
    ]
