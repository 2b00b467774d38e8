"""Environment variables: one that nothing reads is an error, as an unknown key of a file is."""

from collections.abc import Iterable
from difflib import get_close_matches

from wire.flags import variables_of

_PREFIX = "STAGELINE_"
_OF_TESTS = "STAGELINE_TEST_"
"""Reserved for tests and tools of the project."""
_OF_CLIENTS = frozenset(("STAGELINE_COORDINATOR", "STAGELINE_GATEWAY", "STAGELINE_TLS_DIR"))


def unknown_variable(names: Iterable[str]) -> str | None:
    """Return a text about the first variable of Stageline's that no command reads; None if there is none."""
    doubtful = sorted(name for name in names if name.startswith(_PREFIX) and not name.startswith(_OF_TESTS))
    if set(doubtful) <= _OF_CLIENTS:
        return None
    known = _OF_CLIENTS | _of_processes()
    unknown = next((name for name in doubtful if name not in known), None)
    if unknown is None:
        return None
    # The prefix, which all have, would make any two alike.
    nearest = get_close_matches(
        unknown.removeprefix(_PREFIX), [name.removeprefix(_PREFIX) for name in known], n=1
    )
    hint = f", the nearest known one is {_PREFIX}{nearest[0]}" if nearest else ""
    return f"no command reads the environment variable {unknown}{hint}"


def _of_processes() -> frozenset[str]:
    """Variables of all flags of coordinators, workers and gateways, which may share an environment."""
    from coordinator.config import CoordinatorConfig  # loaded only where such variables are set
    from gateway.config import GatewayConfig
    from stage_worker.config import WorkerConfig

    configs: tuple[type, ...] = (CoordinatorConfig, WorkerConfig, GatewayConfig)
    return frozenset(name for config in configs for name in variables_of(config))
