"""The `openai` package for Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.clients.harness import MARKS, Served, check_client

pytestmark = MARKS


async def test_answers_equal_those_of_the_grpc_client(
    served: Served, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    await check_client("openai", "openai_python.py", served, tmp_path, cases=cases)
