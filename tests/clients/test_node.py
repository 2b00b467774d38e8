"""The `openai` package for Node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.clients.harness import MARKS, Served, run_node, write_facts

pytestmark = MARKS

SOME = {
    *("sampled", "three choices", "token ids", "min_p", "stop", "echo with logprobs", "choice"),
    *("chat", "three chats", "chat with logprobs", "chat of a schema"),
}


async def test_answers_equal_those_of_the_grpc_client(
    served: Served, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    facts = {"model": served.model, "cases": [case for case in cases if case["name"] in SOME]}
    print(await run_node("node", "openai_node.mjs", tmp_path, served.url, write_facts(tmp_path, facts)))
