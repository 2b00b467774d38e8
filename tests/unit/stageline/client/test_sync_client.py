"""`SyncClient` against a real grpc.aio server in another thread."""

import asyncio
import concurrent.futures
import contextvars
import gc
import inspect
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin

import pytest

import stageline
from stageline import Client, SyncClient
from tests.fake_inference import FakeInference
from tests.fake_stageline import serve
from tools.sync_client import SOURCE, TARGET, sync_client

DEADLINE_S = 20.0
THREAD = "stageline SyncClient"
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    address: str
    inference: FakeInference
    loop: asyncio.AbstractEventLoop

    def do(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs it where the server runs."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def wait_ended_early(self) -> None:
        """Until the server has seen a request end before its last token."""
        self.do(asyncio.wait_for(self.inference.ended_early.wait(), DEADLINE_S))


@pytest.fixture
def served() -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server, address, inference = asyncio.run_coroutine_threadsafe(serve("127.0.0.1:0", 1), loop).result()
    found = Served(address=address, inference=inference, loop=loop)
    yield found
    found.do(server.stop(0))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert not client_threads()


@pytest.fixture
def client(served: Served) -> Iterator[SyncClient]:
    with SyncClient(served.address) as opened:
        yield opened


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def wait_until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def public_methods(kind: type) -> dict[str, Any]:
    return {name: found for name, found in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_the_committed_client_is_the_generated_one() -> None:
    assert TARGET.read_text(encoding="utf-8") == sync_client(SOURCE.read_text(encoding="utf-8"))


def test_it_has_the_methods_parameters_and_docstrings_of_the_asynchronous_client() -> None:
    blocking, asynchronous = public_methods(SyncClient), public_methods(Client)
    assert blocking.keys() - {"close"} == asynchronous.keys()
    assert inspect.signature(SyncClient).parameters == inspect.signature(Client).parameters
    for name, method in asynchronous.items():
        own, wanted = inspect.signature(blocking[name]), inspect.signature(method)
        assert own.parameters == wanted.parameters, name
        returns = wanted.return_annotation
        if get_origin(returns) is AsyncGenerator:
            returns = Generator[get_args(returns)[0], None, None]
        assert own.return_annotation == returns, name
        assert len(blocking[name].__doc__ or "") > 20, name


def test_a_new_method_is_translated_and_one_of_another_kind_is_an_error() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    where, docstring = "    async def model(self)", '        """D."""\n\n'
    added = source.replace(where, f"    async def late(self, *, by: int) -> int:\n{docstring}{where}")
    assert "def late(self, *, by: int) -> int:" in sync_client(added)
    assert "return self._run(self._asynchronous.late(by=by))" in sync_client(added)
    odd = source.replace(where, f"    def late(self) -> int:\n{docstring}{where}")
    with pytest.raises(LookupError, match="late"):
        sync_client(odd)


def test_outputs_are_yielded_and_completions_returned(client: SyncClient) -> None:
    outputs = list(client.generate("two words", max_tokens=3))
    assert [output.text for output in outputs] == [" 0", " 1", " 2"]
    assert outputs[-1].finish_reason == "length"
    (completion,) = client.complete("two words", max_tokens=3)
    assert completion.text == " 0 1 2"
    assert client.model().name == "fake-stories"
    assert client.status().model == "fake-stories"


def test_texts_and_token_ids_are_translated(client: SyncClient) -> None:
    assert client.tokenize("two words") == [0, 1]
    assert client.tokenize([{"role": "user", "content": "three more words"}]) == [0, 1, 2]
    assert client.detokenize([3, 4], skip_special_tokens=False) == " 3 4"


def leave_by_break(client: SyncClient) -> None:
    for _ in client.generate("!endless"):
        break


def leave_by_exception(client: SyncClient) -> None:
    def read() -> None:
        for _ in client.generate("!endless"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()


def leave_by_close(client: SyncClient) -> None:
    with closing(client.generate("!endless")) as outputs:
        next(outputs)


def leave_by_collection(client: SyncClient) -> None:
    outputs: Any = client.generate("!endless")
    next(outputs)
    cycle = [outputs]
    cycle.append(cycle)
    del outputs, cycle
    gc.collect()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_exception, leave_by_close, leave_by_collection])
def test_leaving_a_stream_cancels_its_request_and_no_other(
    served: Served, client: SyncClient, leave: Callable[[SyncClient], None]
) -> None:
    other = client.generate("!endless")
    next(other)
    leave(client)
    served.wait_ended_early()
    assert [next(other).text for _ in range(3)] == [" 1", " 2", " 3"]
    assert served.inference.num_ended_early == 1


def test_errors_have_the_types_of_the_asynchronous_client(client: SyncClient) -> None:
    with pytest.raises(stageline.InvalidRequest):
        client.generate("x", max_tokens=-1)
    with pytest.raises(stageline.Overloaded) as overloaded:
        client.complete("!overloaded")
    assert overloaded.value.retry_after_s == 1.5
    outputs = client.generate("!after:ABORTED")
    assert next(outputs).text == " 0"
    with pytest.raises(stageline.StepFailed):
        next(outputs)
    with pytest.raises(StopIteration):
        next(outputs)


def test_no_coordinator_is_unavailable(unused_address: str) -> None:
    with SyncClient(unused_address, connect_timeout_s=0.2) as client, pytest.raises(stageline.Unavailable):
        client.model()


def test_threads_share_a_client(client: SyncClient) -> None:
    def texts(number: int) -> list[str]:
        return [output.text for output in client.generate("x", max_tokens=10 + number)]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(texts, range(32)))
    assert results == [[f" {index}" for index in range(10 + number)] for number in range(32)]
    assert len(client_threads()) == 1


