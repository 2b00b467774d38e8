"""Cluster files for tests."""

from pathlib import Path

from deploy.commands import commands
from deploy.spec.cluster_spec import ClusterSpec

LEAST = """\
model: /models/m
workers:
  - {name: gpu-a, device: cuda:0, memory: 20GiB}
  - {name: gpu-b, device: cuda:0, memory: 20GiB}
"""
HOSTS = """\
name: stories
model: /models/m
stages: 2
dtype: bf16
drain-timeout: 120
coordinator:
  host: head
  journal: /var/lib/stories/journal
  flags: {max-step-tokens: 1024, prefix-cache: false}
gateways:
  - {name: api, host: head}
workers:
  - name: gpu-a
    host: gpu-a
    device: cuda:0
    memory: 20GiB
    listen: 0.0.0.0:7481
    resources: {cpus: 8, memory: 64GiB, gpus: 1}
  - {name: spare, host: gpu-b, model: "/home/models/it's $5", flags: {threads: 64}}
  - {name: gpu-b, host: gpu-b, device: cuda:0, memory: 20GiB}
security:
  tls-dir: /etc/stageline/tls
  keys-file: /etc/stageline/keys/keys.toml
  token-file: /etc/stageline/operator.token
timeouts: {lease: 5}
environment: {GREETING: "a $b 100%"}
telemetry: {otlp-endpoint: "http://otel:4317", log-format: json}
"""
JOB = """\
model: /models/m
coordinator: {journal: /scratch/stageline/journal, http: off}
gateways: [{name: api, listen: "0.0.0.0:7482"}]
security: {insecure: true}
environment: {GREETING: "a $b 100%"}
engine: {program: /opt/stage line/bin/stageline, partition: gpu, time: "12:00:00"}
workers:
  - {name: gpu-a, device: cuda:0, memory: 20GiB, resources: {cpus: 8, gpus: 1, memory: 64GiB}}
  - {name: gpu-b, device: cuda:0, memory: 20GiB, resources: {cpus: 8, gpus: 1, memory: 64GiB}}
"""
EVERY_KEY = """\
name: every
model: MODEL
stages: 1
dtype: f32
quantize: int8
drain-timeout: 7
coordinator:
  name: head
  host: head.example
  listen: 0.0.0.0:7000
  http: 0.0.0.0:7001
  journal: DIR/journal
  resources: {cpus: 1}
  flags: {max-step-tokens: 64}
gateways:
  - name: api
    host: api.example
    listen: 0.0.0.0:7002
    dashboard-url: https://head.example/
    resources: {memory: 1GiB}
    flags: {strict-fields: true}
workers:
  - name: gpu-a
    device: cuda:1
    memory: 20GiB
    host: gpu-a.example
    listen: 0.0.0.0:7003
    advertise: gpu-a.example:7004
    model: MODEL
    resources: {gpus: 1}
    flags: {kernels: plain}
  - {name: spare}
security:
  tls-dir: DIR/tls
  insecure: true
  deny-list: DIR/denied
  keys-file: DIR/keys.toml
  token-file: DIR/token
  enroll-listen: 0.0.0.0:7005
  ca-dir: DIR/ca
  tokens-file: DIR/tokens.json
  join-token-file: DIR/join.token
timeouts: {heartbeat: 0.25, lease: 5, recovery: 9}
environment: {GREETING: hello}
telemetry: {otlp-endpoint: "http://otel:4317", trace-sample: 0.5, log-format: json, log-level: debug}
engine: {program: /bin/stageline, user: me, image: "stageline:1", partition: p, account: a, time: "9:00"}
"""


def write(directory: Path, text: str) -> Path:
    """Write a cluster file."""
    file = directory / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def lines_of(spec: ClusterSpec) -> dict[str, str]:
    """The command line of each process by its name."""
    return {command.name: " ".join(command.argv) for command in commands(spec)}
