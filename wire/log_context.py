"""Structured log fields: `log.info("...", extra=log_context(epoch=3))`."""

from collections.abc import Iterable

from wire.ids import RequestId, id_text

FIELDS = (
    "request_id",
    "request_ids",
    "epoch",
    "step",
    "stage",
    "worker",
    "duration_s",
    "trace_id",
    "span_id",
)
"""Field names in output order. None of them is an attribute of `logging.LogRecord`."""


def log_context(
    *,
    request_id: RequestId | None = None,
    request_ids: Iterable[RequestId] = (),
    epoch: int | None = None,
    step: int | None = None,
    stage: int | None = None,
    worker: str | None = None,
    duration_s: float | None = None,
    trace_id: str | None = None,
    span_id: str | None = None,
) -> dict[str, object]:
    """Return the given fields for `extra`; ids are formatted as in `stageline trace`.

    `request_ids` is for events that concern all requests of a step. `trace_id` has 32 hexadecimal digits,
    `span_id` 16.
    """
    known: dict[str, object] = {
        "request_id": None if request_id is None else id_text(request_id),
        "request_ids": [id_text(member) for member in request_ids] or None,
        "epoch": epoch,
        "step": step,
        "stage": stage,
        "worker": worker,
        "duration_s": None if duration_s is None else round(duration_s, 3),
        "trace_id": trace_id,
        "span_id": span_id,
    }
    return {name: value for name, value in known.items() if value is not None}
