"""Where the time of a stage's step goes, by clocks around its projections and operations."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from stage_worker.model.decoder import DecoderStage
from stage_worker.model.decoder_layer import DecoderLayer

STAGE_PARTS = {"layout": "layout", "logits": "norm and head"}
PARTS = {
    "_qkv": "products",
    "_o": "products",
    "_gate_up": "products",
    "_down": "products",
    "rms_norm": "norms",
    "rotate_and_write": "rotation, writes",
    "decode": "attention",
    "gate": "gate",
}


class _Clocked:
    """Calls through to `target`; adds the time to `spent[part]`."""

    def __init__(self, target: Any, parts: dict[str, str] | str, spent: dict[str, float]) -> None:
        self._target, self._parts, self._spent = target, parts, spent

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        assert isinstance(self._parts, str)
        return self._timed(self._target, self._parts, arguments, named)

    def __getattr__(self, name: str) -> Any:
        part = self._parts if isinstance(self._parts, str) else self._parts[name]
        function = getattr(self._target, name)
        return lambda *arguments: self._timed(function, part, arguments, {})

    def _timed(self, function: Any, part: str, arguments: Any, named: Any) -> Any:
        started = time.thread_time()
        result = function(*arguments, **named)
        self._spent[part] += time.thread_time() - started
        return result


def profiled(stage: DecoderStage, step: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median milliseconds of each part of `step` on `stage`, and of all of it; prompts' attention and what
    Python does between the parts are the rest."""
    spent = dict.fromkeys((*STAGE_PARTS.values(), *PARTS.values()), 0.0)
    layers = stage._loaded().layers
    originals = [dict(vars(layer)) for layer in layers]
    for layer in layers:
        _clock(layer, spent)
    for name, part in STAGE_PARTS.items():
        vars(stage)[name] = _Clocked(getattr(stage, name), part, spent)
    rows = []
    try:
        for _ in range(rounds + 1):
            for part in spent:
                spent[part] = 0.0
            started = time.thread_time()
            step()
            total = time.thread_time() - started
            rows.append({**spent, "rest": total - sum(spent.values()), "step": total})
    finally:
        for layer, original in zip(layers, originals, strict=True):
            vars(layer).update(original)
        for name in STAGE_PARTS:
            del vars(stage)[name]
    return {part: 1e3 * statistics.median(row[part] for row in rows[1:]) for part in rows[0]}


def _clock(layer: DecoderLayer, spent: dict[str, float]) -> None:
    attributes = vars(layer)
    for name in ("_qkv", "_o", "_gate_up", "_down"):
        attributes[name] = _Clocked(attributes[name], PARTS[name], spent)
    attributes["_operations"] = _Clocked(attributes["_operations"], PARTS, spent)
