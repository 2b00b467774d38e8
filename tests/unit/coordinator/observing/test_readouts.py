"""The labels of what is read off are the states that there are."""

from coordinator.cluster.membership import WorkerState
from coordinator.observing.readouts import request_state
from telemetry.metrics import definitions
from tests.unit.coordinator.observing.watched_engine import WatchedEngine


def test_every_state_of_a_worker_has_its_label() -> None:
    assert tuple(each.name.lower() for each in WorkerState) == definitions.WORKER_STATE.values


def test_a_request_is_as_far_as_the_choice_that_is_least_far() -> None:
    watched = WatchedEngine()
    request = watched.submit(num_prompt_tokens=14, max_tokens=30, num_choices=2)
    seen = [request_state(request)]
    watched.start_epoch()
    while seen[-1] != "decode":
        seen.append(request_state(request))
        watched.answer(after_s=0.1)
    assert list(dict.fromkeys(seen)) == ["queued", "prefill", "decode"]
    watched.stop_epoch()
    assert request_state(request) == "queued"
