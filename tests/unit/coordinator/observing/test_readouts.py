"""The labels of what is read off are the states that there are."""

from coordinator.cluster.membership import Members, WorkerState
from coordinator.observing.readouts import request_state, worker_states
from coordinator.planning.plan import WorkerCapacity
from telemetry.metrics import definitions
from tests.unit.coordinator.cluster.cluster_driver import identity_of, plan_of
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


def test_a_lost_worker_that_is_a_member_no_more_is_counted_until_it_is_back() -> None:
    members = Members()
    for name in ("a", "b"):
        members.add(identity_of(name))
    (members["b"].stage,) = plan_of([WorkerCapacity(name="b", memory_bytes=1000)], needed_bytes=1).stages
    members["b"].state = WorkerState.LOST
    assert worker_states(members) == {"spare": 1, "lost": 1}
    members.release_stages()
    assert "b" not in members
    assert worker_states(members) == {"spare": 1, "lost": 1}
    members.add(identity_of("b"))
    assert worker_states(members) == {"spare": 2}
