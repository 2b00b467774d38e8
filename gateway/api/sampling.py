"""Fields that completions and chats share, under vLLM's names, and their SamplingParameters."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.body import RequestBody
from gateway.api.errors import invalid
from stageline_rpc.v1 import inference_pb2
from wire.foreign_text import parse_digits
from wire.sampling import MAX_CHOICES, MAX_STOP_CHARACTERS, MAX_STOPS, MAX_TOP_LOGPROBS, SAMPLING_NUMBERS

MAX_UINT32 = 2**32 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_UINT32)]
Count = Annotated[int, Field(ge=0, le=MAX_UINT32)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class StrictModel(BaseModel):
    """A nested object; unknown fields in it are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class JsonSchema(BaseModel):
    """`json_schema` of a response format; a strict schema and another one are enforced alike."""

    model_config = ConfigDict(extra="ignore", strict=True)

    schema_: dict[str, Any] | bool = Field(default=True, alias="schema")


class ResponseFormat(StrictModel):
    """Form of the output's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(StrictModel):
    """vLLM's constraint of the output; one field of these."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(StrictModel):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(RequestBody):
    """Fields of every request that generates text."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings. Raises ApiError for too many, and for empty and long ones."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        name = self.name_of("stop")
        if len(stops) > MAX_STOPS:
            raise invalid(f"{name} has {len(stops)} strings, must be in [0, {MAX_STOPS}]", param=name)
        for stop in stops:
            if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
                raise invalid(
                    f"{name} has a string of {len(stop)} characters, must be in [1, {MAX_STOP_CHARACTERS}]",
                    param=name,
                )
        return stops

    @property
    def structure(self) -> str | None:
        """Name of the field that sets the form of the output's text.

        Fields with the same form are one, as clients send it under vLLM's older names, too. Raises ApiError
        for several forms.
        """
        given = [(name, (kind, value)) for name, kind, value in _structures(self) if value is not None]
        if len(given) > 1 and len({_comparable(*form) for _, form in given}) > 1:
            names = [self.name_of(name) for name, _ in given]
            raise invalid(f"{' and '.join(names)} exclude each other: give one of them", param=names[1])
        return given[0][0] if given else None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    def check_stream(self) -> None:
        """Raise ApiError for fields that contradict `stream`."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream = true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs cannot be streamed: set stream = false", param="prompt_logprobs")


def sampling_message(
    fields: GenerationFields, generation_config: Mapping[str, float]
) -> inference_pb2.SamplingParameters:
    """Convert the fields; unset ones come from generation_config.json, and temperature is else 1.

    Raises ApiError for a value out of range.
    """
    message = inference_pb2.SamplingParameters(
        n=fields.n or 1,
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=fields.stop_token_ids or (),
        allowed_token_ids=fields.allowed_token_ids or (),
        bad_words=fields.bad_words or (),
        logit_bias=_logit_bias(fields.logit_bias or {}),
    )
    if fields.seed is not None:
        message.seed = fields.seed % 2**64
    if fields.prompt_logprobs is not None:
        message.prompt_logprobs = fields.prompt_logprobs
    _set_numbers(message, fields, generation_config)
    _set_structure(message, fields)
    return message


def _set_numbers(
    message: inference_pb2.SamplingParameters,
    fields: GenerationFields,
    generation_config: Mapping[str, float],
) -> None:
    defaults = {"temperature": 1.0, **generation_config}
    for number in SAMPLING_NUMBERS:
        value = getattr(fields, number.name)
        if value is not None and value not in number.range:
            raise invalid(f"{number.name} is {value:g}, must be in {number.range}", param=number.name)
        if value is None:
            value = defaults.get(number.name)
        if value is not None:
            setattr(message, number.name, value)
    top_k = defaults.get("top_k", 0) if fields.top_k is None else fields.top_k
    if top_k > 0:  # vLLM writes -1 for all
        message.top_k = int(top_k)


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for key, bias in biases.items():
        if (token_id := parse_digits(key, limit=MAX_UINT32)) is None:
            raise invalid(f"logit_bias has key {key[:20]!r}, which is not a token id", param="logit_bias")
        found[token_id] = bias
    return found


def _set_structure(message: inference_pb2.SamplingParameters, fields: GenerationFields) -> None:
    """Set the form of the output's text. Raises ApiError for more than one."""
    structure = fields.structure
    for name, field, value in _structures(fields):
        if name != structure:
            continue
        match field:
            case "json_schema":
                message.json_schema = value if isinstance(value, str) else json.dumps(value)
            case "regex":
                message.regex = value
            case "choice":
                message.choice.texts.extend(value)
            case "grammar":
                message.grammar = value


def structure_names(
    fields: GenerationFields, sampling: inference_pb2.SamplingParameters, *, default: str = ""
) -> dict[str, str]:
    """Return the client's name for the coordinator's field of structured output, or `default`."""
    if (field := sampling.WhichOneof("structured_output")) is None:
        return {}
    return {field: default if fields.structure is None else fields.name_of(fields.structure)}


def _comparable(kind: str, value: Any) -> tuple[str, str]:
    """The same for each way to write a form: a schema may be JSON or its text.

    The order of keys counts, since a schema's properties are written in their order.
    """
    is_text = kind == "json_schema" and isinstance(value, str)
    try:
        return kind, json.dumps(json.loads(value) if is_text else value)
    except (ValueError, RecursionError):  # refused when it is compiled
        return kind, value


_ANY_OBJECT = {"type": "object"}


def _structures(fields: GenerationFields) -> list[tuple[str, str, Any]]:
    """Field of the request, field of SamplingParameters, and value of each way to ask for a form."""
    structured = fields.structured_outputs or StructuredOutputs()
    return [
        ("response_format", "json_schema", response_schema(fields.response_format)),
        ("structured_outputs.json", "json_schema", structured.json_),
        ("structured_outputs.json_object", "json_schema", _ANY_OBJECT if structured.json_object else None),
        ("structured_outputs.regex", "regex", structured.regex),
        ("structured_outputs.choice", "choice", structured.choice),
        ("structured_outputs.grammar", "grammar", structured.grammar),
        ("guided_json", "json_schema", fields.guided_json),
        ("guided_regex", "regex", fields.guided_regex),
        ("guided_choice", "choice", fields.guided_choice),
        ("guided_grammar", "grammar", fields.guided_grammar),
    ]


def response_schema(form: ResponseFormat | None) -> dict[str, Any] | bool | None:
    """Return the JSON schema that a response format demands; None for any text. Raises ApiError."""
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return _ANY_OBJECT
    if form.json_schema is None:
        raise invalid("response_format has no json_schema", param="response_format.json_schema")
    return form.json_schema.schema_
