"""Traces as Chrome trace JSON and as plain data."""

import itertools
import json
import math
from collections import defaultdict
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from telemetry.spans import Attr
from telemetry.trace_view.explain import explain
from telemetry.trace_view.facts import summary, trace_facts
from telemetry.trace_view.perfetto import perfetto
from telemetry.trace_view.read_model import RequestTrace
from tests.otlp_spans import BEGIN_NS, REQUEST_ID, SpanMaker, Times, served


@pytest.fixture
def trace() -> RequestTrace:
    maker = served((0.2, 0.4, 0.2))
    maker.chunk(0.11, [Times(0.02), Times(0.04), Times(0.02)])
    return maker.trace()


def test_every_process_and_thread_has_a_name(trace: RequestTrace) -> None:
    events = json.loads(json.dumps(perfetto(trace)))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in _named(events, "process_name")}
    assert list(processes.values()) == ["coordinator", "worker-0", "worker-1", "worker-2"]
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in _named(events, "thread_name")}
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in spans} == threads.keys()
    assert {"request", "queue", "prefill", "decode", "stage 1, layers 4-7"} == set(threads.values()) - {
        "stage 0, layers 0-3",
        "stage 2, layers 8-11",
    }
    assert {event["ph"] for event in events} == {"X", "M"}


def test_times_are_microseconds_and_threads_do_not_overlap(trace: RequestTrace) -> None:
    events = perfetto(trace)["traceEvents"]
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            by_thread[event["pid"], event["tid"]].append(event)
    for of_thread in by_thread.values():
        for before, after in itertools.pairwise(of_thread):
            assert round((before["ts"] + before["dur"]) * 1000) <= round(after["ts"] * 1000)
    (queue,) = (event for event in events if event["name"] == "queue")
    assert (queue["ts"], queue["dur"]) == (0.0, 100_000.0)


def test_a_hop_that_seems_to_begin_before_the_request_has_no_negative_time() -> None:
    maker = SpanMaker()
    maker.chunk(-0.002, [Times(0.1, hop=0.01)])
    maker.root(1.0)
    events = perfetto(maker.trace())["traceEvents"]
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0.0
    (root,) = (event for event in events if event.get("cat") == "request")
    assert root["ts"] == pytest.approx(2000.0)


def test_facts_are_json_and_add_up(trace: RequestTrace) -> None:
    facts = json.loads(json.dumps(trace_facts(trace)))
    assert facts["request_id"] == REQUEST_ID
    assert facts["explanation"] == explain(trace)
    began = Timestamp()
    began.FromJsonString(facts["started_at"])
    assert began.ToNanoseconds() == BEGIN_NS
    assert sum(share["share"] for share in facts["shares"]) == pytest.approx(1.0)
    assert (facts["slowest_stage"]["stage"], facts["slowest_stage"]["worker"]) == (1, "worker-1")
    assert [stage["worker"] for stage in facts["stages"]] == ["worker-0", "worker-1", "worker-2"]
    rows = {row["title"]: row for row in facts["rows"]}
    of_stage = [segment for segment in rows["stage 1"]["segments"] if segment["kind"] == "compute"]
    seconds = sum(segment["end_s"] - segment["start_s"] for segment in of_stage)
    assert seconds == pytest.approx(facts["stages"][1]["compute_s"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_without_a_json_number_are_omitted(value: float) -> None:
    maker = SpanMaker()
    maker.root(1.0, {Attr.TIME_IN_QUEUE: value, Attr.PROMPT_TOKENS: value, "else": value, "is": 1.5})
    facts = json.loads(json.dumps(trace_facts(maker.trace()), allow_nan=False))
    assert (facts["time_in_queue"], facts["prompt_tokens"]) == (None, 0)
    assert facts["attributes"].get("else") is None
    assert facts["attributes"]["is"] == 1.5
    json.dumps(perfetto(maker.trace()), allow_nan=False)


def test_a_summary_equals_the_root_span() -> None:
    line = summary(served((0.2, 0.4, 0.2)).trace())
    assert (line.request_id, line.outcome, line.started_ns) == (REQUEST_ID, "finished", BEGIN_NS)
    assert (line.num_prompt_tokens, line.num_completion_tokens) == (100, 50)
    assert (line.time_in_queue_s, line.time_to_first_token_s) == (0.25, 0.5)
    assert line.slowest is not None
    assert line.slowest.place.worker == "worker-1"
    assert line.num_spans == 10


def _named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


def test_the_gateway_is_a_process_before_the_coordinators_rows() -> None:
    maker = served((0.2, 0.4))
    maker.gateway(-0.5, 3.0, {Attr.BODY_DURATION: 0.1})
    trace = maker.trace()
    events = perfetto(trace)["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in _named(events, "process_name")}
    assert list(processes.values()) == ["coordinator", "gateway", "worker-0", "worker-1"]
    of_gateway = [event for event in events if event["ph"] == "X" and processes[event["pid"]] == "gateway"]
    assert [event["name"] for event in of_gateway] == ["body", "response"]
    (request,) = (event for event in events if event.get("cat") == "request")
    assert (request["ts"], request["dur"]) == (500_000.0, trace.root.duration_s * 1e6)
    facts = trace_facts(trace)
    assert facts["gateway"][Attr.BODY_DURATION] == 0.1
    assert (facts["spans"], facts["end_s"]) == (len(maker.spans), pytest.approx(3.5))
    assert summary(trace).started_ns == BEGIN_NS - 500_000_000
