"""A response's request: fields that are honoured, accepted or refused, and input items as messages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.conversation import ConversationFields, MessageFields, left_out_tools
from gateway.api.errors import invalid
from gateway.api.fields import Refused, asks_nothing, check_refused
from gateway.api.sampling import GenerationFields, JsonSchema, NumLogprobs, ResponseFormat
from text.chat_template import PARTS_BETWEEN

WITH_LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (WITH_LOGPROBS, "reasoning.encrypted_content")
"""Values of `include`; reasoning is sent as text, so that there is nothing to encrypt."""
OF_BUILT_IN_TOOLS = (
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
"""Values of `include` without effect, since no such item is ever part of a response."""
MAX_LABELS = 16
MAX_LABEL_CHARACTERS = (64, 512)

REFUSED: Mapping[str, Refused] = {
    "n": Refused("a response has one output", (1,)),
    "stop": Refused("responses have no stop strings: use /v1/chat/completions", ([], "")),
    "include_stop_str_in_output": Refused("responses have no stop strings", (False,)),
    "max_tokens": Refused("use max_output_tokens"),
    "response_format": Refused("use text.format"),
    "prompt_logprobs": Refused("use /v1/completions"),
    "return_token_ids": Refused("use /v1/chat/completions", (False,)),
    "truncate_prompt_tokens": Refused("shorten the input"),
    "truncation": Refused("shorten the input", ("disabled",)),
    "conversation": Refused("no conversations are stored: use previous_response_id"),
    "prompt": Refused("no prompts are stored: use input and instructions"),
    "moderation": Refused("there is no moderation"),
    "context_management": Refused("shorten the input", ([],)),
}
"""Fields that are not served, though others of the same request classes or of OpenAI are."""

ACCEPTED: Mapping[str, str] = {
    "max_tool_calls": "limits built-in tools, of which there are none",
    "background_options": "there is one speed",
    "prompt_cache_options": "prefixes are shared by content",
    "access_programs": "there are none",
}
"""Fields without effect beside the list of `gateway.api.fields`, and why."""

OWN_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Names of fields that a conversation of chat completions names otherwise."""

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_ROLES = ("user", "assistant", "system", "developer")

Item = Mapping[str, Any]
Message = dict[str, Any]


class TextFormat(BaseModel):
    """Form of the output's text."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class TextFields(BaseModel):
    """`text` of a request."""

    model_config = ConfigDict(extra="allow", strict=True)

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningFields(BaseModel):
    """`reasoning` of a request; reasoning is sent whole, never as a summary."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: str | None = None


class ResponseConversation(ConversationFields):
    """The conversation of a response, whose errors have the names of this API."""

    own_names = OWN_NAMES
    schema_name = "parameters"


