"""`python -O` removes asserts, but not the checks of tokens and ends."""

import asyncio
import json
import sys

import pytest

from tests.fake_processes import ROOT

pytestmark = pytest.mark.full


TIMEOUT_S = 90.0


async def test_a_token_after_the_end_is_an_error_without_asserts() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-O", "-m", "tests.integration.optimized_scenario"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(TIMEOUT_S):
        output, _ = await process.communicate()
    assert json.loads(output.splitlines()[-1]) == {
        "asserts": False,
        "sound": "4 4",
        "broken": "INVARIANT_BROKEN",
        "after": "4 4",
    }
