"""Places for streams whose epoch has not started on the stage, and what heartbeats tell of it."""

from contextlib import ExitStack

import pytest

from stage_worker.backends.contract import EagerReason, GraphCounts, GraphSize
from stage_worker.stage_manager import MAX_PER_HOST, MAX_WAITING, EarlyStreams, _encode_graphs
from stageline_rpc.v1 import cluster_pb2
from wire.errors import Overloaded
from wire.peer_secrets import MAX_TRIES, RefusedPeers


def test_a_host_at_its_limit_leaves_places_to_others(caplog: pytest.LogCaptureFixture) -> None:
    early = EarlyStreams(RefusedPeers(lambda: 0.0))
    with ExitStack() as stack:
        for _ in range(MAX_PER_HOST):
            stack.enter_context(early.waiting("10.0.0.9"))
        for _ in range(2 * MAX_TRIES):
            with pytest.raises(Overloaded) as caught, early.waiting("10.0.0.9"):
                pass
        with early.waiting("10.0.0.1"):
            pass
    problem = "4 streams of this host wait for epochs that have not begun on this stage, the limit is 4"
    assert str(caught.value) == f"{problem}: retry when the epoch has begun"
    assert len(caplog.messages) == MAX_TRIES
    assert caplog.messages[0] == f"refused a stream: {problem}, host=10.0.0.9 tries=1"
    with early.waiting("10.0.0.9"):
        pass


def test_all_hosts_together_have_a_limit_and_places_are_free_again() -> None:
    early = EarlyStreams(RefusedPeers(lambda: 0.0))
    with ExitStack() as stack:
        for number in range(MAX_WAITING):
            stack.enter_context(early.waiting(f"10.0.0.{number}"))
        with pytest.raises(Overloaded, match=r"^16 streams wait .*, the limit is 16"), early.waiting("::1"):
            pass
    with early.waiting("::1"):
        pass
    assert not early._num_waiting


def test_the_heartbeat_has_graphs_and_the_reasons_of_eager_steps() -> None:
    counts = GraphCounts(
        num_replayed=7,
        eager=dict.fromkeys(EagerReason, 0) | {EagerReason.NO_SIZE: 3, EagerReason.LIMIT: 1},
        sizes=(GraphSize(num_tokens=64, has_prompts=True, num_graphs=2),),
        num_failed=1,
        pool_bytes=5000,
    )
    assert _encode_graphs(counts) == cluster_pb2.CudaGraphs(
        num_replayed=7,
        eager=[
            cluster_pb2.EagerSteps(reason=cluster_pb2.EAGER_REASON_NO_SIZE, num_steps=3),
            cluster_pb2.EagerSteps(reason=cluster_pb2.EAGER_REASON_LIMIT, num_steps=1),
        ],
        sizes=[cluster_pb2.GraphSize(num_tokens=64, has_prompts=True, num_graphs=2)],
        num_failed=1,
        pool_bytes=5000,
    )
