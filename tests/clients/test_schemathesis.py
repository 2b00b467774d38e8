"""The `schemathesis` tool: what the OpenAPI schema promises holds for generated requests, valid and not."""

from __future__ import annotations

from pathlib import Path

from tests.clients.harness import MARKS, Served, command_of, run

pytestmark = MARKS

NOT_CHECKED = (
    "negative_data_rejection",  # unknown fields are served, and named in a header
    "positive_data_acceptance",  # a schema does not tell which fields exclude each other
)


async def test_no_server_errors_and_no_undocumented_responses(served: Served, tmp_path: Path) -> None:
    output = await run(
        *(command_of("schemathesis", "schemathesis"), "run", f"{served.url}openapi.json"),
        *("--checks", "all", "--exclude-checks", ",".join(NOT_CHECKED)),
        *("--max-examples", "15", "--seed", "1", "--no-shrink", "--warnings", "off"),
        *("--continue-on-failure", "--request-timeout", "30"),
        directory=tmp_path,
    )
    print(output)
