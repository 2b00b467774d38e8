"""A request for a message: fields, and content blocks as messages of a chat template."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gateway.api.conversation import ConversationFields, MessageFields, left_out_tools
from gateway.api.errors import invalid
from gateway.api.fields import Refused, check_refused
from gateway.api.sampling import GenerationFields, JsonSchema, ResponseFormat
from text.chat_template import PARTS_BETWEEN

REFUSED: Mapping[str, Refused] = {
    "n": Refused("a message is one answer", (1,)),
    "stop": Refused("use stop_sequences", ([], "")),
    "include_stop_str_in_output": Refused("a message ends before its stop sequence", (False,)),
    "response_format": Refused("use output_config.format"),
    "prompt_logprobs": Refused("use /v1/completions"),
    "return_token_ids": Refused("use /v1/chat/completions", (False,)),
    "stream_options": Refused("every stream ends with its usage"),
    "mcp_servers": Refused("the gateway calls no tools", ([],)),
    "container": Refused("the gateway runs no code"),
}
"""Fields that are not served, though others of the same request classes or of Anthropic are."""

ACCEPTED: Mapping[str, str] = {
    "cache_control": "prefixes are shared by content",
    "context_management": "the whole conversation is used",
    "diagnostics": "there are none",
    "inference_geo": "there is one place",
    "speed": "there is one speed",
}
"""Fields without effect beside the list of `gateway.api.fields`, and why."""

_ROLES = ("assistant", "system", "developer")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
OWN_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""Names of fields that a conversation of chat completions names otherwise."""
Block = Mapping[str, Any]
Message = dict[str, Any]


class InputMessage(BaseModel):
    """A message of the conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[dict[str, Any]]


class ThinkingFields(BaseModel):
    """`thinking` of a request; the budget is not enforced."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


class OutputFormat(BaseModel):
    """The JSON schema of the answer's text."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class OutputConfig(BaseModel):
    """`output_config` of a request."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: str | None = None
    format: OutputFormat | None = None


class MessageConversation(ConversationFields):
    """The conversation of a message, whose errors have Anthropic's names."""

    own_names = OWN_NAMES
    schema_name = "input_schema"


class PromptFields(GenerationFields):
    """Body of a request for the number of tokens of a conversation."""

    known_extra = frozenset({*REFUSED, *ACCEPTED})
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_fields(self) -> ConversationFields:
        """The request as a conversation. Raises ApiError."""
        check_refused({**self.__dict__, **(self.model_extra or {})}, REFUSED)
        messages = chat_messages(self.system, self.messages)
        choice = self.tool_choice or {}
        sampling = {name: getattr(self, name) for name in GenerationFields.model_fields}
        more: dict[str, Any] = {
            "stop": self._stop_sequences(),
            "response_format": self._form(),
            "reasoning_effort": None if self.output_config is None else self.output_config.effort,
            "chat_template_kwargs": self._template_variables(),
            "tools": [_tool(index, tool) for index, tool in enumerate(self.tools or ())],
            "tool_choice": _tool_choice(choice),
            "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
            "continue_final_message": _is_prefilled(messages),
        }
        return MessageConversation(
            messages=[MessageFields(**message) for message in messages], **{**sampling, **more}
        )

    def without_effect(self) -> Sequence[str]:
        return left_out_tools([_tool(index, tool) for index, tool in enumerate(self.tools or ())])

    def _stop_sequences(self) -> list[str] | None:
        return None

    def _form(self) -> ResponseFormat | None:
        form = None if self.output_config is None else self.output_config.format
        if form is None:
            return None
        if form.type != "json_schema" or form.schema_ is None:
            raise invalid(
                "output_config.format is no JSON schema: give type 'json_schema' and schema",
                param="output_config.format",
            )
        return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema_))

    def _template_variables(self) -> dict[str, Any]:
        """Chat templates that can think read one of two names."""
        if self.thinking is None:
            return dict(self.chat_template_kwargs or {})
        thinks = self.thinking.type != "disabled"
        return {"enable_thinking": thinks, "thinking": thinks, **(self.chat_template_kwargs or {})}


