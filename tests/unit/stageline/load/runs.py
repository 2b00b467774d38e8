"""Synthetic load runs for tests of results and reports."""

from stageline.load.plan import PlannedRequest
from stageline.load.results import OK, LoadRun, MeasuredRequest


def planned(index: int, *, due_s: float = 0.0, prompt: int = 10, output: int = 3) -> PlannedRequest:
    return PlannedRequest(
        index=index, time_s=due_s, prompt_tokens=prompt, output_tokens=output, prefix_group=0
    )


def record(
    index: int,
    *messages: tuple[float, int],
    due_s: float = 0.0,
    sent_s: float | None = None,
    status: str = OK,
) -> MeasuredRequest:
    """One request with messages at the given times and token counts; it ends with the last one."""
    return MeasuredRequest(
        planned=planned(index, due_s=due_s, output=sum(count for _, count in messages)),
        sent_s=due_s if sent_s is None else sent_s,
        ended_s=messages[-1][0] if messages else sent_s,
        message_times_s=[time_s for time_s, _ in messages],
        message_tokens=[count for _, count in messages],
        status=status,
    )


def run_of(*records: MeasuredRequest, duration_s: float, num_planned: int | None = None) -> LoadRun:
    return LoadRun(
        records=records,
        num_planned=len(records) if num_planned is None else num_planned,
        duration_s=duration_s,
        cpu_s=0.1 * duration_s,
    )
