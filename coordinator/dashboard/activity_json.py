"""`/api/activity`: what the page draws. Times are microseconds of the coordinator's monotonic clock."""

import json
from collections.abc import Mapping
from typing import Any

from coordinator.observing.activity import PipelineLoad, Snapshot, pipeline_load, steps_after
from coordinator.observing.per_second import PastSecond, Quantiles, Rates
from coordinator.observing.request_history import RequestActivity
from coordinator.observing.step_history import AnsweredStep, SentStep
from wire.ids import id_text


def activity_json(snapshot: Snapshot, *, after_step: int, since_us: int) -> bytes:
    """Steps answered after number `after_step`, and seconds from `since_us` on. Some milliseconds at most."""
    load = pipeline_load(snapshot)
    return to_json(
        {
            "now_us": _us(snapshot.now_s),
            "now_unix_s": snapshot.now_unix_s,
            "uptime_s": snapshot.now_s - snapshot.began_s,
            **_load(load, snapshot.workers),
            "rates": _rates(snapshot.rates),
            "num_answered": snapshot.num_answered,
            "steps": [_step(each) for each in steps_after(snapshot.steps, after_step)],
            "in_flight": [_in_flight(each) for each in snapshot.in_flight],
            "seconds": [_second(each) for each in snapshot.seconds if each.start_s * 1_000_000 >= since_us],
            "requests": [request_fields(each) for each in (*snapshot.live, *snapshot.ended)],
            "epochs": [
                {
                    "epoch": each.epoch,
                    "started_us": _us(each.started_s),
                    "stopped_us": _maybe_us(each.stopped_s),
                    "reason": each.reason,
                }
                for each in snapshot.epochs
            ],
        }
    )


def to_json(value: Mapping[str, Any]) -> bytes:
    """Without spaces; what is no number in JSON (NaN, infinity) is a ValueError."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def request_fields(request: RequestActivity) -> dict[str, Any]:
    """One row of the table of requests."""
    return {
        "id": id_text(request.request_id),
        "phase": request.phase.value,
        "is_live": request.phase.is_live,
        "choices": request.num_choices,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "generated_tokens": request.num_generated_tokens,
        "max_tokens": request.max_tokens,
        "restarts": request.num_restarts,
        "accepted_us": _us(request.arrived_s),
        "started_us": _maybe_us(request.started_s),
        "first_token_us": _maybe_us(request.first_token_s),
        "ended_us": _maybe_us(request.ended_s),
        "error": request.error,
    }


def _us(time_s: float) -> int:
    return round(time_s * 1e6)


def _maybe_us(time_s: float | None) -> int | None:
    return None if time_s is None else round(time_s * 1e6)


def _load(load: PipelineLoad, workers: tuple[str, ...]) -> dict[str, Any]:
    return {
        "over_s": load.over_s,
        "summary": load.summary,
        "slowest": load.slowest,
        "bubble_share": load.bubble_share,
        "stages": [
            {
                "worker": workers[stage] if stage < len(workers) else "",
                "num_steps": each.num_steps,
                "busy_share": each.busy_share,
                "compute_s": each.compute_s,
                "wait_s": each.wait_s,
                "hop_s": each.hop_s,
            }
            for stage, each in enumerate(load.stages)
        ],
    }


def _step(step: AnsweredStep) -> dict[str, Any]:
    """`computed`: for each stage, begin and end of its computation, relative to `sent_us`."""
    sent = step.sent
    return {
        **_in_flight(sent),
        "n": step.number,
        "answered_us": _us(step.answered_s),
        "computed": [_us(time_s - sent.sent_s) for interval in step.computed() for time_s in interval],
    }


def _in_flight(step: SentStep) -> dict[str, Any]:
    return {
        "epoch": step.epoch,
        "id": step.step_id,
        "kind": step.kind.value,
        "decodes": step.num_decodes,
        "chunks": step.num_chunks,
        "chunk_tokens": step.num_chunk_tokens,
        "sent_us": _us(step.sent_s),
    }


def _quantiles(quantiles: Quantiles) -> dict[str, float | None]:
    return {
        "count": quantiles.count,
        "p50_s": quantiles.p50_s,
        "p95_s": quantiles.p95_s,
        "p99_s": quantiles.p99_s,
    }


def _rates(rates: Rates) -> dict[str, Any]:
    return {
        "over_s": rates.over_s,
        "generated_tokens": rates.generated_tokens,
        "prefill_tokens": rates.prefill_tokens,
        "steps": rates.steps,
        "accepted": rates.accepted,
        "finished": rates.finished,
        "unfinished": rates.unfinished,
        "first_token": _quantiles(rates.first_token),
        "inter_token": _quantiles(rates.inter_token),
    }


def _second(second: PastSecond) -> dict[str, Any]:
    return {
        "start_us": second.start_s * 1_000_000,
        "generated_tokens": second.num_generated_tokens,
        "prefill_tokens": second.num_prefill_tokens,
        "finished": second.num_finished,
        "unfinished": second.num_unfinished,
        "first_token": [second.first_token.p50_s, second.first_token.p95_s],
        "inter_token": [second.inter_token.p50_s, second.inter_token.p95_s],
    }
