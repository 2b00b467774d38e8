"""The `lm_eval` package: log-likelihoods of its `local-completions` equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from builtin_model import MODEL_DIRECTORY
from tests.clients.harness import MARKS, Served, command_of, run

pytestmark = MARKS

TOLERANCE = 1e-3
QUESTIONS = (
    ("Once upon a time, there was a little", [" girl", " tree", " of", " boy named Tim"]),
    ("The bird", [" was happy", " sang a song", " xylophone"]),
    ("Tom and Mia went to the park. They", [" played", " were", " saw a big dog", "."]),
)
TASK = """
task: endings
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.mark.parametrize("tokenizer", ["huggingface", "remote"])
async def test_log_likelihoods_equal_those_of_transformers(
    float32: Served, tmp_path: Path, tokenizer: str
) -> None:
    samples = await _evaluate(float32, tmp_path, tokenizer)
    assert len(samples) == len(QUESTIONS)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=torch.float32)
    codec = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    found_greedy = set()
    for sample, (text, endings) in zip(
        sorted(samples, key=lambda each: each["doc_id"]), QUESTIONS, strict=True
    ):
        for ending, (response,) in zip(endings, sample["resps"], strict=True):
            expected, is_greedy = _score(model, codec, text, ending)
            assert float(response[0]) == pytest.approx(expected, abs=TOLERANCE), (text, ending)
            assert json.loads(str(response[1]).lower()) is is_greedy, (text, ending)
            found_greedy.add(is_greedy)
    assert found_greedy == {True, False}


async def _evaluate(served: Served, directory: Path, tokenizer: str) -> list[dict[str, Any]]:
    data = directory / "endings.jsonl"
    data.write_text(
        "".join(json.dumps({"text": text, "endings": endings}) + "\n" for text, endings in QUESTIONS)
    )
    (directory / "endings.yaml").write_text(TASK.format(data=data))
    arguments = {
        "model": served.model,
        "base_url": f"{served.url}v1/completions",
        "tokenizer_backend": tokenizer,
        "max_retries": 1,
        **({"tokenizer": MODEL_DIRECTORY} if tokenizer == "huggingface" else {}),
    }
    await run(
        command_of("lm_eval", "lm_eval"),
        *("run", "--model", "local-completions", "--tasks", "endings", "--log_samples"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--include_path", directory, "--output_path", directory / "results", "--batch_size", "4"),
        HF_HUB_OFFLINE="1",
        HF_HOME=str(directory / "cache"),
    )
    (file,) = (directory / "results").rglob("samples_endings_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def _score(model: Any, codec: Any, text: str, ending: str) -> tuple[float, bool]:
    """The log-probability of the ending's tokens, and whether each is the likeliest one."""
    num_context = len(codec.encode(text))
    ids = codec.encode(text + ending)
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0, num_context - 1 : -1].log_softmax(-1)
    tokens = torch.tensor(ids[num_context:])
    total = rows.gather(1, tokens[:, None]).sum().item()
    return total, bool((rows.argmax(-1) == tokens).all())
