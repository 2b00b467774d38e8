"""The command `llm`, set up by the lines of docs/clients.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.clients.harness import MARKS, Served, command_of, run
from tests.fake_processes import ROOT

pytestmark = MARKS

BASE = "http://127.0.0.1:7482/"


def documented() -> tuple[str, list[list[str]]]:
    """The file of models, and the commands, as arguments of `llm`."""
    section = (ROOT / "docs" / "clients.md").read_text().partition("`llm`, in `extra-openai-models.yaml`")[2]
    models, commands = re.findall(r"^```\w*\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[:2]
    return models, [shlex.split(line)[1:] for line in commands.splitlines()]


async def test_the_documented_lines_lead_to_an_answer_whole_and_streamed(
    served: Served, tmp_path: Path
) -> None:
    llm, environment = command_of("llm", "llm"), {"LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path)}
    models, (set_key, ask) = documented()
    assert BASE in models
    text = models.replace(BASE, served.url).replace("MODEL", served.model)
    (tmp_path / "extra-openai-models.yaml").write_text(text)
    await run(llm, *set_key, **environment)
    limits = ("-o", "max_tokens", "20", "-o", "temperature", "0")
    streamed = await run(llm, *ask, *limits, **environment)
    whole = await run(llm, *ask, *limits, "--no-stream", **environment)
    assert whole == streamed
    assert len(whole.split()) > 5, whole
