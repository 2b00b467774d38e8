"""Items of stored responses: ids that their owner can refer to, at any gateway and in later turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.responses.earlier import MAX_REFERRED_RESPONSES
from tests.unit.gateway.api.test_responses import (
    PARSERS,
    PATH,
    TEMPLATE,
    THOUGHTFUL,
    WEATHER,
    create,
    error_of,
    prompt_of,
)
from tests.unit.gateway.fake_upstream import SECRET, STOP, Served, answer, serve

SAID = "[user] Once[assistant] where is itLet me look, caf\u00e9.<weather Oslo>"
RESULT = {"role": "user", "content": "More"}


def references(body: Any, *, kind: str | None = "item_reference") -> list[dict[str, Any]]:
    return [{"type": kind, "id": item["id"]} for item in body["output"]]


async def first_turn(served: Served, **body: Any) -> Any:
    served.gateway.template = TEMPLATE
    return await create(served, **body)


@pytest.mark.parametrize("kind", ["item_reference", None])
async def test_items_of_the_output_are_used_whole_at_another_gateway(kind: str | None) -> None:
    async with (
        serve(answer(THOUGHTFUL, reason=STOP), **PARSERS) as one,
        serve(beside=one, **PARSERS) as other,
    ):
        first = await first_turn(one, tools=[WEATHER])
        other.gateway.template = TEMPLATE
        given = [{"role": "user", "content": "Once"}, *references(first, kind=kind), RESULT]
        second = await create(other, input=given)
        assert prompt_of(other).endswith(f"{SAID}[user] More")
        assert len(other.upstream.observers) == 1  # one reading for all items of a response
        listed = (await other.client.get(f"{PATH}/{second['id']}/input_items?order=asc")).json()["data"]
        assert listed[1:4] == first["output"]


async def test_items_of_the_input_can_be_referred_to() -> None:
    async with serve(answer(" a bird", reason=STOP)) as served:
        first = await first_turn(served)
        [item] = (await served.client.get(f"{PATH}/{first['id']}/input_items")).json()["data"]
        await create(served, input=[{"type": "item_reference", "id": item["id"]}, *references(first)])
        assert prompt_of(served) == "[user] Once[assistant]  a bird"


async def test_items_of_responses_that_are_gone_are_found_in_a_later_turn() -> None:
    async with serve(answer(" a bird", reason=STOP)) as served:
        first = await first_turn(served)
        turns = [{"role": "user", "content": "Once"}, *references(first), RESULT]
        second = await create(served, input=turns)
        await served.client.delete(f"{PATH}/{first['id']}")
        await create(served, input=[*turns, *references(second), RESULT])
        assert prompt_of(served).count("[assistant]  a bird") == 2
        response = await served.client.post(PATH, json={"input": turns})
        assert error_of(response)[:2] == (404, "input[1].id")


async def test_items_of_the_previous_response_need_no_other() -> None:
    async with serve(answer(" a bird", reason=STOP)) as served:
        first = await first_turn(served)
        before = len(served.upstream.observers)
        await create(served, input=[*references(first), RESULT], previous_response_id=first["id"])
        assert len(served.upstream.observers) == before + 1
        assert prompt_of(served) == "[user] Once[assistant]  a bird[assistant]  a bird[user] More"


async def test_the_responses_that_one_input_reads_have_a_limit() -> None:
    async with serve(answer(" a bird", reason=STOP)) as served:
        given = [references(await first_turn(served))[0] for _ in range(MAX_REFERRED_RESPONSES + 1)]
        read, submitted = len(served.upstream.observers), len(served.upstream.streams)
        response = await served.client.post(PATH, json={"input": given})
        status, param, text = error_of(response)
        assert (status, param) == (400, "input[0].id")
        assert "response 33 that has to be read" in text and "the limit is 32" in text
        assert len(served.upstream.observers) == read + MAX_REFERRED_RESPONSES
        assert len(served.upstream.streams) == submitted
        counted = await served.client.post(f"{PATH}/input_tokens", json={"input": given[1:] * 2})
        assert counted.status_code == 200


async def test_only_an_id_with_the_secret_of_its_response_is_resolved() -> None:
    async with serve(answer(" a bird", reason=STOP)) as served:
        [item] = (await first_turn(served))["output"]
        [unstored] = (await create(served, store=False))["output"]
        real = item["id"]
        assert SECRET in real and SECRET not in unstored["id"]
        number = real[4:36]
        wrong = (
            "x", "msg_1", unstored["id"], f"msg_{number}_0", f"msg_{number}{'x' * 43}_0", f"{real}0",
            real.replace("_0", "_1"), f"msg_{'0' * 32}{SECRET}_0", real.upper(), f"fc_{real[4:]}",
        )  # fmt: skip
        submitted = len(served.upstream.streams)
        for identity in wrong:
            given = [{"role": "user", "content": "Once"}, {"type": "item_reference", "id": identity}]
            response = await served.client.post(PATH, json={"input": given})
            status, param, text = error_of(response)
            assert (status, param) == (404, "input[1].id"), identity
            assert "store = false" in text and "send the item itself" in text
            assert SECRET not in text
        assert len(served.upstream.streams) == submitted


async def test_items_of_a_response_in_progress_are_refused() -> None:
    async with serve(answer(" a bird", reason=STOP)) as served:
        first = await first_turn(served)
        served.upstream.progress = 1
        response = await served.client.post(PATH, json={"input": references(first)})
        assert error_of(response)[:2] == (400, "input[0].id")
        assert "in progress" in error_of(response)[2]


async def test_the_ids_of_calls_tell_no_secret() -> None:
    async with serve(answer(THOUGHTFUL, reason=STOP), **PARSERS) as served:
        call = (await first_turn(served, tools=[WEATHER]))["output"][2]
        assert SECRET not in json.dumps({name: value for name, value in call.items() if name != "id"})


async def test_tokens_of_an_input_are_counted_as_they_are_sent() -> None:
    async with serve(answer(THOUGHTFUL, reason=STOP), **PARSERS) as served:
        first = await first_turn(served, tools=[WEATHER])
        body = {"input": [*references(first), RESULT], "instructions": "Be short.", "tools": [WEATHER]}
        response = await served.client.post(f"{PATH}/input_tokens", json=body)
        await create(served, **body)
        expected = {"object": "response.input_tokens", "input_tokens": len(served.request.token_ids.ids)}
        assert (response.status_code, response.json()) == (200, expected)
        wrong = await served.client.post(f"{PATH}/input_tokens", json={"input": []})
        assert error_of(wrong)[:2] == (400, "input")
        assert len(served.upstream.streams) == 2