class MessageRequest(PromptFields):
    """Body of a request for a message."""

    stop_sequences: list[str] | None = None

    def _stop_sequences(self) -> list[str] | None:
        return self.stop_sequences

    def chat_fields(self) -> ConversationFields:
        """The request as a conversation. Raises ApiError."""
        if self.max_tokens is None:
            raise invalid(
                "max_tokens is missing: the maximum number of tokens to generate", param="max_tokens"
            )
        return super().chat_fields()


def _is_prefilled(messages: Sequence[Message]) -> bool:
    """Whether the answer continues the last message."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and not last.get("tool_calls")


def _tool(index: int, tool: Block) -> dict[str, Any]:
    """Return a tool in the form of chat completions; Anthropic's own tools stay. Raises ApiError."""
    param = f"tools[{index}]"
    if tool.get("type") not in (None, "custom"):
        return dict(tool)
    if "input_schema" not in tool:
        raise invalid(f"{param} has no input_schema, the JSON schema of its input", param=param)
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(choice: Block) -> str | dict[str, Any] | None:
    if not choice:
        return None
    kind = choice.get("type")
    if isinstance(kind, str) and kind in _TOOL_CHOICES:
        return _TOOL_CHOICES[kind]
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise invalid("tool_choice.type is none of auto, any, tool, none", param="tool_choice.type")


def chat_messages(system: str | Sequence[Block] | None, messages: Sequence[InputMessage]) -> list[Message]:
    """Return the messages of a conversation. Raises ApiError that names the block."""
    found: list[Message] = []
    if system:
        found.append({"role": "system", "content": _text(system, "system")})
    for index, message in enumerate(messages):
        param = f"messages[{index}].content"
        if isinstance(message.content, str):
            found.append({"role": _role(message.role), "content": message.content})
        elif message.role == "assistant":
            found.append(_assistant_message(message.content, param))
        else:
            found += _user_messages(_role(message.role), message.content, param)
    return found


def _role(role: str) -> str:
    """Roles of other servers are the user's."""
    return role if role in _ROLES else "user"


def _assistant_message(blocks: Sequence[Block], param: str) -> Message:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        match block.get("type"):
            case "thinking":
                thoughts.append(_string(block, "thinking", f"{param}[{index}]"))
            case "redacted_thinking":
                pass  # of another model
            case "tool_use":
                calls.append(_call(block, f"{param}[{index}]"))
            case _:
                texts.append(_block_text(block, f"{param}[{index}]"))
    message: Message = {"role": "assistant", "content": PARTS_BETWEEN.join(texts)}
    if thoughts:
        message["reasoning_content"] = PARTS_BETWEEN.join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block, param: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise invalid(f"{param}.input is no object", param=f"{param}.input")
    function = {"name": _string(block, "name", param), "arguments": arguments}
    return {"id": _string(block, "id", param), "type": "function", "function": function}


def _user_messages(role: str, blocks: Sequence[Block], param: str) -> Iterator[Message]:
    """The results of tools are messages of their own, before or after the text as in the blocks."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(_block_text(block, f"{param}[{index}]"))
            continue
        if texts:
            yield {"role": role, "content": PARTS_BETWEEN.join(texts)}
            texts = []
        content = _text(block.get("content") or "", f"{param}[{index}].content")
        call_id = _string(block, "tool_use_id", f"{param}[{index}]")
        yield {"role": "tool", "tool_call_id": call_id, "content": content}
    if texts or not blocks:
        yield {"role": role, "content": PARTS_BETWEEN.join(texts)}


def _text(content: str | Sequence[Block], param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{param} is no text and no list of blocks", param=param)
    return PARTS_BETWEEN.join(_block_text(block, f"{param}[{index}]") for index, block in enumerate(content))


def _block_text(block: Any, param: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind != "text":
        raise invalid(f"{param} is of type {str(kind)[:60]!r}: only text is served", param=param)
    return _string(block, "text", param)


def _string(block: Block, name: str, param: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{param}.{name} is {str(value)[:60]!r}, must be a text", param=f"{param}.{name}")
    return value
