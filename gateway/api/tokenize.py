"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.body import RequestBody
from gateway.api.call import Gateway, json_response, read_fields
from gateway.api.conversation import MessageFields, TemplateFields, encode_messages, read_selection
from gateway.api.errors import invalid
from gateway.api.sampling import TokenId
from text.tokenizer import TextCodec, UnknownToken


class TokenizeRequest(RequestBody):
    """Body of a request to tokenize a text, or a conversation as it would be sent to the model."""

    prompt: str | None = None
    messages: list[MessageFields] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(RequestBody):
    """Body of a request for the text of tokens."""

    tokens: list[TokenId] = Field()


async def tokenize(gateway: Gateway, request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    fields = await read_fields(gateway, request, TokenizeRequest)
    codec = gateway.require_codec("prompt", "send token ids")
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("one of prompt and messages is needed", param="prompt")
    return await gateway.beside_loop(partial(_tokenized, gateway, codec, fields))


def _tokenized(gateway: Gateway, codec: TextCodec, fields: TokenizeRequest) -> Response:
    ids = _encode(gateway, codec, fields)
    body: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": gateway.max_model_len,
        "tokens": list(ids),
    }
    if fields.return_token_strs:
        body["token_strs"] = [codec.piece(token_id) for token_id in ids]
    return json_response(body)


def _encode(gateway: Gateway, codec: TextCodec, fields: TokenizeRequest) -> Sequence[int]:
    if fields.prompt is None:
        return encode_messages(gateway, _template_fields(fields), read_selection(fields.tools))
    gateway.check_text_size((fields.prompt,), param="prompt")
    return codec.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)


def _template_fields(fields: TokenizeRequest) -> TemplateFields:
    if fields.add_special_tokens:
        raise invalid("the chat template adds special tokens", param="add_special_tokens")
    return TemplateFields(
        messages=fields.messages or [],
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        chat_template_kwargs=fields.chat_template_kwargs,
    )


async def detokenize(gateway: Gateway, request: Request) -> Response:
    """Return the text of tokens."""
    fields = await read_fields(gateway, request, DetokenizeRequest)
    codec = gateway.require_codec("tokens", "there is no text")
    try:
        text = await gateway.beside_loop(lambda: codec.decode(fields.tokens, skip_special_tokens=False))
    except UnknownToken as error:
        raise invalid(str(error), param="tokens") from None
    return json_response({"prompt": text})


async def tokenizer_info(gateway: Gateway, request: Request) -> Response:
    """Describe the tokenizer."""
    codec = gateway.require_codec("tokenizer", "there is none to describe")
    return json_response(
        {
            **codec.special_tokens,
            "vocab_size": codec.vocab_size,
            "model_max_length": gateway.max_model_len,
            "chat_template": gateway.template or codec.chat_template,
        }
    )
