"""Clusters of mock stages: simulated compute, everything else real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.harness.cluster import BenchCluster
from builtin_model import MODEL_DIRECTORY
from deploy import LocalClusterConfig

VOCAB_SIZE = 32000
HIDDEN_SIZE = 1024
MAX_TOKENS = 16384


def mock_cluster(
    specs: Sequence[str],
    *,
    coordinator_arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hidden_size: int = HIDDEN_SIZE,
    shares_memory: bool = False,
) -> BenchCluster:
    """A cluster, not started, with one mock stage per spec (`step=20ms,token=0.05ms`), without text.

    Hidden states travel as between hosts, unless it `shares_memory`.
    """
    model = f"layers={len(specs)},hidden={hidden_size},vocab={VOCAB_SIZE},max_len={MAX_TOKENS}"
    config = LocalClusterConfig(
        num_workers=len(specs),
        mocks=tuple(specs),
        worker_arguments=(("--same-host", "auto" if shares_memory else "off"),) * len(specs),
        coordinator_arguments=("--mock-model", model, *coordinator_arguments),
        environment=environment or {},
    )
    return BenchCluster(config, vocab_size=VOCAB_SIZE)


STORY = "once upon a time there was a small bird and it sang in the rain"
TEXT_VOCAB_SIZE = 1536


def text_cluster(
    num_stages: int, spec: str, *, coordinator_arguments: Sequence[str] = (), probes_loop: bool = False
) -> BenchCluster:
    """A cluster, not started, of mock stages of the built-in model: prompts and outputs are texts."""
    config = LocalClusterConfig(
        num_workers=num_stages,
        mocks=(spec,),
        model=MODEL_DIRECTORY,
        coordinator_arguments=tuple(coordinator_arguments),
    )
    return BenchCluster(config, vocab_size=TEXT_VOCAB_SIZE, words=STORY.split(), probes_loop=probes_loop)
