"""Structured output through a whole cluster: constraints hold alone and in batches."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stageline.client.errors import InvalidRequest
from stageline.client.output import Completion, FinishReason
from tests.integration.cluster import Cluster

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
NAMES = ["Lily", "Tom", "a red ball"]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(None, layers=(4, 4, 4), max_kv_tokens=4096, has_text=True) as cluster:
        yield cluster


async def complete(cluster: Cluster, prompt: str = "Once", **options: Any) -> Completion:
    options.setdefault("max_tokens", 100)
    (completion,) = await cluster.client.complete(prompt, timeout_s=60, **options)
    return completion


def matches_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and isinstance(value["name"], str) and 0 <= value["age"] <= 99


async def test_each_kind_of_constraint_holds_and_ends_the_output(cluster: Cluster) -> None:
    by_schema, by_regex, by_choice, by_grammar, free = await asyncio.gather(
        complete(cluster, json_schema=SCHEMA, temperature=1.0, seed=1),
        complete(cluster, regex=r"[a-c]{3}-\d{2}"),
        complete(cluster, choice=NAMES),
        complete(cluster, grammar='start: "x" NUMBER\nNUMBER: /[0-9]{1,3}/', temperature=1.0, seed=3),
        complete(cluster, max_tokens=20),
    )
    assert matches_schema(by_schema.text)
    assert re.fullmatch(r"[a-c]{3}-\d{2}", by_regex.text)
    assert by_choice.text in NAMES
    assert re.fullmatch(r"x[0-9]{1,3}", by_grammar.text)
    for completion in (by_schema, by_regex, by_choice, by_grammar):
        assert completion.finish_reason is FinishReason.STOP
    assert free.text == (await complete(cluster, max_tokens=20)).text


@pytest.mark.full
async def test_a_request_generates_the_same_text_alone_and_in_a_batch(cluster: Cluster) -> None:
    alone = [await complete(cluster, json_schema=SCHEMA, temperature=1.0, seed=seed) for seed in range(4)]
    together = await asyncio.gather(
        *(complete(cluster, json_schema=SCHEMA, temperature=1.0, seed=seed) for seed in range(4))
    )
    assert [output.text for output in together] == [output.text for output in alone]
    assert all(matches_schema(output.text) for output in alone)


@pytest.mark.full
async def test_a_grammar_resumes_after_a_preemption() -> None:
    """The pool holds little more than one request."""
    async with Cluster(None, layers=(6, 6), block_size=4, max_kv_tokens=96, has_text=True) as cluster:
        options = {"regex": r"([a-z]{3,7} ){10}end", "temperature": 1.0, "max_tokens": 90}
        alone = [await complete(cluster, seed=seed, **options) for seed in range(12)]
        together = await asyncio.gather(*(complete(cluster, seed=seed, **options) for seed in range(12)))
        assert [output.text for output in together] == [output.text for output in alone]
        assert all(re.fullmatch(options["regex"], output.text) for output in alone)
        assert (await cluster.client.status()).requests.preemptions > 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json_schema": '{"type": "cat"}'}, "json_schema: "),
        ({"regex": "("}, "regex: "),
        ({"choice": []}, "choice"),
        ({"grammar": "start: nothing"}, "grammar: "),
        ({"regex": "a+", "ignore_eos": True}, "ignore_eos excludes structured output"),
    ],
)
async def test_unsupported_options_are_rejected_by_name(
    cluster: Cluster, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)):
        await complete(cluster, **options)
