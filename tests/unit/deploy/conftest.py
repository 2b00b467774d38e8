from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import LocalClusterConfig
from tests.fake_processes import FAKE_COMMAND, FAKE_ENVIRONMENT


@pytest.fixture
def fake_cluster(tmp_path: Path) -> Callable[..., LocalClusterConfig]:
    """Config factory for a cluster of fake processes; arguments are FAKE_* variables."""

    def make(**variables: str) -> LocalClusterConfig:
        return LocalClusterConfig(
            num_workers=2,
            command=FAKE_COMMAND,
            environment={**FAKE_ENVIRONMENT, **variables},
            log_directory=tmp_path / "logs",
        )

    return make
