"""The tokenizer by RPC: its files, ids of texts, and texts of ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from coordinator.api.message_limits import (
    MAX_CONVERSATION_MESSAGES,
    MAX_GENERATE_BYTES,
    MAX_GENERATE_FIELDS,
)
from coordinator.api.request_parser import check_text_size, resolve_prompt
from coordinator.model import ServedModel
from stageline_rpc.v1 import inference_pb2
from text.tokenizer import TokenizerError
from text.tokenizer_files import files_digest, read_tokenizer_files
from wire.errors import InvalidRequest, MessageTooLarge
from wire.message_scan import MessageScan

CHUNK_BYTES = 1024 * 1024

_Result = TypeVar("_Result")


class RunBeside(Protocol):
    """Runs a function on another thread, when it is the client's turn."""

    async def __call__(
        self, client: str, function: Callable[..., _Result], *arguments: object
    ) -> _Result: ...


class TokenizerService:
    """Reads files and runs the tokenizer beside the event loop, on the threads of requests."""

    def __init__(self, model: ServedModel, beside: RunBeside) -> None:
        self._model = model
        self._beside = beside
        max_ids = model.config.longest_sequence
        self._tokenize_scan = MessageScan(
            inference_pb2.TokenizeRequest.DESCRIPTOR,
            max_fields=MAX_GENERATE_FIELDS,
            max_counts={"stageline.v1.Conversation.messages": MAX_CONVERSATION_MESSAGES},
        )
        self._detokenize_scan = MessageScan(
            inference_pb2.DetokenizeRequest.DESCRIPTOR,
            max_fields=MAX_GENERATE_FIELDS,
            max_counts={"stageline.v1.DetokenizeRequest.token_ids": max_ids},
        )

    async def files(
        self, known_sha256: str, client: str
    ) -> AsyncIterator[inference_pb2.GetTokenizerResponse]:
        """Yield the list of files, and their contents unless they are known."""
        directory = self._model.directory
        files = {} if directory is None else await self._beside(client, read_tokenizer_files, directory)
        digest = await self._beside(client, files_digest, files)
        listed = [
            inference_pb2.TokenizerFile(name=name, size_bytes=len(content)) for name, content in files.items()
        ]
        yield inference_pb2.GetTokenizerResponse(
            files=inference_pb2.TokenizerFiles(sha256=digest, files=listed)
        )
        for content in files.values() if digest != known_sha256 else ():
            for start in range(0, len(content), CHUNK_BYTES):
                yield inference_pb2.GetTokenizerResponse(chunk=content[start : start + CHUNK_BYTES])

    async def tokenize(self, data: bytes, client: str, tenant: str = "") -> inference_pb2.TokenizeResponse:
        """Raises InvalidRequest."""
        return await self._beside(client, self._tokenize, data, tenant)

    async def detokenize(self, data: bytes, client: str) -> inference_pb2.DetokenizeResponse:
        """Raises InvalidRequest."""
        return await self._beside(client, self._detokenize, data)

    def _tokenize(self, data: bytes, tenant: str) -> inference_pb2.TokenizeResponse:
        request = _decoded(inference_pb2.TokenizeRequest, self._tokenize_scan, data)
        prompt = inference_pb2.GenerateRequest()
        match request.WhichOneof("prompt"):
            case "text":
                prompt.text = request.text
            case "conversation":
                prompt.conversation.CopyFrom(request.conversation)
            case None:
                raise InvalidRequest("a prompt is needed: text or conversation")
        check_text_size(prompt, self._model)
        return inference_pb2.TokenizeResponse(token_ids=resolve_prompt(prompt, self._model, tenant))

    def _detokenize(self, data: bytes) -> inference_pb2.DetokenizeResponse:
        request = _decoded(inference_pb2.DetokenizeRequest, self._detokenize_scan, data)
        if (codec := self._model.text) is None:
            raise InvalidRequest(f"model {self._model.name} has no tokenizer")
        skips = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        try:
            text = codec.decode(request.token_ids, skip_special_tokens=skips)
        except TokenizerError as error:
            raise InvalidRequest(str(error)) from error
        return inference_pb2.DetokenizeResponse(text=text)


def _decoded(kind: Any, scan: MessageScan, data: bytes) -> Any:
    if len(data) > MAX_GENERATE_BYTES:
        raise MessageTooLarge(f"the message has {len(data)} bytes, the limit is {MAX_GENERATE_BYTES}")
    scan.check(data)
    return kind.FromString(data)
