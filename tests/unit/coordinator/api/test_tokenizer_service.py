"""Tokenizer calls with hostile messages: typed errors, and no work on the event loop's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
from google.protobuf.message import DecodeError

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from coordinator.api.message_limits import MAX_CONVERSATION_MESSAGES, MAX_GENERATE_BYTES
from coordinator.api.tokenizer_service import CHUNK_BYTES, TokenizerService
from coordinator.model import ServedModel, model_of
from stageline_rpc.v1 import inference_pb2
from text.tokenizer import load_text_codec
from wire.errors import InvalidRequest, MessageTooLarge

_Result = TypeVar("_Result")
BIG = 2_000_000


@pytest.fixture(scope="module")
def model() -> ServedModel:
    model = model_of(Checkpoint.open(MODEL_DIRECTORY))
    model.text = load_text_codec(MODEL_DIRECTORY)
    return model


class Threads:
    """Runs functions on other threads, and counts those at once."""

    def __init__(self) -> None:
        self.num_running = self.num_calls = 0

    async def __call__(self, client: str, function: Callable[..., _Result], *arguments: object) -> _Result:
        self.num_calls += 1
        self.num_running += 1
        try:
            return await asyncio.to_thread(function, *arguments)
        finally:
            self.num_running -= 1


def conversation(num_messages: int, content: str = "a") -> inference_pb2.TokenizeRequest:
    message = inference_pb2.ChatMessage(role="user", content=content)
    messages = inference_pb2.Conversation(messages=[message] * num_messages)
    return inference_pb2.TokenizeRequest(conversation=messages)


TOKENIZE = {
    "no prompt": b"",
    "a text of 2 MB": inference_pb2.TokenizeRequest(text="once upon " * (BIG // 10)).SerializeToString(),
    "a message of 2 MB": conversation(1, "once upon " * (BIG // 10)).SerializeToString(),
    "too many messages": conversation(MAX_CONVERSATION_MESSAGES + 1).SerializeToString(),
    "invalid UTF-8": b"\x0a\x02\xff\xfe",
    "no message": b"\xff" * 1000,
    "a length beyond the end": b"\x0a\xff\xff\xff\xff\x0f",
}
DETOKENIZE = {
    "an id outside the vocabulary": inference_pb2.DetokenizeRequest(
        token_ids=[2**32 - 1]
    ).SerializeToString(),
    "1,000,000 ids": inference_pb2.DetokenizeRequest(token_ids=[1] * 1_000_000).SerializeToString(),
    "no message": b"\xff" * 1000,
}


@pytest.mark.parametrize("data", TOKENIZE.values(), ids=TOKENIZE.keys())
async def test_a_hostile_message_to_tokenize_is_an_error_of_the_caller(
    data: bytes, model: ServedModel
) -> None:
    with pytest.raises((InvalidRequest, MessageTooLarge, DecodeError)):
        await TokenizerService(model, Threads()).tokenize(data, "client")


@pytest.mark.parametrize("data", DETOKENIZE.values(), ids=DETOKENIZE.keys())
async def test_a_hostile_message_to_detokenize_is_an_error_of_the_caller(
    data: bytes, model: ServedModel
) -> None:
    with pytest.raises((InvalidRequest, MessageTooLarge, DecodeError)):
        await TokenizerService(model, Threads()).detokenize(data, "client")


async def test_a_message_above_the_limit_is_not_read(model: ServedModel) -> None:
    service = TokenizerService(model, Threads())
    for call in (service.tokenize, service.detokenize):
        with pytest.raises(MessageTooLarge, match=f"the limit is {MAX_GENERATE_BYTES}"):
            await call(bytes(MAX_GENERATE_BYTES + 1), "client")


async def test_many_calls_at_once_never_run_on_the_thread_of_the_loop(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, threads = model.text, set[int]()
    assert codec is not None
    for name in ("encode", "decode"):
        monkeypatch.setattr(codec, name, _noting(getattr(codec, name), threads))
    beside = Threads()
    service = TokenizerService(model, beside)
    texts = [f"a bird sang {number}" for number in range(50)]
    requests = [inference_pb2.TokenizeRequest(text=text).SerializeToString() for text in texts]
    hostile = [*TOKENIZE.values()] * 5
    found = await asyncio.gather(
        *(service.tokenize(data, "client") for data in (*requests, *hostile)), return_exceptions=True
    )
    served = [each.token_ids for each in found if not isinstance(each, BaseException)]
    assert len(served) == len(texts)
    again = [inference_pb2.DetokenizeRequest(token_ids=ids).SerializeToString() for ids in served]
    detokenized = await asyncio.gather(*(service.detokenize(data, "client") for data in again))
    assert [each.text for each in detokenized] == texts
    assert threads
    assert threading.get_ident() not in threads
    assert (beside.num_calls, beside.num_running) == (len(requests) + len(hostile) + len(again), 0)


def _noting(function: Callable[..., _Result], threads: set[int]) -> Callable[..., _Result]:
    def call(*arguments: object, **named: object) -> _Result:
        threads.add(threading.get_ident())
        return function(*arguments, **named)

    return call


async def test_files_are_sent_in_chunks_and_not_again(model: ServedModel) -> None:
    beside = Threads()
    service = TokenizerService(model, beside)
    listed, *chunks = [response async for response in service.files("", "client")]
    assert sum(len(part.chunk) for part in chunks) == sum(file.size_bytes for file in listed.files.files)
    assert all(0 < len(part.chunk) <= CHUNK_BYTES for part in chunks)
    assert [response async for response in service.files(listed.files.sha256, "client")] == [listed]
    assert beside.num_calls == 4