async def test_a_running_event_loop_does_not_matter(served: Served) -> None:
    with SyncClient(served.address) as client:
        assert [output.text for output in client.generate("x", max_tokens=2)] == [" 0", " 1"]
        async with Client(served.address) as asynchronous:
            (completion,) = await asynchronous.complete("x", max_tokens=2)
        assert completion.text == client.complete("x", max_tokens=2)[0].text


def test_calls_run_in_the_context_of_their_thread(client: SyncClient) -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    async def seen() -> str:
        return variable.get()

    variable.set("by the thread")
    assert client._run(seen()) == "by the thread"


def test_close_ends_the_calls_of_other_threads(served: Served) -> None:
    client = SyncClient(served.address)
    first = threading.Event()

    def read() -> None:
        for _ in client.generate("!endless"):
            first.set()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert first.wait(DEADLINE_S)
        client.close()
        with pytest.raises((stageline.Cancelled, RuntimeError)):
            reading.result(DEADLINE_S)
    assert not client_threads()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.model()
    client.close()


def test_a_client_that_is_not_used_has_no_thread_and_a_forgotten_one_ends_its_own(served: Served) -> None:
    client = SyncClient(served.address)
    assert not client_threads()
    outputs = client.generate("!endless")
    next(outputs)
    del client, outputs
    gc.collect()
    served.wait_ended_early()
    wait_until(lambda: not client_threads())


_HEAD = "import sys\nfrom stageline import SyncClient\naddress = sys.argv[1]\n"
_INTERRUPTED = """
client = SyncClient(address)
try:
    client.complete("!endless")
except KeyboardInterrupt:
    print(client.complete("x", max_tokens=1)[0].text, flush=True)
sys.stdin.read()
"""
_SCRIPTS = {
    "an open client at exit": """
client = SyncClient(address)
print(next(client.generate("!endless")).text, flush=True)
outputs = client.generate("!endless")
next(outputs)
""",
    "a fork with an open client": """
import os
client = SyncClient(address)
client.model()
with SyncClient(address) as closed:
    closed.model()
child = os.fork()
if child == 0:
    for used in (client, SyncClient(address)):
        try:
            used.model()
        except RuntimeError as error:
            assert "forked after a SyncClient was used" in str(error)
        else:
            raise AssertionError
    client.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(client.complete("x", max_tokens=1)[0].text, flush=True)
""",
    "a fork before the first call": """
import os
client = SyncClient(address)
child = os.fork()
if child == 0:
    assert client.complete("x", max_tokens=1)[0].text == " 0"
    client.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(client.complete("x", max_tokens=1)[0].text, flush=True)
""",
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("case", _SCRIPTS)
def test_processes_end_without_a_warning_after(case: str, served: Served) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", _HEAD + _SCRIPTS[case], served.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, " 0\n", "")


_INTERRUPTS = {
    "process": "",
    # As one that comes just before the main thread sleeps, it does not wake it.
    "another thread": """
import signal, threading
def interrupt():
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
threading.Thread(target=interrupt).start()
""",
}


@pytest.mark.parametrize("gets", _INTERRUPTS)
def test_an_interrupt_cancels_the_request_and_leaves_the_client_usable(served: Served, gets: str) -> None:
    command = [sys.executable, "-W", "error", "-c", _HEAD + _INTERRUPTS[gets] + _INTERRUPTED, served.address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        wait_until(lambda: bool(served.inference.requests))
        sent_s = time.monotonic()
        if gets == "process":
            process.send_signal(signal.SIGINT)
        else:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.stdout.readline() == " 0\n"
        assert time.monotonic() - sent_s < DEADLINE_S
        served.wait_ended_early()
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
