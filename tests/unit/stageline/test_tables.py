import pytest
from rich.console import Console, RenderableType

from stageline.cli.tables import describe_cluster, describe_start, status_view, topology_view
from stageline_rpc.v1 import cluster_pb2


def _worker(stage: int, role: cluster_pb2.StageRole, layers: tuple[int, int]) -> cluster_pb2.WorkerStatus:
    return cluster_pb2.WorkerStatus(
        name=f"worker-{stage}",
        address="10.0.0.7:40001",
        device="cuda:0",
        state=cluster_pb2.WORKER_STATE_READY,
        stage=stage,
        role=role,
        layer_begin=layers[0],
        layer_end=layers[1],
        memory_bytes=20 * 2**30,
        weights=cluster_pb2.WEIGHTS_CHECK_SAMPLED if stage else cluster_pb2.WEIGHTS_CHECK_FULL,
        weight_bytes=12 * 2**30,
        kv_bytes=640 * 2**20,
        resident_bytes=13 * 2**30,
        kv=cluster_pb2.KvUsage(
            blocks_active=1, blocks_inactive=1, blocks_free=6, blocks_wanted=40, blocks_hit=10
        ),
    )


STATUS = cluster_pb2.GetStatusResponse(
    model="llama",
    dtype=cluster_pb2.DTYPE_BF16,
    state=cluster_pb2.CLUSTER_STATE_SERVING,
    epoch=3,
    num_stages=2,
    num_blocks=8,
    block_size=16,
    workers=[
        cluster_pb2.WorkerStatus(
            name="spare", device="cpu", state=cluster_pb2.WORKER_STATE_SPARE, detail="out of work"
        ),
        _worker(1, cluster_pb2.STAGE_ROLE_LAST, (19, 20)),
        _worker(0, cluster_pb2.STAGE_ROLE_FIRST, (0, 19)),
    ],
    self_check=cluster_pb2.SelfCheckStatus(detail="passed: by a hair"),
    requests=cluster_pb2.RequestCounts(
        waiting=1,
        prefill=2,
        decode=3,
        finished=4,
        cancelled=5,
        failed=6,
        preemptions=7,
        prompt_tokens=200,
        cached_tokens=50,
    ),
)


