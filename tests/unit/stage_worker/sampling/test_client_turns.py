"""Clients take turns on shared threads, with one piece at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from stage_worker.sampling.grammar_masks import ClientTurns
from tests.unit.stage_worker.sampling.grammar_walks import HeldPool

WAIT_S = 60


def test_clients_take_turns_and_each_keeps_its_order() -> None:
    pool, done = HeldPool(), list[str]()
    turns = ClientTurns(pool)
    for piece in ("a1", "a2", "a3", "b1", "a4", "c1", "b2"):
        turns.submit(piece[0], partial(done.append, piece))
    pool.work()
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_client_never_has_two_pieces_running() -> None:
    turns = ClientTurns(ThreadPoolExecutor(2))
    release = threading.Event()
    slow = turns.submit("flood", lambda: release.wait(WAIT_S))
    queued = [turns.submit("flood", lambda: None) for _ in range(20)]
    assert turns.submit("quiet", lambda: "done").result(WAIT_S) == "done"
    assert turns.submit("quiet", lambda: "again").result(WAIT_S) == "again"
    assert not any(piece.done() for piece in queued)
    release.set()
    assert slow.result(WAIT_S)
    assert [piece.result(WAIT_S) for piece in queued] == [None] * 20
    turns.close()


def test_all_work_of_many_clients_is_done() -> None:
    turns, done = ClientTurns(ThreadPoolExecutor(3)), list[int]()
    pieces = [turns.submit(str(number % 7), partial(done.append, number)) for number in range(2_000)]
    for piece in pieces:
        piece.result(WAIT_S)
    for client in range(7):
        assert [number for number in done if number % 7 == client] == list(range(client, 2_000, 7))
    turns.close()


def test_cancelled_work_is_skipped() -> None:
    pool, done = HeldPool(), list[str]()
    turns = ClientTurns(pool)
    first = turns.submit("a", partial(done.append, "first"))
    turns.submit("a", partial(done.append, "second"))
    assert first.cancel()
    pool.work()
    assert done == ["second"]


def test_an_error_is_that_of_its_work_and_the_next_one_runs() -> None:
    turns = ClientTurns(ThreadPoolExecutor(1))
    failed = turns.submit("a", partial(int, "x"))
    assert turns.submit("a", partial(int, "1")).result(WAIT_S) == 1
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(WAIT_S)
    turns.close()
