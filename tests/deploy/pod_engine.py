"""Runs the objects of a chart without Kubernetes: pods, names, rollouts, evictions, certificates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.authority import KeyPair, issue, new_key
from certificates.files import certificate_pem, key_pem
from certificates.identity import parse_identity
from tests.deploy.charts import Objects
from tests.deploy.node import Node
from tests.deploy.pods import Pod
from tests.deploy.volumes import Files, Volumes
from tests.issued import LIFE

ENDPOINT_DELAY_S = 0.5
"""Until nodes no longer send connections to a pod that is deleted."""
MAX_STARTS = 8
"""Of a pod that has never been ready."""
_POLL_S = 0.1
_SERVER_AND_CLIENT = {"server auth", "client auth"}


class PodEngine:
    """A cluster of one node."""

    def __init__(self, node: Node, folder: Path, authority: KeyPair) -> None:
        self._node, self._folder, self._authority = node, folder, authority
        self.trusted: list[KeyPair] = [authority]
        """Authorities in ca.crt of the next certificates."""
        self.secrets: dict[str, Files] = {}
        self.objects = Objects(())
        self._pods: dict[str, tuple[Pod, asyncio.Task[None]]] = {}
        self._templates: dict[str, Any] = {}
        self._numbers = count(1)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PodEngine]:
        """Ends all pods at the end, without a drain."""
        naming = asyncio.create_task(self._keep_names())
        try:
            yield self
        finally:
            naming.cancel()
            for pod, task in self._pods.values():
                pod.deleted_s = time.monotonic()
                if not task.done():
                    pod.kill()
            await asyncio.gather(*(task for _, task in self._pods.values()), naming, return_exceptions=True)

    async def apply(self, objects: Objects, *, timeout_s: float) -> None:
        """Make the cluster what the objects say: new pods at once, changed ones by their rollouts."""
        self.objects = objects
        self.issue_certificates()
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            for workload in objects.of("StatefulSet", "Deployment"):
                group.create_task(self._roll_out(workload))

    def issue_certificates(self) -> None:
        """What cert-manager does: write the Secrets of all Certificates, again if they exist."""
        for item in self.objects.of("Certificate"):
            spec = item["spec"]
            assert set(spec["usages"]) >= _SERVER_AND_CLIENT
            self.secrets[spec["secretName"]] = self.issue(spec["uris"], spec["dnsNames"])

    def refresh_volumes(self) -> None:
        """What the kubelet does within a minute after Secrets have changed."""
        for pod, _ in self._pods.values():
            pod.volumes.refresh()

    def pods(self, **labels: str) -> list[Pod]:
        """Pods that are not deleted, by labels without their prefix, such as component."""
        wanted = {f"app.kubernetes.io/{name}": value for name, value in labels.items()}
        return [pod for pod, _ in self._pods.values() if _has(pod, wanted) and pod.deleted_s is None]

    def pod(self, name: str) -> Pod:
        return self._pods[name][0]

    def endpoints(self, service: str) -> list[str]:
        """Addresses to which nodes send the connections of a service."""
        spec = self.objects.get("Service", service)["spec"]
        return [pod.address for pod in self._members(spec["selector"]) if _is_served(pod, spec)]

    async def evict(self, name: str) -> bool:
        """Delete a pod unless its disruption budget forbids that; False then."""
        pod = self.pod(name)
        for budget in self.objects.of("PodDisruptionBudget"):
            spec = budget["spec"]
            if not _has(pod, spec["selector"]["matchLabels"]):
                continue
            members = self._members(spec["selector"]["matchLabels"])
            num_healthy = sum(member.is_ready and member.deleted_s is None for member in members)
            needed = self._expected(spec["selector"]["matchLabels"]) - spec["maxUnavailable"]
            if pod.is_ready and num_healthy - 1 < needed:
                return False
        await self._delete(name)
        return True

    async def until(self, is_so: Callable[[], bool], *, timeout_s: float) -> None:
        """Raises AssertionError with the logs of all pods."""
        try:
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise AssertionError(self.report()) from None

    def report(self) -> str:
        """Events and logs of all pods."""
        parts = []
        for name, (pod, _) in self._pods.items():
            parts.append(
                f"== {name} ready={pod.is_ready} starts={pod.starts} {pod.events}\n{pod.log()[-3000:]}"
            )
        return "\n".join(parts)

    def _members(self, labels: Mapping[str, str]) -> list[Pod]:
        return [pod for pod, _ in self._pods.values() if _has(pod, labels)]

    def _expected(self, labels: Mapping[str, str]) -> int:
        """Pods that the controllers behind a budget want."""
        return sum(
            self._replicas(workload)
            for workload in self.objects.of("StatefulSet", "Deployment")
            if labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
        )

    def _replicas(self, workload: Mapping[str, Any]) -> int:
        """Of the workload, or the least ones that its autoscaler wants."""
        found = workload["spec"].get("replicas")
        if found is None:
            found = self.objects.get("HorizontalPodAutoscaler", workload["metadata"]["name"])["spec"][
                "minReplicas"
            ]
        return int(found)

    async def _roll_out(self, workload: Mapping[str, Any]) -> None:
        if workload["kind"] == "StatefulSet":
            await self._roll_set(workload)
        else:
            await self._roll_deployment(workload)

    async def _roll_set(self, workload: Mapping[str, Any]) -> None:
        """New pods in parallel; changed ones from the last, each once the one before is ready."""
        names = [f"{workload['metadata']['name']}-{ordinal}" for ordinal in range(self._replicas(workload))]
        template = workload["spec"]["template"]
        fresh = [name for name in names if name not in self._pods]
        for name in fresh:
            self._create(name, workload)
        for name in reversed(names):
            if self._templates[name] != template:
                await self._delete(name)
                self._create(name, workload)
            await self._until_ready(name)

    async def _roll_deployment(self, workload: Mapping[str, Any]) -> None:
        """One new pod more than wanted, then one old pod less, until all are new."""
        base, spec = workload["metadata"]["name"], workload["spec"]
        assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
        old = [
            name
            for name in self._pods
            if name.startswith(f"{base}-") and self._templates[name] != spec["template"]
        ]
        kept = [name for name in self._pods if name.startswith(f"{base}-") and name not in old]
        for _ in range(self._replicas(workload) - len(kept)):
            name = f"{base}-{next(self._numbers):05x}"
            self._create(name, workload)
            if old:
                await self._until_ready(name)
                await self._delete(old.pop())
        for name in [name for name in self._pods if name.startswith(f"{base}-")]:
            await self._until_ready(name)

    def _create(self, name: str, workload: Mapping[str, Any]) -> None:
        template = workload["spec"]["template"]
        folder = self._folder / f"{name}.{next(self._numbers)}"
        claims = [
            {
                "name": claim["metadata"]["name"],
                "persistentVolumeClaim": {"claimName": f"{claim['metadata']['name']}-{name}"},
            }
            for claim in workload["spec"].get("volumeClaimTemplates", ())
        ]
        pod = Pod(
            name=name,
            labels=template["metadata"]["labels"],
            spec={**template["spec"], "volumes": [*template["spec"]["volumes"], *claims]},
            node=self._node,
            volumes=Volumes(folder / "volumes", self._folder / "claims", self.secrets, self._driver(name)),
            folder=folder,
            service_variables=self._service_variables(),
        )
        self._templates[name] = template
        self._pods[name] = pod, asyncio.create_task(pod.run(), name=name)

    async def _delete(self, name: str) -> None:
        pod, task = self._pods[name]
        await pod.delete()
        await task
        del self._pods[name]

    async def _until_ready(self, name: str) -> None:
        while not self.pod(name).is_ready:
            if self._pods[name][1].done():
                self._pods[name][1].result()
            if self.pod(name).starts > MAX_STARTS:
                raise AssertionError(f"{name} does not start:\n{self.pod(name).log()[-3000:]}")
            await asyncio.sleep(_POLL_S)

    def _driver(self, pod: str) -> Callable[[Mapping[str, str]], Files]:
        def files(attributes: Mapping[str, str]) -> Files:
            prefix = "csi.cert-manager.io/"
            text = {
                name.removeprefix(prefix): value.replace("${POD_NAME}", pod)
                for name, value in attributes.items()
            }
            assert set(text["key-usages"].split(",")) >= _SERVER_AND_CLIENT
            return self.issue(text["uri-sans"].split(","), text["dns-names"].split(","))

        return files

    def issue(self, uris: Sequence[str], hosts: Sequence[str]) -> Files:
        """The files of a new certificate."""
        (uri,) = uris
        key = new_key()
        leaf = issue(self._authority, parse_identity(uri), hosts, key.public_key(), life=LIFE)
        return {
            CA_FILE: b"".join(certificate_pem(pair.certificate) for pair in self.trusted),
            CERTIFICATE_FILE: certificate_pem(leaf),
            KEY_FILE: key_pem(key),
        }

    def change_authority(self, authority: KeyPair) -> None:
        """The authority of certificates from here on; `trusted` is not changed."""
        self._authority = authority

    def _service_variables(self) -> dict[str, str]:
        """What the kubelet gives every container of a pod with service links."""
        found = {}
        for service in self.objects.of("Service"):
            name = service["metadata"]["name"].upper().replace("-", "_")
            for port in service["spec"]["ports"]:
                found[f"{name}_SERVICE_HOST"] = "10.96.0.1"
                found[f"{name}_PORT"] = f"tcp://10.96.0.1:{port['port']}"
        return found

    async def _keep_names(self) -> None:
        while True:
            self._node.resolve(self._names())
            await asyncio.sleep(_POLL_S)

    def _names(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for service in self.objects.of("Service"):
            name, spec = service["metadata"]["name"], service["spec"]
            for pod in self._members(spec["selector"]):
                if not pod.address or not _is_served(pod, spec):
                    continue
                if spec.get("clusterIP") == "None":
                    found[f"{pod.name}.{name}"] = pod.address
                else:
                    found[name] = pod.address
        return found


def _has(pod: Pod, labels: Mapping[str, str]) -> bool:
    return labels.items() <= pod.labels.items()


def _is_served(pod: Pod, service: Mapping[str, Any]) -> bool:
    if not pod.address:
        return False
    if pod.deleted_s is not None:
        return time.monotonic() < pod.deleted_s + ENDPOINT_DELAY_S
    return pod.is_ready or bool(service.get("publishNotReadyAddresses"))
