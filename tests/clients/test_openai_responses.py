"""The Responses API by the `openai` package for Python, at two gateways of one coordinator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from tests.clients.test_openai import PYTHON
from tests.e2e.clusters import START_TIMEOUT_S
from tests.e2e.commands import ENVIRONMENT, Shell
from tests.fake_processes import ROOT

pytestmark = pytest.mark.clients

CHECKS = ROOT / "tests" / "clients" / "openai_responses.py"
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' -}}"
    "{{- (message['content'] or '') | trim + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""The built-in model's, which knows no results of tools."""


async def test_responses_of_the_openai_package(tmp_path: Path) -> None:
    config = LocalClusterConfig(num_workers=2, environment=ENVIRONMENT, log_directory=tmp_path)
    async with LocalCluster(config) as cluster, Shell(tmp_path) as shell:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        template = tmp_path / "template.jinja"
        template.write_text(TEMPLATE)
        urls = []
        for number in range(2):
            listen = ("--listen", "127.0.0.1:0", "--chat-template", str(template))
            process = await shell.start(f"gw{number}", "gateway", "--coordinator", cluster.address, *listen)
            urls.append(f"http://{await process.listening_address(timeout_s=60)}/")
        async with Client(cluster.address) as client:
            story = [{"role": "user", "content": "Tell me a story."}]
            [expected] = await client.complete(story, temperature=0, max_tokens=24, logprobs=0)
            model = (await client.model()).name
        written = tmp_path / "expected.json"
        written.write_text(
            json.dumps(
                {
                    "model": model,
                    "text": expected.text,
                    "completion_tokens": expected.usage.completion_tokens,
                    "logprobs": [row.logprob for row in expected.logprobs or ()],
                }
            )
        )
        checks = await asyncio.create_subprocess_exec(PYTHON, CHECKS, *urls, written)
        assert await checks.wait() == 0
