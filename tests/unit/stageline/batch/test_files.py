"""Input lines are checked with their numbers; output files survive being cut anywhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from stageline.batch.files import BatchInput, BatchOutput


def line(custom_id: str = "a", **changes: object) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}} | changes


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(text if isinstance(text, str) else json.dumps(text) + "\n" for text in lines))
    return path


def test_lines_are_read_in_order_and_by_id(tmp_path: Path) -> None:
    path = written(tmp_path / "in", line("a", body={"prompt": "ä\n"}), "\n", line("b"), json.dumps(line("c")))
    given = BatchInput(path)
    assert given.custom_ids == ["a", "b", "c"]
    requests = list(given.requests(["c", "a"]))
    assert [(request.custom_id, request.url) for request in requests] == [
        ("c", "/v1/completions"),
        ("a", "/v1/completions"),
    ]
    assert json.loads(requests[1].body) == {"prompt": "ä\n"}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("{\n", "not JSON"),
        ("[]\n", "must be a JSON object"),
        ({"custom_id": "x", "method": "POST", "url": "/v1/completions"}, "missing or unknown: 'body'"),
        (line("x", extra=1), "missing or unknown: 'extra'"),
        (line() | {"custom_id": 7}, "custom_id is 7"),
        (line(""), "custom_id is ''"),
        (line("x", method="GET"), "method is 'GET'"),
        (line("x", url="/v1/embeddings"), "url is '/v1/embeddings', must be one of"),
        (line("x", body=[]), "body must be a JSON object"),
        (line("x", body={"stream": True}), "body has 'stream'"),
        (line("a"), "custom_id 'a' is also in line 1"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_number(tmp_path: Path, wrong: object, problem: str) -> None:
    path = written(tmp_path / "in", line("a"), "\n", wrong, line("b"))
    with pytest.raises(ValueError, match=r"in, line 3: ") as error:
        BatchInput(path)
    assert problem in str(error.value)


def test_invalid_utf8_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(json.dumps(line()).encode() + b'\n{"custom_id": "\xff"}\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        BatchInput(path)


def test_a_file_that_changes_under_the_reader_is_an_error(tmp_path: Path) -> None:
    given = BatchInput(written(tmp_path / "in", line("a"), line("b")))
    written(tmp_path / "in", line("c"), line("b"))
    with pytest.raises(OSError, match="was changed"):
        list(given.requests(["a"]))


def test_a_file_that_is_cut_at_any_byte_keeps_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        output.append("a", {"status_code": 200, "request_id": "r", "body": {"text": "ä"}}, None)
        output.append("b", None, {"code": "connection_error", "message": "cut"})
    whole = path.read_bytes()
    first_end, second_end = whole.index(b"\n") + 1, len(whole)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with BatchOutput(path) as output:
            # A line that lacks its line break only is whole.
            num_lines = (size >= first_end - 1) + (size >= second_end - 1)
            assert output.served == dict([("a", True), ("b", False)][:num_lines])
            output.append("c", {"status_code": 400, "request_id": "", "body": {}}, None)
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        assert [found["custom_id"] for found in lines] == [*["a", "b"][:num_lines], "c"]


@pytest.mark.parametrize("content", ["notes\n", "notes", '{"custom_id": "a"}\n', "\n"])
def test_another_file_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = written(tmp_path / "out", content)
    with pytest.raises(ValueError, match="out, line 1: not a line of a batch's output"):
        BatchOutput(path)
    assert path.read_text() == content


def test_two_writers_of_one_file_are_an_error(tmp_path: Path) -> None:
    with BatchOutput(tmp_path / "out"), pytest.raises(BlockingIOError, match="in use by another"):
        BatchOutput(tmp_path / "out")
    with BatchOutput(tmp_path / "out"):
        pass
