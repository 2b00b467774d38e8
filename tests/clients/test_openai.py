"""The `openai` package for Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gateway.config import DEFAULT_HTTP_ADDRESS
from tests.clients.harness import MARKS, Served, check_client, command_of, run
from tests.fake_processes import ROOT

pytestmark = MARKS


async def test_answers_equal_those_of_the_grpc_client(
    served: Served, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    await check_client("openai", "openai_python.py", served, tmp_path, cases=cases)


async def test_the_example_of_the_readme_prints_a_story(served: Served) -> None:
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"^```python\n(from openai import .*?)^```$", readme, re.MULTILINE | re.DOTALL)
    default = f"http://{DEFAULT_HTTP_ADDRESS}/"
    assert default in example
    command = (command_of("openai", "python"), "-c", example.replace(default, served.url))
    # Stories are sampled without a seed, and a few are short.
    printed = [await run(*command) for _ in range(3)]
    assert all(printed) and max(len(story.split()) for story in printed) > 10
