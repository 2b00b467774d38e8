"""Fetches from servers that cut, stall, refuse, ignore ranges or change files."""

from __future__ import annotations

import logging
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint.pins import Pins
from tests.range_server import Handler, RangeServer, Request, range_server
from tests.unit.weights.remote_files import SMALL, Fetch, layer_names, write_shards
from weights.errors import RangesIgnored, SourceChanged, SourceRefused, SourceUnavailable
from weights.http_source import HttpSource
from weights.location import remote_model
from weights.metadata import NUM_READERS, fetch_metadata, pin
from weights.pieces import ranges_of
from weights.transfer import Transfer

SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with range_server(write_shards(tmp_path / "source")) as running:
        yield running


def is_of_weights(request: Request) -> bool:
    """Of more than a header."""
    return request.method == "GET" and request.path.endswith(".safetensors") and request.begin > 8


def test_only_the_bytes_of_the_wanted_tensors_are_fetched(server: RangeServer, tmp_path: Path) -> None:
    wanted = [*layer_names(1), "model.layers.4.b"]
    with Fetch(server, tmp_path / "cache") as fetch:
        sent = fetch.run(wanted)
        assert fetch.size(wanted) <= sent <= fetch.size(wanted) * 1.01
        assert not fetch.wrong(wanted)
        assert fetch.wrong(layer_names(0)) == layer_names(0), "the others are holes"
        assert fetch.run(wanted) == 0, "what is there is not fetched again"
        state = fetch.progress.snapshot()
        assert state.done_bytes == state.total_bytes == fetch.size(wanted)


def test_a_cut_connection_goes_on_at_the_first_missing_byte(server: RangeServer, tmp_path: Path) -> None:
    cuts = iter(range(10))

    def cut(handler: Handler, request: Request) -> bool:
        if not is_of_weights(request) or next(cuts, None) is None:
            return False
        path = server.directory / SHARD
        handler.begin_file(request, path, status=206)
        handler.send_range(request, path, end=min(request.begin + 5_000, request.end))
        handler.cut()
        return True

    with Fetch(server, tmp_path / "cache") as fetch:
        server.misbehave = cut
        sent = fetch.run(layer_names(0, 1))
        assert next(cuts, None) is None, "it was cut ten times"
        assert sent == fetch.size(layer_names(0, 1)), "no byte twice"
        assert not fetch.wrong(layer_names(0, 1))


def test_a_stalled_connection_is_replaced(server: RangeServer, tmp_path: Path) -> None:
    stalled = threading.Event()
    release = threading.Event()

    def stall(handler: Handler, request: Request) -> bool:
        if not is_of_weights(request) or stalled.is_set():
            return False
        stalled.set()
        handler.begin_file(request, server.directory / SHARD, status=206)
        release.wait(60)
        return True

    with Fetch(server, tmp_path / "cache", timeout_s=0.3) as fetch:
        server.misbehave = stall
        fetch.run(layer_names(0))
        assert stalled.is_set() and not fetch.wrong(layer_names(0))
    release.set()


def test_a_busy_server_is_asked_again_when_it_wants(server: RangeServer, tmp_path: Path) -> None:
    refused: list[float] = []

    def too_many(handler: Handler, request: Request) -> bool:
        if not is_of_weights(request) or len(refused) >= 4:
            return False
        refused.append(time.monotonic())
        handler.answer(429, {"Retry-After": "1"})
        return True

    with Fetch(server, tmp_path / "cache") as fetch:
        server.misbehave = too_many
        fetch.run(layer_names(0, 1, 2))
        accepted = [request for request in server.requests if is_of_weights(request) and request.sent_bytes]
        assert len(refused) == 4 and accepted and not fetch.wrong(layer_names(0, 1, 2))
        assert time.monotonic() - refused[0] >= 1.0, "it waited as the server asked"


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("", "answered 302 without an address"),
        ("https://host:99999/a", "redirects to an address that is invalid"),
        ("https://[host/a", "redirects to an address that is invalid"),
        ("https:///a", "redirects to an address that is invalid"),
        ("http://models.example.com/a", "redirects to an address that is not https://"),
        ("file:///etc/passwd", "redirects to an address that is"),
        ("/config.json", "redirects more than 5 times"),
    ],
)
def test_a_redirect_that_cannot_be_followed_is_named(
    server: RangeServer, location: str, problem: str
) -> None:
    def redirect(handler: Handler, request: Request) -> bool:
        handler.answer(302, {"Location": location} if location else {})
        return True

    server.misbehave = redirect
    with (
        closing(HttpSource(remote_model(server.url))) as source,
        pytest.raises(SourceRefused, match=rf"{server.url}/config\.json {problem}"),
    ):
        source.find(["config.json"])


