"""Schemas of what the chart uses of other projects' objects; other fields are wrong.

Written from the documentation of cert-manager, the Prometheus operator, KEDA and LeaderWorkerSet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT, _NUMBER = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


_SECRET_KEY = _object({"name": _TEXT, "key": _TEXT})
_ENDPOINT = _object(
    {"port": _TEXT, "path": _TEXT, "interval": _TEXT},
    scheme={"enum": ["http", "https"]},
    tlsConfig=_object({"serverName": _TEXT}, ca=_object({"secret": _SECRET_KEY})),
    authorization=_object({"type": {"const": "Bearer"}, "credentials": _SECRET_KEY}),
)
_RULE = _object(
    {"expr": _TEXT}, alert=_TEXT, record=_TEXT, labels=_LABELS, annotations=_LABELS, **{"for": _TEXT}
)
_POD = {"type": "object", "required": ["metadata", "spec"]}
"""Checked as the template of a Pod, with the schema of Kubernetes."""

SPECS: Mapping[tuple[str, str], dict[str, Any]] = {
    ("cert-manager.io/v1", "Certificate"): _object(
        {
            "secretName": _TEXT,
            "issuerRef": _object(
                {"name": _TEXT, "kind": {"enum": ["Issuer", "ClusterIssuer"]}, "group": _TEXT}
            ),
            "duration": {"type": "string", "pattern": r"^\d+[hms]$"},
            "privateKey": _object(
                {
                    "algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]},
                    "size": {"enum": [256, 384, 521]},
                    "encoding": {"enum": ["PKCS1", "PKCS8"]},
                    "rotationPolicy": {"enum": ["Never", "Always"]},
                }
            ),
            "usages": {
                "type": "array",
                "items": {"enum": ["digital signature", "key encipherment", "server auth", "client auth"]},
            },
            "uris": _TEXTS,
            "dnsNames": _TEXTS,
        }
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _object(
        {
            "selector": _object({"matchLabels": _LABELS}),
            "endpoints": {"type": "array", "items": _ENDPOINT, "minItems": 1},
        }
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(
        {
            "groups": {
                "type": "array",
                "items": _object(
                    {"name": _TEXT, "rules": {"type": "array", "items": _RULE, "minItems": 1}}, interval=_TEXT
                ),
            }
        }
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _object(
        {
            "scaleTargetRef": _object({"name": _TEXT}),
            "minReplicaCount": _NUMBER,
            "maxReplicaCount": _NUMBER,
            "triggers": {
                "type": "array",
                "minItems": 1,
                "items": _object(
                    {"type": {"enum": ["cpu", "prometheus"]}, "metadata": _LABELS},
                    metricType={"enum": ["Utilization", "AverageValue"]},
                ),
            },
        }
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _object(
        {
            "replicas": _NUMBER,
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "leaderWorkerTemplate": _object(
                {
                    "size": _NUMBER,
                    "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart"]},
                    "leaderTemplate": _POD,
                    "workerTemplate": _POD,
                }
            ),
        }
    ),
}
"""Schemas of `spec`, by API version and kind."""
