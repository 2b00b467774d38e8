"""A trace in the format of `telemetry.trace_view.facts.trace_facts`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

KINDS = ("hop", "receive", "wait", "compute", "send")
STAGES = (
    {"stage": 0, "worker": "worker-0", "role": "FIRST", "layer_begin": 0, "layer_end": 9},
    {"stage": 1, "worker": "worker-1", "role": "MIDDLE", "layer_begin": 9, "layer_end": 18},
    {"stage": 2, "worker": "worker-2", "role": "LAST", "layer_begin": 18, "layer_end": 26},
)
PREFILL_S = ((0.0006, 0.0002, 0.004, 0.031, 0.0004), (0.0008, 0.0003, 0.001, 0.032, 0.0004))
SLOW_PREFILL_S = (0.0009, 0.0003, 0.044, 0.066, 0.0003)
DECODE_S = ((0.06, 0.01, 0.05, 0.82, 0.02), (0.07, 0.01, 0.04, 0.83, 0.02), (0.07, 0.01, 0.92, 1.63, 0.02))


def traced_request(request_id: str) -> dict[str, Any]:
    """Two prompt chunks and 57 decode steps through three stages, the last of them slow."""
    return {
        "request_id": request_id,
        "trace_id": "5b8efff798038103d269b633813fc60c",
        "started_at": "2026-11-21T13:44:12.400Z",
        "duration": "5.160s",
        "end_s": 5.16,
        "outcome": "finished",
        "error": "",
        "explanation": (
            "5.16 s: 35 % computing on stage 2 (worker-2, layers 18-25), which takes 2.0 x as long as the "
            "median stage; 34 % computing on other stages; 19 % waiting at stage 2 behind other steps; "
            "4 % in the queue."
        ),
        "prompt_tokens": 180,
        "completion_tokens": 58,
        "time_in_queue": "0.214s",
        "time_to_first_token": "0.502s",
        "attributes": {},
        "shares": [],
        "slowest_stage": {**STAGES[2], "compute_time": "1.760s", "ratio_to_median": 2.0},
        "stages": [_total(stage) for stage in range(3)],
        "rows": [*_coordinator_rows(), *({**STAGES[stage], **_stage_row(stage)} for stage in range(3))],
    }


def _segment(kind: str, start_s: float, end_s: float, *, steps: int = 1, tokens: int = 0) -> dict[str, Any]:
    return {
        "kind": kind,
        "start_s": start_s,
        "end_s": end_s,
        "choice": 0,
        "steps": steps,
        "tokens": tokens,
        "is_share": steps > 1,
        "span_id": "00f067aa0ba902b7",
    }


def _coordinator_rows() -> Iterator[dict[str, Any]]:
    yield {"title": "intake", "segments": [_segment("intake", 0.0, 0.004)]}
    yield {"title": "queue", "segments": [_segment("queue", 0.004, 0.218)]}
    chunks = [_segment("prefill", 0.218, 0.402, tokens=128), _segment("prefill", 0.252, 0.502, tokens=52)]
    yield {"title": "prefill", "segments": chunks}
    yield {"title": "decode", "segments": [_segment("decode", 0.502, 5.16, steps=57, tokens=57)]}


def _stage_row(stage: int) -> dict[str, Any]:
    segments = []
    for chunk in range(2):
        times = SLOW_PREFILL_S if stage == 2 else PREFILL_S[stage]
        segments += _one_after_another(0.218 + 0.035 * (stage + chunk * (1 + stage)), times)
    first, rest = (
        [share_s * 0.27 for share_s in DECODE_S[stage]],
        [share_s * 0.73 for share_s in DECODE_S[stage]],
    )
    segments += _one_after_another(0.502 + 0.03 * stage, first, steps=16)
    segments += _one_after_another(1.8 + 0.03 * stage, rest, steps=41)
    return {"title": f"stage {stage}", "segments": segments}


def _one_after_another(start_s: float, times_s: Any, *, steps: int = 1) -> Iterator[dict[str, Any]]:
    for kind, time_s in zip(KINDS, times_s, strict=True):
        yield _segment(kind, start_s, start_s + time_s, steps=steps, tokens=steps)
        start_s += time_s


def _total(stage: int) -> dict[str, Any]:
    prefill = SLOW_PREFILL_S if stage == 2 else PREFILL_S[stage]
    totals = [2 * chunk + decode for chunk, decode in zip(prefill, DECODE_S[stage], strict=True)]
    names = [f"{kind}_s" for kind in KINDS]
    return {
        **STAGES[stage],
        "steps": 59,
        "tokens": 237,
        "mean_batch_size": 3.4,
        **dict(zip(names, totals, strict=True)),
    }
