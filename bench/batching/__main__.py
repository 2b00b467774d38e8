"""Compares batching policies on simulated pipelines and prints tables for bench/STUDIES.md.

    python -m bench.batching                 bursts, arrivals and decode; some minutes
    python -m bench.batching bursts          one of them

The scheduler, its policy and its cost model are the real ones; stages and clock are simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from bench.batching.loads import CPU, GPU, Study, burst, limits_of, pipeline_of, poisson
from bench.batching.policies import DEFAULT, POLICIES
from bench.batching.simulated_pipeline import SimulatedPipeline, Stages, StepTimes

PIPELINES = {
    "CPU, 1 stage": pipeline_of(CPU, [1.0]),
    "CPU, 2 stages": pipeline_of(CPU, [1.0] * 2),
    "CPU, 4 uneven stages": pipeline_of(CPU, [0.6, 1.0, 0.4, 0.8]),
    "CPU, 8 stages": pipeline_of(CPU, [1.0] * 8),
    "CPU, 16 stages": pipeline_of(CPU, [1.0] * 16),
    "GPU, 4 stages": pipeline_of(GPU, [1.0] * 4),
}
BURSTS = (8, 16, 32, 64)
ARRIVALS = {
    ("CPU, 2 stages", 0.0): (0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
    ("CPU, 2 stages", 0.05): (0.5, 0.7, 0.9),
    ("GPU, 4 stages", 0.05): (0.5, 0.7, 0.9),
}
"""Shares of the capacity, per pipeline and share of long prompts."""
NUM_ARRIVALS, NUM_CAPACITY = 500, 200
FIXED_MS = 20.0
FIXED_STAGES = (4, 8, 16)
FIXED_HOPS_MS = (0.2, 0.5, 1.0, 2.0)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")
    print()


def compare_bursts() -> None:
    """All-tokens rate, last first token (both against the best prefill) and longest gap of bursts."""
    for name, stages in PIPELINES.items():
        studies = {policy.name: Study(stages, policy) for policy in POLICIES}
        prefill_s = {size: min(study.prefill_s(size) for study in studies.values()) for size in BURSTS}
        lap_s = {size: studies[DEFAULT.name].decode_lap_s(size) for size in BURSTS}
        rows = []
        for policy, study in studies.items():
            cells = []
            for size in BURSTS:
                served = study.serve(burst(size))
                bound_s = prefill_s[size] + lap_s[size] * (served.requests[0].arrival.max_tokens - 1)
                rate, first = bound_s / served.duration_s, served.last_first_token_s / prefill_s[size]
                cells.append(f"{rate:.2f}, {first:.2f}, {served.itl_s(1.0) * 1e3:.0f}")
            rows.append([policy, *cells])
        table([name, *(f"{size} at once" for size in BURSTS)], rows)


def compare_arrivals() -> None:
    """First tokens, gaps and goodput of random arrivals at shares of the default's capacity."""
    for (name, long_share), shares in ARRIVALS.items():
        usual = Study(PIPELINES[name], DEFAULT)
        capacity_per_s = usual.capacity_per_s(poisson(NUM_CAPACITY, 1e6, long_share=long_share))
        lone_s = usual.lone_ttft_s()
        rows = []
        for policy in POLICIES:
            study, cells = Study(PIPELINES[name], policy), []
            for share in shares:
                served = study.serve(poisson(NUM_ARRIVALS, share * capacity_per_s, long_share=long_share))
                first = f"{served.ttft_s(0.5) * 1e3:.0f} / {served.ttft_s(0.99) * 1e3:.0f}"
                gaps = " / ".join(f"{served.itl_s(quantile) * 1e3:.0f}" for quantile in (0.5, 0.99, 1.0))
                cells.append(f"{first}; {gaps}; {served.goodput(lone_s):.2f}")
            rows.append([policy.name, *cells])
        title = f"{name}, {long_share:.0%} long prompts, capacity {capacity_per_s:.1f}/s"
        table([title, *(f"{share:.0%}" for share in shares)], rows)


def measure_decode() -> None:
    """Steady decode of stages whose steps take a fixed time, against a lap without transfers."""
    rows = []
    for num_stages in FIXED_STAGES:
        cells = []
        for hop_ms in FIXED_HOPS_MS:
            times = StepTimes(base_ms=FIXED_MS)
            stages = Stages(times=times, slowness=(1.0,) * num_stages, hop_ms=hop_ms)
            pipeline = SimulatedPipeline(stages, limits_of(num_stages))
            requests = pipeline.serve(burst(4 * num_stages, max_tokens=200))
            gaps_s = [gap for request in requests for gap in request.gaps_s[100:180]]
            lap_s = sum(gaps_s) / len(gaps_s)
            possible_s = (num_stages * FIXED_MS + (num_stages + 1) * hop_ms) / 1e3
            cells.append(
                f"{num_stages * FIXED_MS / 1e3 / lap_s:.3f} of {num_stages * FIXED_MS / 1e3 / possible_s:.3f}"
            )
        rows.append([f"{num_stages} stages of {FIXED_MS:.0f} ms", *cells])
    table(["tokens/s : no transfers", *(f"{hop_ms} ms a hop" for hop_ms in FIXED_HOPS_MS)], rows)


STUDIES = {"bursts": compare_bursts, "arrivals": compare_arrivals, "decode": measure_decode}


def main() -> None:
    """Run the named studies."""
    parser = argparse.ArgumentParser(prog="python -m bench.batching", description=__doc__)
    parser.add_argument("studies", nargs="*", help="which studies (default: all)")
    names = parser.parse_args().studies or list(STUDIES)
    for name in names:
        STUDIES[name]()


if __name__ == "__main__":
    main()
