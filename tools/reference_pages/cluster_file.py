"""docs/reference/cluster-file.md: the keys of a cluster file, by section."""

from deploy.spec.cluster_spec import (
    ClusterSpec,
    CoordinatorSpec,
    EngineSpec,
    GatewaySpec,
    Resources,
    SecuritySpec,
    TelemetrySpec,
    TimeoutsSpec,
    WorkerSpec,
)
from deploy.spec.fields import keys_of
from tools.reference_pages.markdown import GENERATED, table

_SECTIONS: tuple[tuple[str, type], ...] = (
    ("The file", ClusterSpec),
    ("coordinator", CoordinatorSpec),
    ("gateways", GatewaySpec),
    ("workers", WorkerSpec),
    ("resources", Resources),
    ("security", SecuritySpec),
    ("timeouts", TimeoutsSpec),
    ("telemetry", TelemetrySpec),
    ("engine", EngineSpec),
)
_HEAD = f"""\
# Keys of a cluster file

[deploy/README.md](../deploy/README.md) has examples. Only `workers`, and the `name` of each, must be
given. Paths are absolute, and on the host of the process; addresses are HOST:PORT; sizes have a unit, as in
20GiB.
{GENERATED}
"""


def cluster_file() -> str:
    """A table per section."""
    sections = (
        f"\n## {title}\n\n"
        + table(("key", "meaning"), [(f"`{key.name}`", key.help) for _, key in keys_of(section).values()])
        for title, section in _SECTIONS
    )
    return _HEAD + "\n".join(sections)