class ResponseRequest(GenerationFields):
    """Body of a response's request."""

    known_extra = frozenset({*REFUSED, *ACCEPTED})
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the response can be retrieved."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return WITH_LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raise ApiError for fields that cannot be served, and for those that contradict each other."""
        self.check_stream()
        check_refused({**self.__dict__, **(self.model_extra or {})}, REFUSED)
        for index, name in enumerate(self.include or ()):
            if name not in (*INCLUDABLE, *OF_BUILT_IN_TOOLS):
                raise invalid(
                    f"include[{index}] is {name[:60]!r}, must be one of {', '.join(INCLUDABLE)}",
                    param=f"include[{index}]",
                )
        if self.background and not self.is_stored:
            raise invalid("background needs store = true: its response is retrieved", param="background")
        if self.input is None:
            raise invalid("input is missing: a text, or a list of items", param="input")
        self._check_metadata()

    def without_effect(self) -> Sequence[str]:
        verbosity = None if self.text is None else self.text.verbosity
        included = enumerate(self.include or ())
        return [
            *left_out_tools(self.tools),
            *(f"include[{index}] ({name})" for index, name in included if name in OF_BUILT_IN_TOOLS),
            *(() if asks_nothing("verbosity", verbosity) else ("text.verbosity",)),
        ]

    def text_form(self) -> ResponseFormat | None:
        """`text.format` as chats have it. Raises ApiError."""
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        if form.type == "json_schema" and form.schema_ is None:
            raise invalid("text.format has no schema", param="text.format.schema")
        schema = None if form.schema_ is None else JsonSchema(schema=form.schema_)
        return ResponseFormat(type=form.type, json_schema=schema)

    def chat_fields(self, messages: Sequence[Mapping[str, Any]]) -> ConversationFields:
        """The request as a conversation of these messages. Raises ApiError."""
        sampling = {name: getattr(self, name) for name in GenerationFields.model_fields}
        more = {
            "response_format": self.text_form(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return ResponseConversation(
            messages=[MessageFields(**message) for message in messages], **{**sampling, **more}
        )

    def _check_metadata(self) -> None:
        labels = self.metadata or {}
        key_characters, value_characters = MAX_LABEL_CHARACTERS
        if len(labels) > MAX_LABELS:
            raise invalid(f"metadata has {len(labels)} labels, the limit is {MAX_LABELS}", param="metadata")
        for key, value in labels.items():
            if len(key) > key_characters or len(value) > value_characters:
                raise invalid(
                    f"metadata has a label of {len(key)} and {len(value)} characters, the limits are "
                    f"{key_characters} and {value_characters}",
                    param="metadata",
                )


def input_items(given: str | Sequence[Item]) -> list[Item]:
    """The input as items; a text is a user's message."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given)


def is_reference(item: Item) -> bool:
    """Whether an item stands for a stored one; its type may be missing."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item and "id" in item)


def chat_messages(instructions: str | None, items: Sequence[Item], *, first: int = 0) -> list[Message]:
    """Return the messages of a conversation. Raises ApiError that names the item; `first` is one before.

    Reasoning, text and calls that follow each other are one message of the assistant.
    """
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for index, item in enumerate(items):
        param = f"input[{index - first}]" if index >= first else "previous_response_id"
        _add_item(messages, item, param)
    return messages


def _add_item(messages: list[Message], item: Item, param: str) -> None:
    match item.get("type") or "message":
        case "message":
            _add_message(messages, item, param)
        case "reasoning":
            text = _text(item.get("content") or item.get("summary") or (), f"{param}.content")
            if text:
                _assistant(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text
        case "function_call":
            function = {name: string_of(item, name, param) for name in ("name", "arguments")}
            call = {"id": string_of(item, "call_id", param), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            call_id = string_of(item, "call_id", param)
            content = _text(item.get("output"), f"{param}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case other:
            raise invalid(
                f"{param} is of type {str(other)[:60]!r}: messages, reasoning and function calls are served",
                param=param,
            )


def _add_message(messages: list[Message], item: Item, param: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(
            f"{param} has role {str(role)[:60]!r}, must be {', '.join(_ROLES)}", param=f"{param}.role"
        )
    content = _text(item.get("content"), f"{param}.content")
    if role == "assistant":
        _assistant(messages, "content", "tool_calls")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _assistant(messages: list[Message], *taken: str) -> Message:
    """The assistant's last message, or a new one if it has one of the `taken` fields."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and not any(last.get(name) for name in taken):
        return last
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise invalid(f"{param} is missing: a text, or a list of parts", param=param)
    return PARTS_BETWEEN.join(_part_texts(content, param))


def _part_texts(parts: Sequence[Any], param: str) -> Iterator[str]:
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            name = f"{param}[{index}]"
            raise invalid(f"{name} is of type {str(kind)[:60]!r}: only text is served", param=name)
        yield text


def string_of(item: Item, name: str, param: str) -> str:
    """Return a text of an item. Raises ApiError."""
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{param}.{name} is {str(value)[:60]!r}, must be a text", param=f"{param}.{name}")
    return value
