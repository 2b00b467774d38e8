"""Shared by recovery tests: clusters, sixteen requests and final checks."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deploy import LocalClusterConfig
from stageline import Client, StepFailed, Unavailable
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.e2e.clusters import MEMORY_BYTES, VOCAB_SIZE, is_serving
from tests.e2e.commands import ENVIRONMENT
from tests.families import make_family
from tests.faults.cluster import FaultyCluster
from tests.faults.streams import Ask, Streams, mixed_asks
from wire.transport import is_loopback

NUM_STREAMS = 16
STEADY_RANGE = 0.16
DEADLINE_S = 60.0
"""Limit of every wait; only a defect takes this long."""

TYPED_ERRORS = (Unavailable, StepFailed)
"""Errors that a client may receive when its request cannot continue; retrying is safe."""

_STEP_FLAGS = ("--block-size", "16", "--max-step-tokens", "64", "--kv-tokens", "16384")

SHORT_PROMPTS = mixed_asks(NUM_STREAMS, lengths=(1, 70), max_tokens=60, vocab_size=VOCAB_SIZE, seed=41)
LONG_PROMPTS = mixed_asks(NUM_STREAMS, lengths=(200, 420), max_tokens=20, vocab_size=VOCAB_SIZE, seed=43)


def make_steady_model(directory: Path) -> Path:
    """Eight float32 layers. Rounding depends on the batch and moves log-probabilities by at most 1e-5 here;
    with weights twice as wide by 5e-5, which changed one sampled token in some thousands.
    """
    return make_checkpoint(
        directory,
        "llama",
        num_layers=8,
        seed=3,
        initializer_range=STEADY_RANGE,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )


def make_recurrent_model(directory: Path) -> Path:
    """Five float32 layers, four of them Gated DeltaNet, as steady as `make_steady_model`: chunks of other
    lengths and restored states gave the same 1,440 tokens.
    """
    return make_family(
        directory, "qwen3_5_text", initializer_range=STEADY_RANGE, max_position_embeddings=1024
    )


def recurrent_config(
    directory: Path, num_workers: int, *, num_stages: int, logs: Path, listen: str = "127.0.0.1:0"
) -> LocalClusterConfig:
    """Real stages with few recurrent states, so that states of requests take the places of saved ones."""
    flags = ("--max-step-sequences", "2")
    return config(directory, num_workers, num_stages=num_stages, logs=logs, flags=flags, listen=listen)


def config(
    directory: Path,
    num_workers: int,
    *,
    num_stages: int,
    logs: Path,
    flags: tuple[str, ...] = (),
    listen: str = "127.0.0.1:0",
) -> LocalClusterConfig:
    """Real stages in float32, one compute thread each; the remaining workers are spares."""
    return LocalClusterConfig(
        num_workers=num_workers,
        num_stages=num_stages,
        model=directory,
        memory_bytes=MEMORY_BYTES,
        num_threads=1,
        pins_workers=False,
        listen=listen,
        coordinator_arguments=(*_STEP_FLAGS, *_beyond_loopback(listen), *flags),
        worker_arguments=(_beyond_loopback(listen),) * num_workers,
        environment=ENVIRONMENT,
        log_directory=logs,
    )


def _beyond_loopback(listen: str) -> tuple[str, ...]:
    return () if is_loopback(listen) else ("--insecure",)


def mock_config(
    num_workers: int, *, num_stages: int, logs: Path, times: str = "step=2ms", listen: str = "127.0.0.1:0"
) -> LocalClusterConfig:
    """Mock stages: quick to start, with known tokens."""
    return LocalClusterConfig(
        num_workers=num_workers,
        num_stages=num_stages,
        mocks=(times,),
        listen=listen,
        coordinator_arguments=(
            "--mock-model",
            f"layers={max(8, num_workers)},vocab={VOCAB_SIZE}",
            *_STEP_FLAGS,
            *_beyond_loopback(listen),
        ),
        worker_arguments=(_beyond_loopback(listen),) * num_workers,
        environment=ENVIRONMENT,
        log_directory=logs,
    )


async def ends_undisturbed(cluster: FaultyCluster, streams: Streams, expected: list[list[int]]) -> None:
    """Assert that every stream ends with exactly these tokens, and then no page is in use."""
    await streams.end(timeout_s=DEADLINE_S)
    _no_problems(streams.problems(expected))
    await cluster.until(is_idle)


async def ends_correctly_or_with_a_typed_error(
    cluster: FaultyCluster, streams: Streams, expected: list[list[int]]
) -> None:
    """Assert no wrong token, no stuck stream and no page in use."""
    await streams.end(timeout_s=DEADLINE_S)
    _no_problems(streams.problems(expected, errors=TYPED_ERRORS))
    await cluster.until(is_idle)


async def serves_normally(client: Client, cases: list[Ask], expected: list[list[int]], *, salt: str) -> None:
    """Assert that the next requests are served normally."""
    streams = Streams(client, cases, cache_salt=f"afterwards {salt}")
    await streams.end(timeout_s=DEADLINE_S)
    _no_problems(streams.problems(expected))


def is_idle(status: cluster_pb2.GetStatusResponse) -> bool:
    """Whether no request is live and no stage of the plan holds a page or a recurrent state for one. A spare
    may still show those of the last epoch in which it had a stage.
    """
    live = status.requests.waiting + status.requests.prefill + status.requests.decode
    usages = [worker.kv for worker in status.workers if worker.HasField("stage")]
    active = [kv.blocks_active + kv.states_live for kv in usages]
    return is_serving(status) and live == 0 and status.requests.steps_in_flight == 0 and not any(active)


def now_s() -> float:
    """Clock of `Streams`."""
    return asyncio.get_running_loop().time()


def _no_problems(problems: list[str]) -> None:
    assert not problems, "\n".join(problems)