def _render(view: RenderableType, *, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


def test_the_memory_of_each_gpu_has_a_line() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    memory = cluster_pb2.DeviceMemory(
        allocated_bytes=13 * 2**30, reserved_bytes=14 * 2**30, free_bytes=2**30, peak_bytes=13 * 2**30
    )
    status.workers[2].device_memory.CopyFrom(memory)
    assert [line for line in _render(status_view(status), width=200) if line.startswith("GPU memory")] == [
        "GPU memory: worker-0 13.0 GiB in tensors (at most 13.0 GiB), 14.0 GiB reserved, 1.0 GiB free; "
        "0 B pinned on the host"
    ]


def test_a_stage_with_cuda_graphs_has_a_line() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    status.workers[2].cuda_graphs.CopyFrom(
        cluster_pb2.CudaGraphs(
            num_replayed=970,
            eager=[
                cluster_pb2.EagerSteps(reason=cluster_pb2.EAGER_REASON_FIRST, num_steps=20),
                cluster_pb2.EagerSteps(reason=cluster_pb2.EAGER_REASON_NO_SIZE, num_steps=10),
            ],
            sizes=[
                cluster_pb2.GraphSize(num_tokens=1, num_graphs=1),
                cluster_pb2.GraphSize(num_tokens=8, num_graphs=3),
                cluster_pb2.GraphSize(num_tokens=64, has_prompts=True, num_graphs=1),
            ],
            num_failed=1,
            pool_bytes=96 << 20,
        )
    )
    status.workers[1].cuda_graphs.CopyFrom(cluster_pb2.CudaGraphs())
    assert [line for line in _render(status_view(status), width=200) if line.startswith("CUDA")] == [
        "CUDA graphs: worker-0 970 steps replayed, 30 eager (20 first, 10 no size); 5 graphs, 1 failed for "
        "decodes of 1, 8 and prompts of 64 tokens, 96.0 MiB",
        "CUDA graphs: worker-1 0 steps replayed, 0 eager; 0 graphs, 0 B",
    ]


def test_the_topology_has_a_row_for_each_stage_in_order() -> None:
    rows = [line.split() for line in _render(topology_view(STATUS)) if "worker" in line]
    assert rows == [
        ["0", "FIRST", "worker-0", "0", "to", "18", "(19)", "cuda:0", "12.0", "GiB", "640.0", "MiB"],
        ["1", "LAST", "worker-1", "19", "(1)", "cuda:0", "12.0", "GiB", "640.0", "MiB"],
    ]


def test_the_status_fits_into_110_columns_with_one_line_for_each_worker() -> None:
    lines = _render(status_view(STATUS), width=110)
    assert lines[:2] == ["llama in bf16, 2 stages, epoch 3", "serving"]
    rows = [line.split() for line in lines if "GiB" in line]
    assert rows[0] == [
        "0",
        "FIRST",
        "worker-0",
        "0",
        "to",
        "18",
        "(19)",
        "cuda:0",
        "ready",
        "12.6",
        "GiB",
        "of",
        "20.0",
        "GiB",
        "12.5%",
        "13.0",
        "GiB",
        "10.0.0.7:40001",
    ]
    assert len(rows) == 2
    assert ["-", "spare", "-", "cpu", "spare", "-", "-", "-", "-"] in [line.split() for line in lines]
    assert "KV cache: 128 tokens on each stage (8 blocks of 16)" in lines
    blocks = "1 blocks active, 1 inactive, 6 free, 10 of 40 hits (25.0%)"
    assert [line for line in lines if "blocks active" in line] == [f"Stage 0: {blocks}", f"Stage 1: {blocks}"]
    assert "Prompts: 50 of 200 tokens from the cache (25.0%), 7 preemptions" in lines
    assert "Requests: 1 waiting, 2 in prefill, 3 in decode, 0 steps in flight, 0 detached" in lines
    assert "Ended: 4 finished, 5 cancelled, 6 failed, 0 kept" in lines
    assert "Self-check passed: by a hair" in lines
    assert "Weights compared: stage 0 full, stage 1 sampled" in lines
    assert lines[-1] == "spare: out of work"


def test_the_status_shows_block_sharing_and_integrity() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    status.kv.integrity = cluster_pb2.KV_INTEGRITY_VERDICT_NOT_CHECKED
    assert "Prefix cache off, KV accounting not checked" in _render(status_view(status))
    status.kv.prefix_cache = True
    status.kv.integrity = cluster_pb2.KV_INTEGRITY_VERDICT_CONSISTENT
    assert "Prefix cache on, KV accounting consistent" in _render(status_view(status))
    status.kv.integrity = cluster_pb2.KV_INTEGRITY_VERDICT_INCONSISTENT
    status.kv.detail = "w0: 7 free + 2 active"
    line = "Prefix cache on, KV accounting inconsistent: w0: 7 free + 2 active"
    assert line in _render(status_view(status))


def test_the_status_names_the_cause_of_the_last_end_of_an_epoch() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    assert "Last epoch" not in "\n".join(_render(status_view(status)))
    status.end_cause = cluster_pb2.EPOCH_END_CAUSE_NO_PROGRESS
    assert "Last epoch ended by: no progress" in _render(status_view(status))


def test_the_status_describes_each_gpu() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    assert "GPUs" not in "\n".join(_render(status_view(status)))
    first = next(worker for worker in status.workers if worker.name == "worker-0")
    first.gpu.model, first.gpu.compute_capability = "NVIDIA H100 80GB HBM3", "9.0"
    first.gpu.memory_bytes, first.gpu.driver = 80 * 2**30, "580.95.05"
    line = "GPUs: worker-0 NVIDIA H100 80GB HBM3 (compute capability 9.0, 80.0 GiB, driver 580.95.05)"
    assert line in _render(status_view(status), width=110)


def test_the_status_shows_the_lag_of_the_coordinators_event_loop() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    assert "loop lag" not in "\n".join(_render(status_view(status)))
    status.loop_lag.p50.FromMicroseconds(90)
    status.loop_lag.p99.FromMicroseconds(1230)
    assert "Coordinator: loop lag p50 0.1 ms, p99 1.2 ms" in _render(status_view(status))


def test_the_status_shows_a_hop_whose_payload_connection_does_not_work() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    assert "over gRPC" not in "\n".join(_render(status_view(status)))
    reason = "the payload connection to 10.0.0.8:7482 could not be opened: timed out"
    next(worker for worker in status.workers if worker.name == "worker-0").payload_fallback = reason
    lines = _render(status_view(status), width=160)
    assert f"Stage 0: large hidden states travel over gRPC: {reason}" in lines


def test_the_status_shows_how_hidden_states_travel_on_each_hop() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    assert "Hidden states" not in "\n".join(_render(status_view(status)))
    first = next(worker for worker in status.workers if worker.HasField("stage") and worker.stage == 0)
    for number, name in (
        (cluster_pb2.HOP_TRANSPORT_GRPC, "grpc"),
        (cluster_pb2.HOP_TRANSPORT_TCP, "tcp"),
        (cluster_pb2.HOP_TRANSPORT_SHARED_MEMORY, "shared-memory"),
        (cluster_pb2.HOP_TRANSPORT_PINNED_MEMORY, "pinned-memory"),
        (cluster_pb2.HOP_TRANSPORT_CUDA_IPC, "cuda-ipc"),
    ):
        first.hop_transport = number
        assert f"Hidden states: stage 0 to 1 {name}" in _render(status_view(status))


@pytest.mark.parametrize(
    ("transport", "consequence"),
    [
        (cluster_pb2.HOP_TRANSPORT_TCP, "hidden states do not travel in shared memory"),
        (cluster_pb2.HOP_TRANSPORT_GRPC, "hidden states do not travel in shared memory"),
        (cluster_pb2.HOP_TRANSPORT_SHARED_MEMORY, "hidden states are copied once more"),
        (cluster_pb2.HOP_TRANSPORT_PINNED_MEMORY, "hidden states are copied once more"),
        (cluster_pb2.HOP_TRANSPORT_UNSPECIFIED, "hidden states are copied once more"),
    ],
)
def test_the_status_shows_why_hidden_states_do_not_travel_faster(
    transport: cluster_pb2.HopTransport.ValueType, consequence: str
) -> None:
    """Also of the last stage, which only receives."""
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    first = next(worker for worker in status.workers if worker.HasField("stage") and worker.stage == 0)
    first.hop_transport, first.same_host_fallback = transport, "the reason"
    assert f"Stage 0: {consequence}: the reason" in _render(status_view(status), width=160)


def test_the_status_shows_a_wire_dtype_that_differs() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    for number, name in ((cluster_pb2.DTYPE_F8_E4M3, "fp8"), (cluster_pb2.DTYPE_I8, "int8")):
        status.wire_dtype = number
        assert f"llama in bf16 (between stages in {name}), 2 stages" in _render(status_view(status))[0]


def test_the_reason_of_a_failed_worker_is_shown_once() -> None:
    reason = "layers 0-3 need 2.0 GiB"
    out = cluster_pb2.WORKER_STATE_QUARANTINED
    failed = cluster_pb2.WorkerStatus(name="a", state=out, detail=reason)
    status = cluster_pb2.GetStatusResponse(
        state=cluster_pb2.CLUSTER_STATE_BLOCKED, detail=f"a failed: {reason}", workers=[failed]
    )
    assert "\n".join(_render(status_view(status), width=110)).count(reason) == 1


def test_the_start_shows_the_loading_progress_of_workers() -> None:
    status = cluster_pb2.GetStatusResponse(
        state=cluster_pb2.CLUSTER_STATE_LOADING,
        workers=[
            cluster_pb2.WorkerStatus(
                name="a",
                state=cluster_pb2.WORKER_STATE_LOADING,
                load_progress=0.25,
            )
        ],
    )
    assert describe_start(status) == "loading, a 25%"


def test_the_status_shows_missing_stages_and_the_retry_hint() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    del status.workers[1]
    assert describe_cluster(status).startswith("llama in bf16, 1 of 2 stages, epoch 3\nserving")
    status.health = cluster_pb2.HEALTH_DEGRADED
    status.state, status.detail = cluster_pb2.CLUSTER_STATE_LOADING, "worker b is lost"
    assert describe_cluster(status).endswith("\ndegraded, loading: worker b is lost")
    status.health = cluster_pb2.HEALTH_SERVING
    assert describe_cluster(status).endswith("\nloading: worker b is lost")


def test_a_fetch_shows_bytes_rate_and_time_left() -> None:
    status = cluster_pb2.GetStatusResponse()
    status.CopyFrom(STATUS)
    for worker, rate in zip(status.workers[1:], (64 * 2**20, 0), strict=True):
        worker.state = cluster_pb2.WORKER_STATE_LOADING
        worker.fetch.done_bytes, worker.fetch.total_bytes = 2**30, 3 * 2**30
        worker.fetch.bytes_per_second = rate
    lines = _render(status_view(status), width=200)
    assert "Worker worker-1 fetches 1.0 GiB of 3.0 GiB, 64.0 MiB/s, 32 s left" in lines
    assert "Worker worker-0 fetches 1.0 GiB of 3.0 GiB, no bytes at present" in lines
    assert "worker-1 fetches 1.0 GiB of 3.0 GiB, 64.0 MiB/s, 32 s left" in describe_start(status)
