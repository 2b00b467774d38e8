"""Codex CLI as it comes: with its tools of the server, of which the gateway has none."""

from __future__ import annotations

import json
from pathlib import Path

from tests.clients.harness import MARKS, Served, environment_of, run
from tests.clients.scripted import ANSWER_TEXT, NOTE, NOTED

pytestmark = MARKS

MODEL = "gpt-5"
CONFIG = """
model = "{model}"
model_provider = "stageline"
[model_providers.stageline]
name = "Stageline"
base_url = "{url}v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


async def test_a_job_runs_its_command_and_is_resumed(scripted: Served, tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=scripted.url))
    options = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    for words in (("write a note",), ("resume", "--last", "once more")):
        codex = environment_of("codex") / "node_modules" / ".bin" / "codex"
        output = await run(
            codex, "exec", *options, *words, directory=work, CODEX_HOME=str(home), HOME=str(home)
        )
        events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        items = [event["item"] for event in events if event["type"] == "item.completed"]
        assert [item["text"] for item in items if item["type"] == "agent_message"][-1] == ANSWER_TEXT, output
        assert events[-1]["type"] == "turn.completed", output
        assert (work / NOTE).read_text().strip() == NOTED
        (work / NOTE).unlink()