LONG = "9" * 5000
DAMAGED_HEADS = [
    (200, {"Content-Length": LONG}, "answered Content-Length '9999"),
    (200, {"Content-Length": "٣".encode().decode("latin-1")}, "answered Content-Length"),
    (302, {"Location": "/\xe9\xff"}, r"redirects to '/\xe9\xff', which is not ASCII"),
    (302, {"Location": f"https://{'a' * 70}.example/"}, "does not respond: .*label"),
]


@pytest.mark.parametrize(("status", "headers", "problem"), DAMAGED_HEADS)
def test_a_damaged_answer_about_a_file_is_an_outage(
    status: int, headers: dict[str, str], problem: str, server: RangeServer
) -> None:
    def damage(handler: Handler, request: Request) -> bool:
        handler.answer(status, headers)
        return True

    server.misbehave = damage
    with (
        closing(HttpSource(remote_model(server.url))) as source,
        pytest.raises(SourceUnavailable, match=problem),
    ):
        source.find(["config.json"])


@pytest.mark.parametrize(
    "place", [f"bytes {'0' * 5000}-713/714", f"bytes 0-{LONG}/714", f"bytes 0-713/{LONG}", "bytes ٣-٤/714"]
)
def test_a_damaged_content_range_is_an_outage_and_asked_again(
    place: str, server: RangeServer, tmp_path: Path
) -> None:
    damaged = iter(range(3))

    def damage(handler: Handler, request: Request) -> bool:
        if not is_of_weights(request) or next(damaged, None) is None:
            return False
        handler.answer(
            206, {"ETag": request.headers["if-range"], "Content-Range": place.encode().decode("latin-1")}
        )
        return True

    with Fetch(server, tmp_path / "cache") as fetch:
        server.misbehave = damage
        fetch.run(layer_names(0))
        assert next(damaged, None) is None and not fetch.wrong(layer_names(0))


def test_a_server_that_is_busy_when_the_model_is_opened_is_asked_again(server: RangeServer) -> None:
    refused: list[str] = []

    def too_many(handler: Handler, request: Request) -> bool:
        if request.path.endswith("config.json") and not refused:
            refused.append(request.path)
            handler.answer(429, {"Retry-After": "0"})
            return True
        return False

    server.misbehave = too_many
    with closing(HttpSource(remote_model(server.url))) as source:
        assert pin(source).file("config.json").size_bytes == 2
    assert len(refused) == 1


def test_a_server_without_ranges_is_named(server: RangeServer, tmp_path: Path) -> None:
    def ignore(handler: Handler, request: Request) -> bool:
        if not is_of_weights(request):
            return False
        request.begin, request.end = 0, (server.directory / SHARD).stat().st_size
        handler.begin_file(request, server.directory / SHARD, status=200)
        return True

    with Fetch(server, tmp_path / "cache") as fetch:
        server.misbehave = ignore
        with pytest.raises(RangesIgnored, match=rf"{SHARD} ignores byte ranges: use a server that"):
            fetch.run(layer_names(0))


