"""The renderer of the Helm chart; `tests/deploy` has what Helm and running pods make of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

from certificates.identity import Role
from deploy.commands import CONFIGS, ProcessCommand, commands, read_cluster_spec
from deploy.engines.chart_values import values_schema
from deploy.engines.kubernetes import CHART, SERVED_BY, chart_values
from deploy.spec.cluster_spec import NO_RESOURCES
from stageline.cli import main
from tests.repository import REPOSITORY
from tests.unit.deploy.cluster_files import write
from tests.unit.test_packaging import PROJECT
from wire.authorization import ROLES_OF_METHOD

CLUSTER = """\
name: stories
model: /models/m
coordinator: {http: off, flags: {public-prefix: "/etc/prefixes/a.txt,/etc/prefixes/b.txt"}}
gateways: [{name: api}]
workers:
  - {name: gpu-0, device: cuda, memory: 20GiB}
  - {name: gpu-1, device: "cuda:0", memory: 20GiB}
  - {name: gpu-2, device: cuda, memory: 20GiB}
  - {name: gpu-spare, flags: {payload-listen: off, threads: 4}, resources: {memory: 1GiB}}
security: {tls-dir: /etc/tls, deny-list: /etc/denied, keys-file: /etc/keys.toml}
environment: {GREETING: "a $b $(c)"}
"""
KNOWN_NAMES = {
    "$(COORDINATOR_HOST)": "stories-coordinator",
    "$(POD_HOST)": "stories-gpu-0.stories-workers",
    "$(POD_NAME)": "stories-gpu-0",
    "$(TLS_DIR)": "/etc/stageline/tls",
}


def _values(text: str, directory: Path) -> dict[str, Any]:
    out = directory / "chart"
    file = write(directory, text)
    assert main(["deploy", "render", "kubernetes", "-f", str(file), "-o", str(out)]) == 0
    values: dict[str, Any] = yaml.safe_load((out / "values.yaml").read_text())
    return values


def _processes(values: dict[str, Any]) -> list[tuple[Role, dict[str, Any]]]:
    return [
        (Role.COORDINATOR, values["coordinator"]),
        *((Role.GATEWAY, process) for process in values["gateways"].values()),
        *((Role.WORKER, process) for process in values["workers"].values()),
    ]


def test_the_chart_is_what_its_example_renders(tmp_path: Path) -> None:
    """To record it, run the command in the first line of the example."""
    assert main(["deploy", "render", "kubernetes", "-f", f"{CHART}/cluster.yaml", "-o", str(tmp_path)]) == 0
    rendered = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.*")}
    recorded = {str(path.relative_to(CHART)): path.read_text() for path in CHART.rglob("*.*")}
    assert recorded.pop("cluster.yaml")
    assert rendered == recorded


def test_workers_that_have_weights_serve_them_at_a_port_of_the_chart(tmp_path: Path) -> None:
    mocks = CLUSTER.replace("device: cuda,", "flags: {mock: step=1ms},").replace('device: "cuda:0",', "")
    for text, ports in ((CLUSTER, {"payloads", "weights"}), (mocks, {"payloads"})):
        workers = _values(text, tmp_path)["workers"]["gpu"]
        assert workers["ports"].keys() == {"rpc", "health"} | ports
        words = dict(pairwise(workers["args"]))
        assert words.get("--weights-advertise") == ("$(POD_HOST):7486" if "weights" in ports else None)


def test_templates_use_every_value() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())

    def keys(schema: dict[str, Any]) -> Iterator[str]:
        for name, below in schema.get("properties", {}).items():
            yield name
            for part in (
                below,
                below.get("items"),
                below.get("additionalProperties"),
                *below.get("anyOf", ()),
            ):
                yield from keys(part) if isinstance(part, dict) else ()

    unused = {name for name in keys(values_schema()) if not re.search(rf"\.{name}\b", templates)}
    assert unused == {"global"}


@pytest.mark.parametrize("text", [CLUSTER, (CHART / "cluster.yaml").read_text()], ids=["cluster", "example"])
def test_every_process_accepts_its_words(text: str, tmp_path: Path) -> None:
    for role, process in _processes(_values(text, tmp_path)):
        words = process["args"]
        for variable, name in KNOWN_NAMES.items():
            words = [word.replace(variable, name) for word in words]
        assert not any("$" in word or ".invalid" in word for word in words)
        command = ProcessCommand(
            role=role, name="any", argv=tuple(words), environment={}, host=None, resources=NO_RESOURCES
        )
        assert isinstance(command.config(), CONFIGS[role])
        ports = {"http" if role is Role.GATEWAY else port.name: port.address.port for port in command.ports}
        assert process["ports"] == ports


def test_words_are_those_of_the_cluster_file_but_for_addresses_and_paths(tmp_path: Path) -> None:
    values = _values(CLUSTER, tmp_path)
    given = {command.name: command for command in commands(read_cluster_spec(tmp_path / "cluster.yaml"))}
    found = values["workers"]["gpu"]["args"]
    assert {"--memory", "--device"} < set(given["gpu-0"].argv) & set(found)
    assert found[found.index("--memory") + 1] == "20GiB"
    spare = values["workers"]["gpu-spare"]["args"]
    assert spare[spare.index("--payload-listen") + 1] == "off"
    assert "--payload-advertise" not in spare
    assert spare[spare.index("--threads") + 1] == "4"


def test_workers_with_equal_settings_are_one_set(tmp_path: Path) -> None:
    text = CLUSTER.replace('"cuda:0"', "cuda")
    workers = _values(text, tmp_path)["workers"]
    assert {name: process["replicas"] for name, process in workers.items()} == {"gpu": 3, "gpu-spare": 1}
    assert workers["gpu"]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert workers["gpu-spare"]["resources"]["limits"] == {"memory": "1Gi"}


def test_sets_of_equal_names_get_different_ones(tmp_path: Path) -> None:
    text = "workers: [{name: a-0}, {name: a-1}, {name: a-2, memory: 1GiB}, {name: a-3, memory: 1GiB}]"
    workers = _values(f"{text}\nsecurity: {{insecure: true}}\n", tmp_path)["workers"]
    assert {name: process["replicas"] for name, process in workers.items()} == {"a": 2, "a-b": 2}
    assert "--memory" in workers["a-b"]["args"]


def test_files_are_secrets_named_by_their_flags(tmp_path: Path) -> None:
    values = _values(CLUSTER, tmp_path)
    assert values["coordinator"]["files"] == [
        {"name": name, "secret": f"stories-{name}", "mountPath": f"/etc/stageline/{name}"}
        for name in ("deny-list", "public-prefix")
    ]
    args = values["coordinator"]["args"]
    assert args[args.index("--deny-list") + 1] == "/etc/stageline/deny-list/denied"
    assert (
        args[args.index("--public-prefix") + 1]
        == "/etc/stageline/public-prefix/a.txt,/etc/stageline/public-prefix/b.txt"
    )
    assert [item["name"] for item in values["workers"]["gpu"]["files"]] == ["deny-list"]


def test_kubernetes_expands_nothing_in_texts_of_the_file(tmp_path: Path) -> None:
    values = _values(CLUSTER.replace("/etc/denied", "/etc/$(denied)"), tmp_path)
    assert values["environment"] == {"GREETING": "a $$b $$(c)"}
    assert "/etc/stageline/deny-list/$$(denied)" in values["coordinator"]["args"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("coordinator: {", "coordinator: {host: head, "),
            ":3: coordinator.host: Kubernetes chooses the nodes",
        ),
        (
            ("coordinator: {", "coordinator: {listen: '0.0.0.0:1', "),
            ":3: coordinator.listen: the chart chooses",
        ),
        (("{name: api}", "{name: api, listen: '0.0.0.0:1'}"), ":4: gateways[0].listen: the chart chooses"),
        (("{name: gpu-1", "{advertise: 'a:1', name: gpu-1"), ":7: workers[1].advertise: the chart chooses"),
        (
            ("{name: gpu-1", "{model: /m, name: gpu-1"),
            ":7: workers[1].model: all pods have the model at one path",
        ),
        (("cuda:0", "cuda:1"), ":7: workers[1].device: is cuda:1, and a pod sees its own GPUs only"),
        (("cuda:0", "cuda:all"), ":7: workers[1].device: is cuda:all, and a pod runs one worker"),
        (("name: stories", "name: 1-story"), ":1: name: '1-story' begins with a digit"),
        (
            ("name: stories", f"name: {'s' * 41}"),
            f":1: name: makes '{'s' * 41}-coordinator', which has 53 characters, the limit of",
        ),
        (("{name: api}", "{name: workers}"), ":4: gateways: 'workers' is a name of the chart's own"),
        (("gpu-spare", "workers"), ":5: workers: 'workers' is a name of the chart's own"),
        (
            ("security: {", "security: {enroll-listen: '0.0.0.0:1', ca-dir: /ca, tokens-file: /tokens, "),
            ":10: security.enroll-listen: Kubernetes",
        ),
    ],
)
def test_what_kubernetes_decides_is_refused(
    change: tuple[str, str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, CLUSTER.replace(*change))
    assert main(["deploy", "render", "kubernetes", "-f", str(file), "-o", str(tmp_path / "out")]) == 2
    assert f"{file}{problem}" in capsys.readouterr().err


def test_callers_are_those_of_the_table_of_authorisation(tmp_path: Path) -> None:
    # Open to everyone, and of an agent that runs before the cluster does.
    elsewhere = ("grpc.", "stageline.internal.v1.DoctorService/")
    prefixes = {prefix for prefixes in SERVED_BY.values() for prefix in prefixes}
    for method in ROLES_OF_METHOD:
        owners = [prefix for prefix in (*prefixes, *elsewhere) if method.lstrip("/").startswith(prefix)]
        assert len(owners) == 1, method
    callers = chart_values(read_cluster_spec(write(tmp_path, CLUSTER))).network_policy.callers
    assert callers == {
        "coordinator": ("client", "gateway", "operator", "worker"),
        "worker": ("coordinator", "worker"),
    }
    for server, roles in callers.items():
        for role in Role:
            may = any(
                role in allowed and allowed != frozenset(Role)
                for method, allowed in ROLES_OF_METHOD.items()
                if method.lstrip("/").startswith(SERVED_BY[Role(server)])
            )
            assert may == (role.value in roles), (server, role)


def test_the_wheel_has_the_chart() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    build = build_py(Distribution({"packages": ["deploy"], "package_data": {"deploy": data["deploy"]}}))
    build.finalize_options()
    build.manifest_files = {}
    packed = {Path(name).resolve() for name in build.find_data_files("deploy", str(REPOSITORY / "deploy"))}
    assert {path for path in CHART.rglob("*") if path.is_file()} <= packed


def test_a_remote_model_is_an_address_without_a_volume(tmp_path: Path) -> None:
    text = "model: hf://org/name@v1\nsecurity: {tls-dir: /etc/tls}\nworkers:\n"
    text += "  - {name: a, memory: 1GiB, flags: {cache-dir: /data/weights, cache-size: 1GiB}}\n"
    values = chart_values(read_cluster_spec(write(tmp_path, text)))
    assert values.model is None
    assert ("--model", "hf://org/name@v1") in pairwise(values.coordinator.args)
    (worker,) = values.workers.values()
    assert "--model" not in worker.args and worker.files == ()
    assert ("--cache-dir", "/var/cache/stageline/weights") in pairwise(worker.args)


def test_pods_have_the_directory_of_a_gguf_file_with_all_its_shards(tmp_path: Path) -> None:
    shard = "/models/m/m-00001-of-00003.gguf"
    text = f"model: {shard}\nsecurity: {{tls-dir: /etc/tls}}\nworkers: [{{name: a, memory: 1GiB}}]\n"
    values = chart_values(read_cluster_spec(write(tmp_path, text)))
    assert values.model is not None
    assert values.model.path == "/models/m"
    assert values.model.volume == {"hostPath": {"path": "/models/m", "type": "Directory"}}
    assert ("--model", shard) in pairwise(values.coordinator.args)
