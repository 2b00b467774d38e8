"""The `openai` package for Node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.clients.harness import MARKS, PROGRAMS, Served, environment_of, run, write_facts

pytestmark = MARKS

SOME = {
    *("sampled", "three choices", "token ids", "min_p", "stop", "echo with logprobs", "choice"),
    *("chat", "three chats", "chat with logprobs", "chat of a schema"),
}


async def test_answers_equal_those_of_the_grpc_client(
    served: Served, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    facts = {"model": served.model, "cases": [case for case in cases if case["name"] in SOME]}
    # Modules are found from the program's own folder upwards.
    program = tmp_path / "openai_node.mjs"
    program.write_bytes((PROGRAMS / program.name).read_bytes())
    (tmp_path / "node_modules").symlink_to(environment_of("node") / "node_modules")
    print(await run("node", program, served.url, write_facts(tmp_path, facts)))
