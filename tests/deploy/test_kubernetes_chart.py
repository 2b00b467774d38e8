"""The chart as Helm and the schemas of Kubernetes see it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from certificates.identity import Role, parse_identity
from tests.deploy.charts import CAPABILITIES, CHART, ENVIRONMENT, Objects, helm, program, rendered
from tests.deploy.crd_schemas import SPECS

pytestmark = pytest.mark.deploy

VERSIONS = ("1.33", "1.34", "1.35", "1.36", "1.37")
ISSUER = "--set=certificates.issuer.name=stageline-ca"
PROMETHEUS = "--set=gateways.gateway.autoscaling.prometheus=http://prometheus:9090"
PEERS = (
    "networkPolicy",
    {
        "users": [{"namespaceSelector": {"matchLabels": {"users": "yes"}}}],
        "dashboard": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "gateway": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    },
)
PLACED = (
    "workers.gpu",
    {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
    },
)
SCRAPED = (
    "monitoring",
    {
        "authority": {"secret": "ca", "key": "ca.crt"},
        "apiKey": {"secret": "viewer", "key": "key"},
    },
)


def _set(path: str, value: object) -> str:
    return f"--set-json={path}={json.dumps(value)}"


VARIANTS: Mapping[str, tuple[str, ...]] = {
    "secrets": (),
    "cert-manager": (ISSUER,),
    "csi": (ISSUER, "--set=certificates.provider=csi"),
    "plain": (
        "--set=certificates.provider=none,gateways.gateway.autoscaling.enabled=false",
        "--set=networkPolicy.enabled=false,model=null",
    ),
    "everything": (ISSUER, PROMETHEUS, _set(*PEERS), _set(*PLACED), _set(*SCRAPED)),
    "pipelines": (ISSUER, "--set=certificates.provider=csi,leaderWorkerSet.enabled=true"),
    "pipelines without certificates": ("--set=certificates.provider=none,leaderWorkerSet.enabled=true",),
}


def _objects(variant: str) -> Objects:
    return rendered(CHART, *VARIANTS[variant], capabilities=CAPABILITIES)


def _validate(objects: list[Any], version: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    command = [str(ENVIRONMENT / "bin" / "kubernetes-validate"), "--strict", "-k", version, str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def _checked(objects: Objects) -> list[Any]:
    """Objects of Kubernetes itself, and the pods of other objects."""
    found = [item for item in objects.all if (item["apiVersion"], item["kind"]) not in SPECS]
    for item in objects.of("LeaderWorkerSet"):
        template = item["spec"]["leaderWorkerTemplate"]
        for name in ("leaderTemplate", "workerTemplate"):
            metadata = {"name": name.lower(), **template[name]["metadata"]}
            found.append(
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template[name]["spec"]}
            )
    return found


@pytest.mark.parametrize("variant", ["secrets", "plain"])
def test_helm_lints_the_chart(variant: str) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, *VARIANTS[variant])


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_have_the_fields_of_kubernetes_alone(version: str, tmp_path: Path) -> None:
    program("helm")
    objects = [item for variant in VARIANTS for item in _checked(_objects(variant))]
    assert len(objects) > 50
    found = _validate(objects, version, tmp_path)
    assert (found.returncode, "WARN" in found.stderr + found.stdout) == (0, False), (
        found.stdout + found.stderr
    )


def test_an_unknown_field_is_found(tmp_path: Path) -> None:
    (service, *_) = _objects("secrets").of("Service")
    service["spec"]["publishNotReadyAddress"] = True
    found = _validate([service], VERSIONS[0], tmp_path)
    assert found.returncode != 0
    assert "publishNotReadyAddress" in found.stdout + found.stderr


def test_objects_of_other_projects_fit_their_schemas() -> None:
    program("helm")
    objects = [item for variant in VARIANTS for item in _objects(variant).all]
    kinds = {(item["apiVersion"], item["kind"]) for item in objects}
    assert SPECS.keys() <= kinds
    script = (
        "import json, jsonschema, sys\n"
        "for schema, value in json.load(sys.stdin): jsonschema.validate(value, schema)"
    )
    pairs = [
        (SPECS[kind], item["spec"])
        for item in objects
        if (kind := (item["apiVersion"], item["kind"])) in SPECS
    ]
    assert _python(script, pairs).returncode == 0, _python(script, pairs).stderr
    pairs[0][1]["dnsName"] = []
    assert "'dnsName' was unexpected" in _python(script, pairs).stderr


def _python(script: str, value: object) -> subprocess.CompletedProcess[str]:
    command = [str(ENVIRONMENT / "bin" / "python"), "-c", script]
    return subprocess.run(command, input=json.dumps(value), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--set=drainTimeut=5",), "additional properties 'drainTimeut' not allowed"),
        (("--set=probes.startupSeconds=soon",), "got string, want integer"),
        (("--set=certificates.provider=vault",), "value must be one of"),
        (("--set=certificates.provider=csi",), "certificates.provider csi needs certificates.issuer.name"),
        (("--set=leaderWorkerSet.enabled=true",), "its pods have names that no Secret was made for"),
    ],
)
def test_wrong_values_are_refused(words: tuple[str, ...], problem: str) -> None:
    program("helm")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        rendered(CHART, *words, capabilities=CAPABILITIES)
    assert problem in refused.value.stderr


def test_missing_operators_are_named() -> None:
    for words, problem in (((ISSUER,), "needs cert-manager"), ((PROMETHEUS,), "needs KEDA")):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            rendered(CHART, *words)
        assert problem in refused.value.stderr
    assert not list(rendered(CHART).of("ServiceMonitor"))


def test_certificates_are_those_of_the_processes() -> None:
    objects = _objects("cert-manager")
    found = {item["spec"]["secretName"]: item["spec"] for item in objects.of("Certificate")}
    pods = [f"stories-gpu-{ordinal}" for ordinal in range(3)]
    assert found.keys() == {f"{name}-tls" for name in ("stories-coordinator", "stories-gateway", *pods)}
    for name in pods:
        spec = found[f"{name}-tls"]
        (identity,) = map(parse_identity, spec["uris"])
        assert (identity.role, identity.name, identity.cluster) == (Role.WORKER, name, "stories")
        assert f"{name}.stories-workers" in spec["dnsNames"]
    (volume,) = [
        volume
        for volume in objects.get("StatefulSet", "stories-gpu")["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "tls"
    ]
    assert {source["secret"]["name"] for source in volume["projected"]["sources"]} <= found.keys()


def test_workers_have_time_to_load_and_to_drain() -> None:
    pod = _objects("secrets").get("StatefulSet", "stories-gpu")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120 + 30
    (container,) = pod["containers"]
    startup = container["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 30 * 60
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_every_pod_is_confined() -> None:
    for item in _objects("secrets").of("StatefulSet", "Deployment"):
        pod = item["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        for volume in pod["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_network_policies_admit_the_callers_of_the_table() -> None:
    """Of a process's own methods; health checks and reflection are open to everyone."""
    policies = {
        item["metadata"]["name"]: item["spec"]["ingress"]
        for item in _objects("everything").of("NetworkPolicy")
    }
    label = "app.kubernetes.io/component"

    def pods(name: str) -> set[str]:
        return {
            peer["podSelector"]["matchLabels"][label]
            for peer in policies[name][0]["from"]
            if "podSelector" in peer
        }

    assert pods("stories-worker") == {"coordinator", "worker"}
    assert pods("stories-coordinator") == {"gateway", "worker"}
    assert PEERS[1]["users"][0] in policies["stories-coordinator"][0]["from"]
    assert PEERS[1]["users"][0] not in policies["stories-worker"][0]["from"]
