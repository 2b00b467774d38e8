"""Throughput of a fetch into the cache against a raw parallel range download of the same bytes, in turns.

python -m bench.weights [--directory DIR] [--mib 1024] [--rounds 5]

A server process on loopback sends files by sendfile. "raw" are plain range requests of equal size on as many
connections, written to a file at their offsets: no hashes, no records, no retries. Both write to DIR and
flush it to the device; which one begins changes with each round.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from checkpoint.pins import Pins
from weights.cache import TensorCache
from weights.fetching import TensorFetcher
from weights.http_source import HttpSource
from weights.location import remote_model
from weights.metadata import pin
from weights.pieces import DEFAULT_TRANSFER
from weights.progress import FetchProgress

FILE = "model.safetensors"
NUM_TENSORS = 32
MiB = 1024 * 1024


def write_model(directory: Path, num_bytes: int) -> None:
    """A file of random tensors, without a model that has them."""
    size = num_bytes // NUM_TENSORS
    header = {
        f"model.layers.{number}.weight": {
            "dtype": "F32",
            "shape": [size // 4],
            "data_offsets": [number * size, (number + 1) * size],
        }
        for number in range(NUM_TENSORS)
    }
    text = json.dumps(header).encode()
    with (directory / FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(NUM_TENSORS):
            file.write(os.urandom(size))
    (directory / "config.json").write_text("{}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    directory: Path

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it would be measured."""

    def _answer(self, *, has_body: bool) -> None:
        path = self.directory / self.path.lstrip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = path.stat().st_size
        wanted = self.headers.get("Range", f"bytes=0-{size - 1}").removeprefix("bytes=")
        begin, end = (int(number) for number in wanted.split("-"))
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{size}"')
        self.send_header("Content-Length", str(end + 1 - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end}/{size}")
        self.end_headers()
        with path.open("rb") as file:
            while has_body and begin <= end:
                begin += os.sendfile(self.connection.fileno(), file.fileno(), begin, end + 1 - begin)


def serve(directory: Path) -> None:
    """Serve until killed; print the port."""
    _Handler.directory = directory
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def raw_s(port: int, size: int, directory: Path) -> float:
    """Seconds of plain range requests."""
    step = DEFAULT_TRANSFER.range_bytes
    ranges = deque((begin, min(begin + step, size)) for begin in range(0, size, step))
    descriptor = os.open(directory / "raw", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, size)

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while ranges:
            begin, end = ranges.popleft()
            connection.request("GET", f"/{FILE}", headers={"Range": f"bytes={begin}-{end - 1}"})
            response = connection.getresponse()
            while data := response.read1(MiB):
                os.pwrite(descriptor, data, begin)
                begin += len(data)
            response.read()  # nothing is left, which read1() does not notice by itself
        connection.close()

    started_s = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(DEFAULT_TRANSFER.num_connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fdatasync(descriptor)
    taken_s = time.perf_counter() - started_s
    os.close(descriptor)
    (directory / "raw").unlink()
    return taken_s


def fetch_s(source: HttpSource, pins: Pins, directory: Path) -> float:
    """Seconds of a fetch of all tensors into an empty cache."""
    cache = TensorCache(directory / "cache")
    model = cache.model(source, pins)
    fetcher = TensorFetcher(cache, source, pins, progress=FetchProgress(), check=lambda: None)
    started_s = time.perf_counter()
    fetcher.fetch(model, list(model.headers.tensors))
    taken_s = time.perf_counter() - started_s
    cache.close()
    shutil.rmtree(directory / "cache")
    return taken_s


def _measure(port: int, directory: Path, *, rounds: int) -> None:
    source = HttpSource(remote_model(f"http://127.0.0.1:{port}"))
    pins = pin(source)
    size = pins.file(FILE).size_bytes
    ratios = []
    for number in range(rounds):
        times = {}
        for name in ("raw", "fetch") if number % 2 == 0 else ("fetch", "raw"):
            is_raw = name == "raw"
            times[name] = raw_s(port, size, directory) if is_raw else fetch_s(source, pins, directory)
        raw, fetch = times["raw"], times["fetch"]
        ratios.append(raw / fetch)
        print(
            f"round {number}: raw {size / raw / MiB:.0f} MiB/s, fetch {size / fetch / MiB:.0f} MiB/s,"
            f" ratio {raw / fetch:.2f}",
            flush=True,
        )
    print(
        f"median ratio {statistics.median(ratios):.2f}, target 0.8; load average {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} CPUs"
    )
    source.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where both write (default: the temporary directory)")
    parser.add_argument("--mib", type=int, default=1024, help="size of the model (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        write_model(directory, options.mib * MiB)
        command = [sys.executable, "-m", "bench.weights", "--serve", str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                _measure(int(server.stdout.readline()), directory, rounds=options.rounds)
            finally:
                server.kill()


if __name__ == "__main__":
    main()
