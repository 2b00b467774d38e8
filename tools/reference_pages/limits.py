"""docs/reference/limits.md: the fields of `RecoveryPolicy`."""

from tools.reference_pages.markdown import GENERATED, table
from tools.reference_pages.source import fields_of

_LIMITS = f"""\
# Limits of failure handling

Every threshold, limit and wait of failure handling: `RecoveryPolicy` in `coordinator/recovery/policy.py`.
Names end in their unit: `_s` is seconds, `_tokens` tokens; the others are counts and ratios.
{GENERATED}
[failures.md](../failures.md) describes the failures they belong to.

"""


def limits() -> str:
    """Every field of `RecoveryPolicy`."""
    policy = fields_of("coordinator/recovery/policy.py", "RecoveryPolicy")
    rows = [(name, default, meaning) for name, _, default, meaning in policy]
    return _LIMITS + table(("name", "default", "meaning"), rows)
