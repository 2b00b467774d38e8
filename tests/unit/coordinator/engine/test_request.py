"""A request is live, kept or unknown, and its id is in use until it is removed."""

from __future__ import annotations

import pytest

from coordinator.engine import request as request_module
from coordinator.engine.output_stream import OutputStream, Positions
from coordinator.engine.request import MAX_KEPT, Request, RequestRegistry
from coordinator.scheduler.sequence import SequenceState
from tests.unit.coordinator.engine.request_cases import RequestCase
from wire.errors import InvariantBroken, RequestCancelled, RequestExists, RequestNotFound
from wire.ids import RequestId, id_text, new_request_id


def end(registry: RequestRegistry, request: Request, *, now_s: float = 0.0) -> None:
    for sequence in request.live_sequences:
        sequence.end(SequenceState.CANCELLED)
    request.end(now_s, RequestCancelled("over"))
    registry.end(request)


def test_a_live_request_is_found_and_its_id_is_taken() -> None:
    registry, request = RequestRegistry(), RequestCase().request()
    with pytest.raises(RequestNotFound, match=f"request {id_text(request.id)} not found"):
        registry.find(request.id)
    registry.add(request)
    assert registry.find(request.id) is registry.live_request(request.id) is request
    for _ in range(2):
        with pytest.raises(RequestExists, match=f"request {id_text(request.id)} is already live"):
            registry.add(RequestCase().request(request_id=request.id))
    assert registry.live == [request]


def test_ended_requests_are_removed_unless_kept() -> None:
    registry, gone, kept = RequestRegistry(), RequestCase().request(), RequestCase(keep_s=5.0).request()
    for request in (gone, kept):
        registry.add(request)
        end(registry, request)
    assert (registry.live, registry.num_kept) == ([], 1)
    assert registry.find(kept.id) is kept
    assert registry.live_request(kept.id) is None
    registry.check_new(gone.id)
    with pytest.raises(RequestExists, match="has ended and its output is kept"):
        registry.check_new(kept.id)
    registry.forget(kept.id)
    registry.check_new(kept.id)
    with pytest.raises(RequestNotFound):
        registry.find(kept.id)


def test_live_requests_are_in_the_order_of_their_acceptance_and_counted_by_client() -> None:
    registry = RequestRegistry()
    requests = [RequestCase(client=client).request() for client in "abab"]
    for request in requests:
        registry.add(request)
    end(registry, requests[1])
    assert registry.live == [requests[0], *requests[2:]]
    assert [registry.num_live_of(client) for client in "abc"] == [2, 1, 0]
    for request in registry.live:
        end(registry, request)
    assert [registry.num_live_of(client) for client in "abc"] == [0, 0, 0]
    assert not registry._num_live_of, "clients that have left are forgotten"


@pytest.mark.parametrize(("ended_s", "detached_s", "expires_s"), [(100.0, 0.0, 105.0), (100.0, 103.0, 108.0)])
def test_kept_requests_expire_after_their_end_and_last_reader(
    ended_s: float, detached_s: float, expires_s: float
) -> None:
    registry, request = RequestRegistry(), RequestCase(keep_s=5.0).request()
    registry.add(request)
    request.detached_s = detached_s
    end(registry, request, now_s=ended_s)
    assert request.expires_s == expires_s
    for now_s, num_kept in ((expires_s - 0.001, 1), (expires_s, 0)):
        registry.expire(now_s)
        assert registry.num_kept == num_kept


def test_a_request_with_a_reader_does_not_expire() -> None:
    registry, request = RequestRegistry(), RequestCase(keep_s=5.0).request()
    registry.add(request)
    end(registry, request)
    request.stream = OutputStream(request, Positions())
    assert request.expires_s is None
    registry.expire(1e9)
    assert registry.num_kept == 1


def test_the_number_of_kept_requests_is_bounded_evicting_the_oldest() -> None:
    registry = RequestRegistry()
    requests = [RequestCase(keep_s=5.0).request() for _ in range(MAX_KEPT + 2)]
    for request in requests:
        registry.add(request)
        end(registry, request)
    assert registry.num_kept == MAX_KEPT
    for request in requests[:2]:
        with pytest.raises(RequestNotFound):
            registry.find(request.id)
    assert registry.find(requests[2].id) is requests[2]


