"""Turns what a user passes to `Client.generate` into the message that the server reads."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stageline import values
from stageline.errors import InvalidRequest
from stageline.parameters import GenerateOptions
from stageline.prompt import Prompt, set_prompt
from stageline_rpc.v1 import inference_pb2
from wire.channels import MAX_MESSAGE_BYTES
from wire.ids import id_text, new_request_id

_Encode = Callable[[str, object], Any]

_OF_REQUEST: dict[str, _Encode] = {
    "request_id": values.text,
    "max_tokens": values.uint32,
    "cache_salt": values.text,
    "on_disconnect": values.on_disconnect,
    "prefix_cache": values.flag,
    "priority": values.priority,
}
_OF_SAMPLING: dict[str, _Encode] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p"), values.number),
    **dict.fromkeys(("repetition_penalty", "frequency_penalty", "presence_penalty"), values.number),
    **dict.fromkeys(("top_k", "min_tokens", "logprobs", "prompt_logprobs", "n"), values.uint32),
    **dict.fromkeys(("ignore_eos", "echo", "skip_special_tokens"), values.flag),
    "seed": values.uint64,
    "logit_bias": values.biases,
    "allowed_token_ids": values.some_token_ids,
    "stop_token_ids": values.token_ids,
    "bad_words": values.texts,
    "bad_word_ids": values.token_sequences,
    "stop": values.text_or_texts,
    "json_schema": values.schema,
    "regex": values.text,
    "choice": values.choices,
    "grammar": values.text,
}
_STRUCTURED_OUTPUT = ("json_schema", "regex", "choice", "grammar")


def build_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The message for these arguments; what is None stays unset, so that the server's default holds.

    A request without an id is given one. Raises TypeError for an unknown option, and InvalidRequest, which
    names the option, for what the message cannot carry. All else is for the server to judge.
    """
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r} of a generation")
    given = {name: value for name, value in options.items() if value is not None}
    if "attach_secret" in given:
        values.attach_secret("attach_secret", given["attach_secret"])
    _check_structured_output(given)
    request = inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParameters(**_encode(_OF_SAMPLING, given)),
        **{"request_id": id_text(new_request_id()), **_encode(_OF_REQUEST, given)},
    )
    set_prompt(request, prompt)
    _check_size(request)
    return request


def _encode(encoders: Mapping[str, _Encode], given: Mapping[str, object]) -> dict[str, Any]:
    return {name: encode(name, given[name]) for name, encode in encoders.items() if name in given}


def _check_structured_output(given: Iterable[str]) -> None:
    names = [name for name in _STRUCTURED_OUTPUT if name in given]
    if len(names) > 1:
        raise InvalidRequest(f"{' and '.join(names)} exclude each other: an output has one form")


def _check_size(request: inference_pb2.GenerateRequest) -> None:
    size_bytes = request.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the request has {size_bytes} bytes with its prompt, a message has at most {MAX_MESSAGE_BYTES}"
        )
