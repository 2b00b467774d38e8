"""From the flags of `stageline bench serve` to a load."""

from collections.abc import Mapping
from typing import Any

from stageline.cli import load_flags
from stageline.load.arrivals import Arrivals
from stageline.load.lengths import parse_lengths
from stageline.load.metrics import Limits
from stageline.load.plan import LoadSpec
from stageline.load.session import LoadConfig


def load_config(coordinator: str, flags: Mapping[str, Any]) -> LoadConfig:
    """The load that the user has described; a flag that is None was not given. Raises ValueError."""
    given = {name: value for name, value in flags.items() if value is not None}
    return LoadConfig(
        coordinator=coordinator,
        spec=_spec(given),
        limits=_limits(given),
        max_concurrency=given.get("max_concurrency"),
        num_warmups=given.get("warmup", 0),
        temperature=given.get("temperature", 0.0),
        timeout_s=given.get("timeout", load_flags.DEFAULT_TIMEOUT_S),
    )


def _spec(given: Mapping[str, Any]) -> LoadSpec:
    if "num_requests" in given and "duration" in given:
        raise ValueError("--num-requests and --duration exclude each other")
    return LoadSpec(
        arrivals=Arrivals(
            rate_per_s=given.get("request_rate", load_flags.DEFAULT_RATE_PER_S),
            burstiness=given.get("burstiness", 1.0),
        ),
        num_requests=(
            None if "duration" in given else given.get("num_requests", load_flags.DEFAULT_NUM_REQUESTS)
        ),
        duration_s=given.get("duration"),
        prompt_lengths=parse_lengths(given.get("prompt_tokens", load_flags.DEFAULT_PROMPT_TOKENS)),
        output_lengths=parse_lengths(given.get("output_tokens", load_flags.DEFAULT_OUTPUT_TOKENS)),
        shared_prefix_tokens=given.get("shared_prefix", 0),
        num_prefix_groups=given.get("prefix_groups", 1),
        seed=given.get("seed", 0),
    )


def _limits(given: Mapping[str, Any]) -> Limits:
    limits_s = {name: given[name] / 1e3 for name in load_flags.LimitFlags.__annotations__ if name in given}
    return Limits(
        ttft_s=limits_s.get("slo_ttft"),
        itl_s=limits_s.get("slo_itl"),
        tpot_s=limits_s.get("slo_tpot"),
        e2e_s=limits_s.get("slo_e2e"),
    )
