"""Input and output files of a batch, in OpenAI's form (platform.openai.com/docs/guides/batch)."""

import fcntl
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_KEYS = {"custom_id", "method", "url", "body"}
_FIRST_BYTES = b'{"id":"batch_req_'
"""Of each written line; a last line that was cut within them is known by them too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """One input line. `body` is JSON."""

    custom_id: str
    url: str
    body: bytes


class BatchInput:
    """Reads the lines of `path`, which are all checked at first. Raises ValueError with the line's number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[str, int] = {}
        numbers: dict[str, int] = {}
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    request = self._parsed(line, number)
                    first = numbers.setdefault(request.custom_id, number)
                    if first != number:
                        text = f"custom_id {request.custom_id!r} is also in line {first}: ids must be unique"
                        raise ValueError(f"{path}, line {number}: {text}")
                    self._offsets[request.custom_id] = offset
                offset += len(line)

    @property
    def custom_ids(self) -> list[str]:
        """Of all lines, in order."""
        return list(self._offsets)

    def requests(self, custom_ids: list[str]) -> Iterator[BatchRequest]:
        """Read lines when they are needed. Raises OSError if the file was changed."""
        with self._path.open("rb") as file:
            for custom_id in custom_ids:
                file.seek(self._offsets[custom_id])
                yield self._read_again(file.readline(), custom_id)

    def _read_again(self, line: bytes, custom_id: str) -> BatchRequest:
        try:
            request = _parse_request(line)
        except ValueError:
            request = None
        if request is None or request.custom_id != custom_id:
            raise OSError(f"{self._path} was changed while it was read: start the batch again")
        return request

    def _parsed(self, line: bytes, number: int) -> BatchRequest:
        try:
            return _parse_request(line)
        except ValueError as error:
            raise ValueError(f"{self._path}, line {number}: {error}") from None


def _parse_request(line: bytes) -> BatchRequest:
    found = _parse_object(line)
    if found.keys() != _KEYS:
        wrong = ", ".join(map(repr, sorted(found.keys() ^ _KEYS)))
        raise ValueError(f"a line has exactly custom_id, method, url and body; missing or unknown: {wrong}")
    custom_id, method, url, body = (found[key] for key in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id is {custom_id!r}, must be a text of at least one character")
    if method != "POST":
        raise ValueError(f"method is {method!r}, must be 'POST'")
    if url not in URLS:
        raise ValueError(f"url is {url!r}, must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    for field in ("stream", "background"):
        if body.get(field):
            raise ValueError(f"body has {field!r}: a batch waits for whole responses, omit it")
    return BatchRequest(custom_id=custom_id, url=url, body=orjson.dumps(body))


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object")
    return found


class BatchOutput:
    """Appends lines to a file, each with one write; `served` has the lines of earlier runs.

    A last line that was cut by a kill is removed, so that its request is sent again.
    """

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file of another kind, BlockingIOError if another process appends to it."""
        self._path = path
        self.served: dict[str, bool] = {}
        """Whether the line of a custom_id has a response of status 2xx."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def append(self, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        """Write one line. Raises OSError."""
        line = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        self._write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        self.served[custom_id] = is_served(line)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{self._path} is in use by another `stageline batch`") from None

    def _read(self) -> None:
        offset = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                try:
                    found = _parse_output(line)
                except ValueError:
                    if _is_torn(line):
                        os.ftruncate(self._descriptor, offset)
                        return
                    text = "not a line of a batch's output; name another file, or remove this one"
                    raise ValueError(f"{self._path}, line {number}: {text}") from None
                self.served[found["custom_id"]] = is_served(found)
                if not line.endswith(b"\n"):
                    self._write(b"\n")
                offset += len(line)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]


def _parse_output(line: bytes) -> dict[str, Any]:
    found = _parse_object(line)
    if not isinstance(found.get("custom_id"), str) or not {"response", "error"} <= found.keys():
        raise ValueError("no custom_id, response or error")
    return found


def _is_torn(line: bytes) -> bool:
    """Whether the line is the beginning of one that `append` writes."""
    is_ours = line.startswith(_FIRST_BYTES) or _FIRST_BYTES.startswith(line)
    return is_ours and not line.endswith(b"\n")


def is_served(line: dict[str, Any]) -> bool:
    """Whether an output line has a response of status 2xx."""
    response = line["response"]
    return isinstance(response, dict) and response.get("status_code") in range(200, 300)
