"""`/v1/completions`: prompts, echo, log-probabilities, choices, stop strings, usage, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.upstream.contract import Tokens
from stageline_rpc.v1 import inference_pb2
from tests.unit.gateway.fake_upstream import (
    STOP,
    Served,
    answer,
    builtin_codec,
    end_of,
    events_of,
    serve,
    token_logprobs,
)

ENCODE = builtin_codec().encode
PATH = "/v1/completions"


async def complete(served: Served, **body: Any) -> dict[str, Any]:
    response = await served.client.post(PATH, json={"prompt": "Once upon", **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once upon", [ENCODE("Once upon")]),
        (["Once", "The sea"], [ENCODE("Once"), ENCODE("The sea")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_form_of_prompt(prompt: Any, expected: list[list[int]]) -> None:
    async with serve() as served:
        body = await complete(served, prompt=prompt)
        assert [list(stream.request.token_ids.ids) for stream in served.upstream.streams] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        assert {choice["text"] for choice in body["choices"]} == {" a bird sang"}


async def test_the_body_of_a_completion() -> None:
    async with serve() as served:
        body = await complete(served)
        assert body.pop("id") == f"cmpl-{served.request.request_id}"
        assert body.pop("created") > 0
        assert body == {
            "object": "text_completion",
            "model": "tiny",
            "system_fingerprint": "fp_abc",
            "choices": [
                {
                    "index": 0,
                    "text": " a bird sang",
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
            "usage": {
                "prompt_tokens": 2,
                "completion_tokens": 3,
                "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 0},
                "stageline": {"restarts": 1, "queue_s": 0.25, "first_token_s": 0.5, "decode_s": 2.0},
            },
        }
        assert served.request.max_tokens == 16
        assert served.request.sampling == inference_pb2.SamplingParameters(n=1, temperature=1.0, min_tokens=0)


async def test_scoring_a_text_with_echo_and_logprobs() -> None:
    async with serve() as served:
        body = await complete(served, echo=True, logprobs=1, max_tokens=0)
        [choice] = body["choices"]
        assert choice["text"] == "Once upon"
        assert choice["logprobs"] == {
            "tokens": ["Once", " upon"],
            "token_logprobs": [None, -0.5],
            "top_logprobs": [None, {" upon": -0.5}],
            "text_offset": [0, 4],
        }
        sampling = served.request.sampling
        assert (served.request.max_tokens, sampling.prompt_logprobs, sampling.logprobs) == (0, 1, 1)
        assert not sampling.echo


async def test_echo_comes_before_the_output_of_every_choice() -> None:
    async with serve() as served:
        body = await complete(served, echo=True, logprobs=2, n=2)
        for choice in body["choices"]:
            assert choice["text"] == "Once upon a bird sang"
            assert choice["logprobs"]["text_offset"] == [0, 4, 9, 11, 16]
            assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.25, -0.25, -0.25]


async def test_tokens_with_equal_texts_keep_their_own_logprobs() -> None:
    # Two halves of a character decode to the same replacement character.
    halves = [token for token in range(200, 256) if builtin_codec().decode([token]) == "\ufffd"][:2]
    rows = [token_logprobs(halves[1], -1.5, (halves[0], -0.5), (halves[1], -1.5))]
    script = [Tokens(0, 0, [halves[1]], rows), end_of(0, 1)]
    async with serve(lambda _: script) as served:
        body = await complete(served, logprobs=2)
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{"\ufffd": -1.5, f"token_id:{halves[0]}": -0.5}]
        assert logprobs["token_logprobs"] == [-1.5]


async def test_a_stop_string_ends_the_text_and_the_request() -> None:
    async with serve() as served:
        body = await complete(served, stop=[" sa", "zebra"], n=2)
        for choice in body["choices"]:
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
                " a bird",
                "stop",
                " sa",
            )
        assert served.upstream.streams[0].stops == [(0, 3), (1, 3)]
        assert not served.request.sampling.stop
        assert body["usage"]["completion_tokens"] == 6


async def test_tokens_behind_a_stop_string_are_never_sent() -> None:
    async with serve(answer(" a bird sang of the sea")) as served:
        body = await complete(served, stop="ird", include_stop_str_in_output=True, return_token_ids=True)
        [choice] = body["choices"]
        assert choice["text"] == " a bird"
        assert choice["token_ids"] == ENCODE(" a bird")
        assert choice["prompt_token_ids"] == ENCODE("Once upon")
        assert body["usage"]["completion_tokens"] == 2


async def test_times_are_of_the_first_choice_and_of_the_longest_decoding() -> None:
    async with serve() as served:
        body = await complete(served, n=3)
        expected = {"restarts": 1, "queue_s": 0.25, "first_token_s": 0.5, "decode_s": 6.0}
        assert body["usage"]["stageline"] == expected


async def test_a_stop_token_is_reported() -> None:
    token = ENCODE(" sang")[0]
    async with serve(answer(" a bird sang", reason=STOP)) as served:
        body = await complete(served, stop_token_ids=[token])
        assert body["choices"][0]["stop_reason"] == token
        assert list(served.request.sampling.stop_token_ids) == [token]


async def test_a_stream_has_the_same_text_and_ends_with_usage_and_done() -> None:
    async with serve() as served:
        events = await events_of(
            served,
            PATH,
            prompt="Once upon",
            n=2,
            echo=True,
            logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        for index in range(2):
            own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in own) == "Once upon a bird sang"
            assert [choice["finish_reason"] for choice in own] == [None] * 4 + ["length"]
            offsets = [offset for choice in own for offset in choice["logprobs"]["text_offset"]]
            assert offsets == [0, 4, 9, 11, 16]
        assert {chunk["id"] for chunk in chunks} == {f"cmpl-{served.request.request_id}"}


async def test_continuous_usage_counts_the_tokens_so_far() -> None:
    async with serve() as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await events_of(served, PATH, prompt="Once upon", stream=True, stream_options=options)
        counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == [1, 2, 3, 3, 3]


async def test_prompt_logprobs_are_by_token_id() -> None:
    async with serve() as served:
        ids = ENCODE("Once upon")
        body = await complete(served, prompt_logprobs=1)
        entry = {"logprob": -0.5, "rank": 1, "decoded_token": " upon"}
        assert body["choices"][0]["prompt_logprobs"] == [None, {str(ids[1]): entry}]


async def test_a_model_without_a_tokenizer_serves_token_ids() -> None:
    async with serve(
        lambda _: [Tokens(0, 0, [9]), Tokens(0, 1, [8]), end_of(0, 2)], has_text=False
    ) as served:
        body = await complete(served, prompt=[1, 2], return_token_ids=True)
        assert (body["choices"][0]["text"], body["choices"][0]["token_ids"]) == ("", [9, 8])
        events = await events_of(served, PATH, prompt=[1, 2], stream=True, return_token_ids=True)
        tokens = [json.loads(event)["choices"][0]["token_ids"] for event in events[:-1]]
        assert tokens == [[9], [8], []]
        for body, param in (({"prompt": "a"}, "prompt"), ({"prompt": [1], "stop": "a"}, "stop")):
            response = await served.client.post(PATH, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
