"""What may not be left after a run of chaos."""

from __future__ import annotations

import pytest

from stageline_rpc.v1 import cluster_pb2
from tests.e2e.recovery_setup import is_idle


@pytest.mark.parametrize("left", [{}, {"blocks_active": 1}, {"states_live": 1}])
def test_a_cluster_is_idle_without_pages_and_states_of_sequences(left: dict[str, int]) -> None:
    status = cluster_pb2.GetStatusResponse(state=cluster_pb2.CLUSTER_STATE_SERVING)
    status.workers.add(stage=0, kv=cluster_pb2.KvUsage(states_saved=3, blocks_inactive=2, **left))
    assert is_idle(status) == (not left)
