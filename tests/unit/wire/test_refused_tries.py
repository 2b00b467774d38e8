"""Refusals by host."""

from wire.refused_tries import MAX_PEERS, MAX_TRIES, WINDOW_S, RefusedTries


def test_tries_are_counted_for_each_host_and_forgiven_after_a_minute() -> None:
    tries = RefusedTries()
    assert [tries.note("a", float(second)) for second in range(MAX_TRIES + 5)][-1] == MAX_TRIES + 1
    assert tries.note("b", 3.0) == 1
    assert tries.note("a", MAX_TRIES + 5 + WINDOW_S) == 1


def test_the_table_of_hosts_is_bounded() -> None:
    tries = RefusedTries()
    for number in range(10 * MAX_PEERS):
        tries.note(f"host-{number}", 0.0)
    assert len(tries._refused) == MAX_PEERS