def test_a_changed_file_is_one_error_that_names_it(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        write_shards(server.directory, seed=1)
        with pytest.raises(SourceChanged, match=rf"{SHARD} has changed since the model was opened: it was"):
            fetch.run(layer_names(0))


@pytest.mark.parametrize(
    ("status", "text"), [(401, "check the credentials"), (404, "answered 404"), (410, "answered 410")]
)
def test_a_refusal_is_not_tried_again(server: RangeServer, tmp_path: Path, status: int, text: str) -> None:
    def refuse(handler: Handler, request: Request) -> bool:
        if is_of_weights(request):
            handler.answer(status, {})
        return is_of_weights(request)

    with Fetch(server, tmp_path / "cache", policy=replace(SMALL, num_connections=1)) as fetch:
        server.misbehave = refuse
        before = len(server.requests)
        with pytest.raises(SourceRefused, match=text):
            fetch.run(layer_names(0))
        assert len(server.requests) - before == 1


def test_wrong_bytes_of_a_range_are_never_written(server: RangeServer, tmp_path: Path) -> None:
    """A proxy that answers another range than the one that was asked for."""
    shifted = iter(range(3))

    def shift(handler: Handler, request: Request) -> bool:
        if is_of_weights(request) and next(shifted, None) is not None:
            request.begin, request.end = request.begin - 4, request.end - 4
        return False

    with Fetch(server, tmp_path / "cache") as fetch:
        server.misbehave = shift
        fetch.run(layer_names(0))
        assert next(shifted, None) is None and not fetch.wrong(layer_names(0))


def test_a_server_that_is_gone_is_given_up(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache", policy=replace(SMALL, give_up_s=0.5)) as fetch:

        def fail(handler: Handler, request: Request) -> bool:
            handler.answer(503, {})
            return True

        server.misbehave = fail
        with pytest.raises(SourceUnavailable, match=r"no byte from http://.* for \d+ s: .* answered 503"):
            fetch.run(layer_names(0))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_redirect_whose_body_is_cut_is_followed(
    server: RangeServer, tmp_path: Path, *, is_chunked: bool
) -> None:
    cuts = iter(range(3))

    def cut(handler: Handler, request: Request) -> bool:
        if not is_of_weights(request) or next(cuts, None) is None:
            return False
        handler.send_response(302)
        handler.send_header("Location", f"{request.path}?again")
        length = ("Transfer-Encoding", "chunked") if is_chunked else ("Content-Length", "500")
        handler.send_header(*length)
        handler.end_headers()
        handler.wfile.write(b"1f4\r\n" + b"x" * 10)
        handler.cut()
        return True

    with Fetch(server, tmp_path / "cache") as fetch:
        server.misbehave = cut
        fetch.run(layer_names(0))
        assert next(cuts, None) is None and not fetch.wrong(layer_names(0))


def test_a_long_body_of_a_redirect_is_not_read(server: RangeServer, tmp_path: Path) -> None:
    ended: list[bool] = []

    def send(handler: Handler, request: Request) -> bool:
        if not is_of_weights(request) or ended:
            return False
        handler.send_response(302)
        handler.send_header("Location", f"{request.path}?again")
        handler.send_header("Content-Length", str(2**40))
        handler.end_headers()
        ended.append(True)
        try:
            while True:
                handler.wfile.write(bytes(64 * 1024))
        except OSError:
            handler.close_connection = True
            return True

    with Fetch(server, tmp_path / "cache") as fetch:
        server.misbehave = send
        fetch.run(layer_names(0))
        assert ended and not fetch.wrong(layer_names(0))


@pytest.mark.parametrize("text", ["1" + "0" * 300, "9" * 400, "99999999999", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_long_wait_that_a_source_asks_for_is_bounded(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    refused = iter(range(4))

    def refuse(handler: Handler, request: Request) -> bool:
        if not is_of_weights(request) or next(refused, None) is None:
            return False
        handler.answer(429, {"Retry-After": text})
        return True

    with Fetch(server, tmp_path / "cache", policy=replace(SMALL, max_retry_after_s=0.1)) as fetch:
        server.misbehave = refuse
        fetch.run(layer_names(0, 1, 2))
        assert not fetch.wrong(layer_names(0, 1, 2))
    assert "answered 429 Too Many Requests" in caplog.text
    assert "s although the source asks for" in caplog.text


@pytest.mark.parametrize(("text", "waits"), [("7", [7.0] * 4), ("9" * 5000, []), ("121", [])])
def test_a_wait_for_the_list_of_files_is_told_and_one_beyond_the_limit_is_none(
    server: RangeServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text: str,
    waits: list[float],
) -> None:
    def refuse(handler: Handler, request: Request) -> bool:
        handler.answer(503, {"Retry-After": text})
        return True

    slept: list[float] = []
    monkeypatch.setattr("weights.metadata.time.sleep", slept.append)
    server.misbehave = refuse
    with (
        closing(HttpSource(remote_model(server.url))) as source,
        pytest.raises(SourceUnavailable, match="answered 503"),
    ):
        pin(source)
    assert slept == waits
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(told) == len(waits)
    assert all("answered 503 Service Unavailable: trying again in 7.0 s" in message for message in told)


@pytest.mark.parametrize("text", ["1e300", "-5", "soon", "Sun, 01 Jan 99999999999999999999 00:00:00 GMT"])
def test_a_wait_that_is_none_is_not_honoured(server: RangeServer, text: str) -> None:
    def refuse(handler: Handler, request: Request) -> bool:
        handler.answer(429, {"Retry-After": text})
        return True

    server.misbehave = refuse
    with closing(HttpSource(remote_model(server.url))) as source:
        with pytest.raises(SourceUnavailable, match="answered 429") as caught:
            source.find(["config.json"])
        assert not caught.value.retry_after_s


class Cancelled(Exception):
    """Raised by the `check` of a test."""


class Hang:
    """Does not answer requests of weights, or of all files; `check` raises once it is reached."""

    def __init__(self, *, has_header: bool = False, is_of_all: bool = False) -> None:
        self._has_header, self._is_of_all = has_header, is_of_all
        self.waiting, self.release = threading.Event(), threading.Event()

    def __call__(self, handler: Handler, request: Request) -> bool:
        if not is_of_weights(request) and not self._is_of_all:
            return False
        if self._has_header:
            handler.begin_file(request, handler.owner.directory / SHARD, status=206)
        self.waiting.set()
        self.release.wait(20)
        handler.close_connection = True
        return True

    def check(self) -> None:
        if self.waiting.is_set():
            raise Cancelled


def weights_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weights-")]


@pytest.mark.parametrize("has_header", [True, False], ids=["body", "header"])
def test_cancelling_ends_connections_that_wait(
    server: RangeServer, tmp_path: Path, *, has_header: bool
) -> None:
    with Fetch(server, tmp_path / "cache", timeout_s=600.0) as fetch:
        server.misbehave = hang = Hang(has_header=has_header)
        transfer = Transfer(fetch.source, fetch.pins, fetch.model, SMALL)
        begin_s = time.monotonic()
        with pytest.raises(Cancelled):
            transfer.run(ranges_of(fetch.model.missing(layer_names(0)), SMALL), hang.check)
        assert time.monotonic() - begin_s < 10.0, "the server releases after 20 s"
        assert not weights_threads()
        hang.release.set()
        server.misbehave = None
        fetch.run(layer_names(0))
        assert not fetch.wrong(layer_names(0)), "the source is used again"


def test_cancelling_ends_the_handshake_of_a_connection(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch, closing(socket.create_server(("127.0.0.1", 0))) as mute:
        url = f"https://127.0.0.1:{mute.getsockname()[1]}/model"
        source = HttpSource(remote_model(url), timeout_s=20.0)
        checks = iter(range(3))

        def check() -> None:
            if next(checks, None) is None:
                raise Cancelled

        transfer = Transfer(source, fetch.pins, fetch.model, SMALL)
        begin_s = time.monotonic()
        with pytest.raises(Cancelled):
            transfer.run(ranges_of(fetch.model.missing(layer_names(0)), SMALL), check)
        assert time.monotonic() - begin_s < 10.0
        assert not weights_threads()


def test_cancelling_ends_a_fetch_of_headers(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache", timeout_s=600.0) as fetch:
        server.misbehave = hang = Hang(is_of_all=True)
        begin_s = time.monotonic()
        with pytest.raises(Cancelled):
            fetch_metadata(fetch.source, fetch.pins, tmp_path / "new", has_text=False, check=hang.check)
        assert time.monotonic() - begin_s < 10.0
        hang.release.set()


def test_a_change_ends_a_fetch_of_more_files_than_are_read_at_once(tmp_path: Path) -> None:
    names = [f"model-{number:05}.safetensors" for number in range(NUM_READERS * 2)]
    directory = write_shards(tmp_path / "source")
    with range_server(directory) as server, closing(HttpSource(remote_model(server.url))) as source:
        for name in names:
            shutil.copy(directory / SHARD, directory / name)
        files = source.find(names)
        for name in names:
            (directory / name).write_bytes(b"other")
        with pytest.raises(SourceChanged, match="has changed since the model was opened"):
            fetch_metadata(
                source, Pins(source=server.url, files=tuple(files.values())), tmp_path, has_text=False
            )


def test_an_interrupted_search_for_files_ends(server: RangeServer) -> None:
    """As by Ctrl-C while a model is opened."""
    server.misbehave = hang = Hang(is_of_all=True)

    def interrupt() -> None:
        assert hang.waiting.wait(20)
        signal.raise_signal(signal.SIGINT)

    begin_s = time.monotonic()
    with closing(HttpSource(remote_model(server.url), timeout_s=600.0)) as source:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            source.find(["config.json"])
    while weights_threads():
        assert time.monotonic() - begin_s < 10.0
        time.sleep(0.01)
    hang.release.set()


def test_an_aborted_connection_is_not_used_again(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        file = fetch.pins.file("config.json")
        body = fetch.source.open(file, 0, file.size_bytes)
        assert body.read_some(memoryview(bytearray(file.size_bytes)))
        fetch.source.abort()
        body.close()
        assert fetch.source.read(file, 0, file.size_bytes) == b"{}"


def test_cancelling_ends_the_wait_for_a_busy_source(server: RangeServer, tmp_path: Path) -> None:
    with Fetch(server, tmp_path / "cache") as fetch:
        asked = threading.Event()

        def refuse(handler: Handler, request: Request) -> bool:
            handler.answer(429, {"Retry-After": "20"})
            asked.set()
            return True

        def check() -> None:
            if asked.is_set():
                raise Cancelled

        server.misbehave = refuse
        begin_s = time.monotonic()
        with pytest.raises(Cancelled):
            fetch_metadata(fetch.source, fetch.pins, tmp_path / "new", has_text=False, check=check)
        assert time.monotonic() - begin_s < 10.0


def test_progress_is_logged_with_rate_and_time_left(
    server: RangeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.fetching.LOG_INTERVAL_S", 0.0)
    server.bytes_per_s = 400_000.0
    with caplog.at_level(logging.INFO), Fetch(server, tmp_path / "cache") as fetch:
        fetch.run(layer_names(0, 1, 2))
    lines = [record.getMessage() for record in caplog.records if record.name == "weights.fetching"]
    assert lines[0].startswith(f"fetching 498.0 KiB of weights from {server.url}: num_ranges=")
    assert any("iB/s, " in line and line.endswith("s left") for line in lines[1:]), lines


def test_a_kept_connection_that_the_server_has_closed_is_replaced(
    server: RangeServer, tmp_path: Path
) -> None:
    with Fetch(server, tmp_path / "cache", policy=replace(SMALL, num_connections=1)) as fetch:
        closed: list[socket.socket] = []

        def close_after(handler: Handler, request: Request) -> bool:
            handler.close_connection = True  # without saying so in a header
            closed.append(handler.connection)
            return False

        server.misbehave = close_after
        fetch.run(layer_names(0, 1))
        assert len(closed) > 2 and not fetch.wrong(layer_names(0, 1))


def test_a_connection_serves_one_range_after_the_other(server: RangeServer, tmp_path: Path) -> None:
    connections: set[tuple[str, int]] = set()

    def note(handler: Handler, request: Request) -> bool:
        connections.add(handler.client_address)
        return False

    with Fetch(server, tmp_path / "cache", policy=replace(SMALL, num_connections=1)) as fetch:
        fetch.source.close()
        server.misbehave = note
        fetch.run(layer_names(0, 1, 2))
        assert len(connections) == 1
