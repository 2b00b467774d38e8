"""All that is known of a run, as JSON. Times are in seconds."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stageline.load.metrics import Limits, Summary
from stageline.load.record import LoadRun, RequestRecord
from stageline.load.session import LoadConfig
from stageline.load.timeline import timeline
from stageline.version import VERSION
from stageline_rpc.v1 import inference_pb2

_DIGITS = 6  # microseconds


def json_report(
    config: LoadConfig,
    model: inference_pb2.GetModelResponse,
    run: LoadRun,
    summary: Summary,
    *,
    started_at: str,
) -> str:
    """Configuration, model, numbers, the course over time, and a record of each request that came due."""
    facts = {
        "stageline": VERSION,
        "started_at": started_at,
        "is_interrupted": run.is_interrupted,
        "configuration": asdict(config),
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "vocab_size": model.vocab_size,
            "max_sequence_tokens": model.max_sequence_tokens,
        },
        "percentiles": "linear",
        "summary": asdict(summary),
        "timeline": asdict(timeline(run)),
        "requests": [_record_facts(record, config.limits) for record in run.records],
    }
    lines = (
        f"{json.dumps(name)}: {json.dumps(_plain(fact), allow_nan=False)}" for name, fact in facts.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _record_facts(record: RequestRecord, limits: Limits) -> dict[str, object]:
    planned = asdict(record.planned)
    seen = asdict(record)
    del seen["planned"]
    return {
        "index": planned.pop("index"),
        "due_s": planned.pop("time_s"),
        **planned,
        **seen,
        "is_good": limits.are_met(record),
    }


def _plain(value: Any) -> Any:
    """What JSON can carry: an infinite rate becomes "inf", and times lose what a clock cannot tell."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else str(value)
    return value
