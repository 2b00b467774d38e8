"""Grammars of clients: one at a time for each, and known ones cost nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.api.grammars import BadWords, ClientGrammars
from stageline_rpc.v1.inference_pb2 import Choices, SamplingParameters, TokenIds
from wire.errors import InvalidRequest
from wire.sampling import GrammarSpec

DEADLINE_S = 20.0
GOOD = SamplingParameters(json_schema='{"type": "integer"}')
BAD = SamplingParameters(json_schema='{"type": 7}')


class Compiler:
    """Counts what is compiled; refuses numbers as types, and waits while the `gate` is closed."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, sampling: SamplingParameters, bad_words: BadWords) -> GrammarSpec:
        self.compiled.append(sampling.json_schema)
        assert self.gate.wait(DEADLINE_S)
        if "7" in sampling.json_schema:
            raise InvalidRequest("json_schema: 7 is no type", field="json_schema")
        return GrammarSpec(definition=sampling.json_schema, tokenizer_checksum=1)


@asynccontextmanager
async def grammars(compiler: Compiler) -> AsyncIterator[ClientGrammars]:
    made = ClientGrammars(compiler)
    try:
        yield made
    finally:
        compiler.gate.set()
        made.close()


async def refusal(made: ClientGrammars, client: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest, match="json_schema: 7 is no type") as caught:
        await made.grammar_of(client, BAD, ())
    return caught.value


async def test_a_refused_schema_is_compiled_once_for_a_client() -> None:
    compiler = Compiler()
    async with grammars(compiler) as made:
        refusals = [await refusal(made, "a") for _ in range(5)]
        assert len(compiler.compiled) == 1
        assert {error.field for error in refusals} == {"json_schema"}
        assert len(set(map(id, refusals))) == 5, "each is a new exception"
        await refusal(made, "b")
        assert len(compiler.compiled) == 2, "what others have sent is not known faster"


async def test_requests_at_once_with_one_schema_compile_it_once() -> None:
    compiler = Compiler()
    async with grammars(compiler) as made:
        found = await asyncio.gather(*(made.grammar_of("a", GOOD, ()) for _ in range(24)))
        assert {each.definition for each in found if each is not None} == {GOOD.json_schema}
        assert (len(found), len(compiler.compiled)) == (24, 1)


async def test_one_client_compiles_one_grammar_at_a_time_and_holds_up_no_other() -> None:
    compiler = Compiler()
    compiler.gate.clear()
    async with grammars(compiler) as made:
        flood = [
            asyncio.create_task(made.grammar_of("a", SamplingParameters(json_schema=f'{{"a": {n}}}'), ()))
            for n in range(5)
        ]
        other = asyncio.create_task(made.grammar_of("b", GOOD, ()))
        async with asyncio.timeout(DEADLINE_S):
            while GOOD.json_schema not in compiler.compiled:
                await asyncio.sleep(0.001)
        assert len(compiler.compiled) == 2, "one of each client"
        compiler.gate.set()
        assert await other is not None
        assert len(await asyncio.gather(*flood)) == 5


@pytest.mark.parametrize(
    "other",
    [
        SamplingParameters(json_schema=GOOD.json_schema, min_tokens=1),
        SamplingParameters(json_schema=GOOD.json_schema, ignore_eos=True),
        SamplingParameters(json_schema=GOOD.json_schema, allowed_token_ids=[3]),
        SamplingParameters(json_schema=GOOD.json_schema, stop_token_ids=[3]),
        SamplingParameters(json_schema=GOOD.json_schema, bad_words=["a"]),
        SamplingParameters(json_schema=GOOD.json_schema, bad_word_ids=[TokenIds(ids=[3])]),
        SamplingParameters(regex=GOOD.json_schema),
        SamplingParameters(grammar=GOOD.json_schema),
        SamplingParameters(choice=Choices(texts=[GOOD.json_schema])),
    ],
)
async def test_all_that_decides_whether_a_grammar_is_enforced_makes_it_another(
    other: SamplingParameters,
) -> None:
    compiler = Compiler()
    async with grammars(compiler) as made:
        await made.grammar_of("a", GOOD, ())
        await made.grammar_of("a", other, ())
        assert len(compiler.compiled) == 2


async def test_parameters_that_decide_nothing_leave_a_grammar_known() -> None:
    compiler = Compiler()
    async with grammars(compiler) as made:
        for seed in range(3):
            sampling = SamplingParameters(json_schema=GOOD.json_schema, seed=seed, temperature=seed)
            await made.grammar_of("a", sampling, ())
        assert len(compiler.compiled) == 1


async def test_a_request_without_structured_output_has_no_grammar() -> None:
    compiler = Compiler()
    async with grammars(compiler) as made:
        assert await made.grammar_of("a", SamplingParameters(seed=1), ()) is None
        assert compiler.compiled == []
