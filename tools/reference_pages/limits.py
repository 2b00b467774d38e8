"""docs/reference/limits.md: the fields of `RecoveryPolicy`, `WorkerPolicy` and `LinkPolicy`."""

from tools.reference_pages.markdown import GENERATED, table
from tools.reference_pages.source import fields_of

_LIMITS = f"""\
# Limits of failure handling

Every threshold, limit and wait of failure handling. Names end in their unit: `_s` is seconds, `_tokens`
tokens; the others are counts and ratios.
{GENERATED}
[failures.md](../failures.md) describes the failures they belong to.
"""
_OF_COORDINATOR = """
## Coordinator

`RecoveryPolicy` in `coordinator/recovery/policy.py`:

"""
_OF_WORKER = """

## Worker

`WorkerPolicy` in `stage_worker/policy.py`:

"""


_OF_GATEWAY = """
## Gateway

`LinkPolicy` in `gateway/upstream/link.py`:

"""


def limits() -> str:
    """Every field of all policies."""
    coordinator = _fields("coordinator/recovery/policy.py", "RecoveryPolicy")
    worker = _fields("stage_worker/policy.py", "WorkerPolicy")
    gateway = _fields("gateway/upstream/link.py", "LinkPolicy")
    parts = (_OF_COORDINATOR, coordinator.rstrip(), _OF_WORKER, worker, _OF_GATEWAY, gateway)
    return "".join((_LIMITS, *parts))


def _fields(path: str, policy: str) -> str:
    rows = [(name, default, meaning) for name, _, default, meaning in fields_of(path, policy)]
    return table(("name", "default", "meaning"), rows)