def test_a_request_ends_once_and_not_before_its_choices() -> None:
    request = RequestCase(n=2).request()
    with pytest.raises(InvariantBroken, match="request ended before its last sequence"):
        request.end(0.0)
    for sequence in request.live_sequences:
        sequence.end(SequenceState.FAILED)
    request.end(0.0)
    with pytest.raises(InvariantBroken, match="request already ended"):
        request.end(0.0)


def test_the_choices_of_a_request_are_complete_and_its_own() -> None:
    one, two = RequestCase(n=2).request(), RequestCase(n=2).request()
    for choices in ((one.choices[1],), (one.choices[0], two.choices[1]), one.choices[::-1]):
        with pytest.raises(InvariantBroken):
            Request(one.id, choices, client="client")


def test_the_state_of_kept_requests_is_bounded_evicting_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "MAX_KEPT_STATE_BYTES", 100)
    registry = RequestRegistry()
    requests = [RequestCase(keep_s=5.0).request() for _ in range(4)]
    for request, size_bytes in zip(requests, (50, 0, 40, 60), strict=True):
        request.client_state = bytes(size_bytes)
        registry.add(request)
        end(registry, request)
    assert [registry.has(request.id) for request in requests] == [False, True, True, True]
    registry.forget(requests[3].id)
    last = RequestCase(keep_s=5.0).request()
    last.client_state = bytes(60)
    registry.add(last)
    end(registry, last)
    assert registry.num_kept == 3, "what was forgotten does not count"


def test_kept_requests_of_a_client_survive_the_flood_of_another_one() -> None:
    registry = RequestRegistry()
    kept = [RequestCase(keep_s=5.0, client="quiet").request() for _ in range(3)]
    flood = [RequestCase(keep_s=5.0, client="flood").request() for _ in range(MAX_KEPT + 76)]
    for request in (*kept, *flood):
        registry.add(request)
        end(registry, request)
    assert registry.num_kept == MAX_KEPT
    assert all(registry.has(request.id) for request in kept)
    assert not registry.has(flood[0].id)
    assert registry.has(flood[-1].id)


def test_state_of_kept_requests_makes_room_at_the_client_with_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_module, "MAX_KEPT_STATE_BYTES", 100)
    registry = RequestRegistry()
    requests = [RequestCase(keep_s=5.0, client=client).request() for client in ("quiet", "flood", "flood")]
    for request in requests:
        request.client_state = bytes(40)
        registry.add(request)
        end(registry, request)
    assert [registry.has(request.id) for request in requests] == [True, False, True]


def test_the_error_of_a_request_is_a_new_exception_for_each_reader() -> None:
    registry, request = RequestRegistry(), RequestCase(keep_s=5.0).request()
    registry.add(request)
    end(registry, request)
    for _ in range(2):
        with pytest.raises(RequestCancelled, match="over"):
            raise request.error or AssertionError
    assert request.error is not None
    assert request.error.__traceback__ is None


def named(name: RequestId, tenant: str, *, keep_s: float | None = None) -> Request:
    request = RequestCase(keep_s=keep_s, client=tenant).request()
    request.name, request.tenant = name, tenant
    return request


def test_names_of_requests_are_those_of_a_tenant() -> None:
    registry, name = RequestRegistry(), new_request_id()
    mine, other = named(name, "ann"), named(name, "bob", keep_s=5.0)
    for request in (mine, other):
        registry.check_new(name, request.tenant)
        registry.add(request)
        assert registry.find_named(name, request.tenant) is registry.find(request.id) is request
    with pytest.raises(RequestExists, match="is already live"):
        registry.add(named(name, "ann"))
    with pytest.raises(RequestNotFound):
        registry.find_named(name, "")
    end(registry, mine)
    end(registry, other)
    with pytest.raises(RequestNotFound):
        registry.find_named(name, "ann")
    with pytest.raises(RequestExists, match="its output is kept"):
        registry.check_new(name, "bob")
    registry.forget(other.id)
    registry.check_new(name, "bob")
