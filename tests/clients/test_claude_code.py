"""Claude Code: prompts of tens of thousands of tokens, a command that it runs, and a resumed conversation."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.harness import MARKS, Served, environment_of, run
from tests.clients.scripted import ANSWER_TEXT, NOTE, NOTED

pytestmark = MARKS

MODEL = "claude-sonnet-4-5"


async def test_a_job_runs_its_command_and_goes_on(scripted: Served, tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    environment = {
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": scripted.url.rstrip("/"),
        "ANTHROPIC_API_KEY": "unused",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    claude = environment_of("claude_code") / "node_modules" / ".bin" / "claude"
    options = ("--output-format", "json", "--allowedTools", "Bash")
    for words in (("-p", "write a note"), ("--continue", "-p", "once more")):
        output = await run(claude, *words, *options, directory=work, **environment)
        result = json.loads(output.splitlines()[-1])
        assert (result["is_error"], result["result"].strip()) == (False, ANSWER_TEXT), output
        assert result["num_turns"] == 2
        assert (work / NOTE).read_text().strip() == NOTED
        (work / NOTE).unlink()
