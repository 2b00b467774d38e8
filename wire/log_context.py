"""Structured fields of a log line: `log.info("...", extra=log_context(epoch=3))`."""

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
"""In the order in which they are written. None is a name of `logging.LogRecord` itself."""


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
    """Those that are known, for `extra`. Ids become text as it is used everywhere, also in `stageline trace`.

    `request_ids` is for what concerns all requests of a step. `trace_id` and `span_id` have 32 and 16
    hexadecimal digits.
    """
    known: dict[str, object] = {
        "request_id": None if request_id is None else id_text(request_id),
        "request_ids": [id_text(each) for each in request_ids] or None,
        "epoch": epoch,
        "step": step,
        "stage": stage,
        "worker": worker,
        "duration_s": None if duration_s is None else round(duration_s, 3),
        "trace_id": trace_id,
        "span_id": span_id,
    }
    return {name: value for name, value in known.items() if value is not None}
